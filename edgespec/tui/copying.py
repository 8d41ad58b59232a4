"""Copy text, and the code blocks of a message, to the clipboard."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from edgespec.tui.open_chat import ChatEntry, code_blocks

if TYPE_CHECKING:
    from edgespec.tui.chat_screen import ChatScreen

__all__ = ["CodeCopier", "copy_text"]

# Run the first one that works.
_TOOLS = (("wl-copy",), ("xclip", "-selection", "clipboard"), ("xsel", "--clipboard", "--input"))


async def copy_text(screen: ChatScreen, text: str, name: str) -> None:
    """Copy `text` to the clipboard and show a confirmation that refers to the text as `name`."""
    if not text:
        screen.say(f"There is no {name} to copy yet.")
        return
    screen.app.copy_to_clipboard(text)
    await asyncio.to_thread(_copy_with_desktop_tool, text)
    screen.say(f"Copied the {name}.")


class CodeCopier:
    """Copies the code blocks of a message one by one, starting with the last."""

    def __init__(self) -> None:
        self._last: tuple[ChatEntry, int] | None = None

    async def copy_next(self, screen: ChatScreen, entry: ChatEntry | None) -> None:
        """Copy the last code block of a message. Each further call copies the preceding block."""
        blocks = code_blocks(entry.content) if entry is not None else []
        if entry is None or not blocks:
            screen.say("There is no code block to copy yet.")
            return
        again = self._last is not None and self._last[0] is entry
        place = (self._last[1] - 1) % len(blocks) if again and self._last else len(blocks) - 1
        self._last = (entry, place)
        which = f"code block ({place + 1} of {len(blocks)})" if len(blocks) > 1 else "code block"
        await copy_text(screen, blocks[place].rstrip("\n"), which)


def _copy_with_desktop_tool(text: str) -> None:
    """Copy `text` with pbcopy, wl-copy, xclip or xsel, because not every terminal supports copying."""
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
