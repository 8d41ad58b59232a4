"""Look up package versions, and build shell commands to show in messages."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from functools import cache
from pathlib import Path

# CMake options for a build of llama-cpp-python. For weights such as F16, llamafile's matrix kernels round
# differently than those for single tokens, so that checking a draft could change the reply. On Linux,
# `scripts/setup` builds them nevertheless, and keeps them from such weights with `scripts/cpu_kernels.cpp`.
# Elsewhere, it uses these flags.
BUILD_FLAGS = "-DGGML_LLAMAFILE=OFF"
_SETUP = Path(__file__).resolve().parents[2] / "scripts" / "setup"


@cache
def package_version(package: str) -> str:
    """Return the version of an installed package, or an empty string if it is not installed.

    The result is cached, because reading the package's metadata takes a millisecond.
    """
    # Importing this module takes 20 ms, and `edgespec --help` does not need it.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def chat_command() -> str:
    """Return the shell command that starts a chat, matching the way the user started edgespec.

    This is `scripts/chat` if that script set `_EDGESPEC_CHAT_COMMAND`, `edgespec chat` if the `edgespec` on
    PATH belongs to this installation, the path of `edgespec` as the user typed it, such as
    `.venv/bin/edgespec chat`, and Python with `-m edgespec chat` otherwise.
    """
    if script := os.environ.get("_EDGESPEC_CHAT_COMMAND"):
        return script

    def is_own(program: str) -> bool:
        # Compare resolved folders, because a folder on PATH can be a link to this installation. Do not
        # resolve the interpreter itself, which is a link in virtual environments.
        return Path(program).parent.resolve() == Path(sys.executable).parent.resolve()

    on_path, typed = shutil.which("edgespec"), sys.argv[0]
    if on_path is not None and is_own(on_path):
        return "edgespec chat"
    if Path(typed).stem == "edgespec" and Path(typed).is_file() and is_own(typed):
        return f"{shlex.quote(typed)} chat"
    return f"{shlex.quote(sys.executable)} -m edgespec chat"


def setup_command(packages: str = "") -> str:
    """Return the command that installs edgespec's own or optional packages, such as `scripts/setup mlx`.

    edgespec is not on PyPI, so pip could install an unrelated project of that name.

    Args:
        packages: `mlx`, `mlx-cuda` or `dev`. Empty for the packages that edgespec always needs.
    """
    path = str(_SETUP) if _SETUP.is_file() and Path.cwd() != _SETUP.parents[1] else "scripts/setup"
    return f"{shlex.quote(path)} {packages}".rstrip()


def build_command(version: str, *flags: str) -> str:
    """Return a command that builds llama-cpp-python again in edgespec's own Python environment.

    Args:
        version: The version of llama-cpp-python.
        *flags: CMake options in addition to `BUILD_FLAGS`.
    """
    pip = [sys.executable, "-m", "pip", "install", "--force-reinstall", "--no-cache-dir", "--no-deps"]
    install = shlex.join([*pip, f"llama-cpp-python=={version}"])
    if sys.platform != "linux" or not _SETUP.is_file():
        flags = (BUILD_FLAGS, *flags)
    return f'CMAKE_ARGS="{" ".join(flags)}" {install}' if flags else install
