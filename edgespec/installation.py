"""Commands for error messages that install missing packages. They work when copied to a shell as they are."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

__all__ = ["pip_command", "setup_command"]


def setup_command(packages: str = "") -> str:
    """Return the command that installs edgespec's own or optional packages, such as `scripts/setup mlx`.

    It never names edgespec to pip, which could install another project's package of that name.

    Args:
        packages: `mlx`, `mlx-cuda` or `dev`. Empty for the packages that edgespec always needs.
    """
    source = Path(__file__).resolve().parent.parent
    script = source / "scripts" / "setup"
    # Without its source folder, edgespec was installed as a package, and the user knows where the source is.
    path = str(script) if script.is_file() and Path.cwd() != source else "scripts/setup"
    return f"{shlex.quote(path)} {packages}".rstrip()


def pip_command(*arguments: str) -> str:
    """Return a pip command that changes the Python environment in which edgespec runs."""
    return shlex.join([sys.executable, "-m", "pip", "install", *arguments])
