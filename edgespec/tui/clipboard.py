"""Copies text with the desktop's clipboard tool, because not every terminal supports OSC 52."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import suppress

__all__ = ["copy_with_desktop_tool"]


def _tools() -> list[list[str]]:
    if sys.platform == "darwin":
        return [["pbcopy"]]
    tools = []
    if os.environ.get("WAYLAND_DISPLAY"):
        tools.append(["wl-copy"])
    if os.environ.get("DISPLAY"):
        tools += [["xclip", "-selection", "clipboard"], ["xsel", "--clipboard", "--input"]]
    return tools


def copy_with_desktop_tool(text: str) -> bool:
    """Copy `text` with pbcopy, wl-copy, xclip or xsel. Return False if none of them works."""
    for command in _tools():
        if shutil.which(command[0]) is None:
            continue
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(
                command,
                input=text.encode("utf-8", "replace"),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=2,
                check=False,
            )
            if done.returncode == 0:
                return True
    return False
