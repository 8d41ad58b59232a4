"""Copy text and code blocks to the clipboard."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import suppress

from textual.app import App

from edgespec.tui.open_chat import ChatEntry, code_blocks

__all__ = ["CodeCopier", "copy_text"]

# Clipboard tools for systems other than macOS, tried in this order until one works.
_TOOLS = (("wl-copy",), ("xclip", "-selection", "clipboard"), ("xsel", "--clipboard", "--input"))


async def copy_text(app: App[None], text: str, name: str) -> str:
    """Copy `text` to the clipboard. Return a confirmation that refers to the text as `name`."""
    if not text:
        return "There is nothing to copy yet."
    app.copy_to_clipboard(text)
    await asyncio.to_thread(_copy_with_desktop_tool, text)
    return f"Copied the {name}."


class CodeCopier:
    """Copies the code blocks of a message one by one, starting with the last."""

    def __init__(self) -> None:
        self._last: tuple[ChatEntry, int] | None = None

    async def copy_next(self, app: App[None], entry: ChatEntry | None) -> str:
        """Copy the last code block of a message. Each further call copies the preceding block.

        Returns:
            A confirmation.
        """
        blocks = code_blocks(entry.content) if entry is not None else []
        if entry is None or not blocks:
            return "There is no code block to copy yet."
        again = self._last is not None and self._last[0] is entry
        place = (self._last[1] - 1) % len(blocks) if again and self._last else len(blocks) - 1
        self._last = (entry, place)
        which = f"code block ({place + 1} of {len(blocks)})" if len(blocks) > 1 else "code block"
        return await copy_text(app, blocks[place].rstrip("\n"), which)


def _copy_with_desktop_tool(text: str) -> None:
    """Copy `text` with pbcopy, wl-copy, xclip or xsel, because not every terminal can set the clipboard."""
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
