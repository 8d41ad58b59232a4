"""Shell commands to show in messages, such as the command that installs missing packages."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

__all__ = ["chat_command", "pip_command", "setup_command"]


def chat_command() -> str:
    """Return the shell command that starts a chat, in the form that the user used to start edgespec.

    That is scripts/chat if this script set `_EDGESPEC_CHAT_COMMAND`, `edgespec chat` if the one on PATH is
    this installation, or else Python with `-m edgespec chat`.
    """
    if script := os.environ.get("_EDGESPEC_CHAT_COMMAND"):
        return script
    on_path = shutil.which("edgespec")
    if on_path is not None and Path(on_path).parent == Path(sys.executable).parent:
        return "edgespec chat"
    return f"{shlex.quote(sys.executable)} -m edgespec chat"


def setup_command(packages: str = "") -> str:
    """Return the command that installs edgespec's own or optional packages, such as `scripts/setup mlx`.

    edgespec is not on PyPI, so pip could install an unrelated project of that name.

    Args:
        packages: `mlx`, `mlx-cuda` or `dev`. Empty for the packages that edgespec always needs.
    """
    source = Path(__file__).resolve().parents[2]
    script = source / "scripts" / "setup"
    path = str(script) if script.is_file() and Path.cwd() != source else "scripts/setup"
    return f"{shlex.quote(path)} {packages}".rstrip()


def pip_command(*arguments: str) -> str:
    """Return a pip command for edgespec's own Python environment."""
    return shlex.join([sys.executable, "-m", "pip", "install", *arguments])
