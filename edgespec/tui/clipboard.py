"""Copy text with the desktop's clipboard tool, because not every terminal supports copying."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

__all__ = ["copy_with_desktop_tool"]

_TOOLS = (("wl-copy",), ("xclip", "-selection", "clipboard"), ("xsel", "--clipboard", "--input"))


def copy_with_desktop_tool(text: str) -> None:
    """Copy `text` with pbcopy, wl-copy, xclip or xsel, whichever works first."""
    for command in (("pbcopy",),) if sys.platform == "darwin" else _TOOLS:
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                command,
                input=text.encode("utf-8", "replace"),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=2,
                check=True,
            )
            return
