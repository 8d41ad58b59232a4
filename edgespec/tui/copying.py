"""Copy text, and the code blocks of a message, to the clipboard."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from edgespec.errors import OptionError
from edgespec.tui.numbers import count
from edgespec.tui.open_chat import ChatEntry, code_blocks

if TYPE_CHECKING:
    from edgespec.tui.chat_screen import ChatScreen

__all__ = ["CodeCopier", "copy_text", "numbered_place", "unknown_copy_argument"]

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
        await _copy(screen, blocks, place)

    async def copy_numbered(self, screen: ChatScreen, entry: ChatEntry | None, number: str) -> None:
        """Copy the code block with this number, counted from 1. Raises OptionError if it does not exist."""
        blocks = code_blocks(entry.content) if entry is not None else []
        await _copy(screen, blocks, numbered_place(blocks, number))


def numbered_place(blocks: Sequence[str], number: str) -> int:
    """Return the index of the code block with this number, counted from 1.

    Raises:
        OptionError: There is no such block.
    """
    if not blocks:
        raise OptionError("The last reply has no code block", "Type /copy to copy all of it")
    if not (number.isdecimal() and 1 <= int(number) <= len(blocks)):
        raise OptionError(
            f"There is no code block {number}. The last reply has {count(len(blocks), 'code block')}",
            "Type /copy code for the last one, or a number, such as /copy code 1",
        )
    return int(number) - 1


def unknown_copy_argument(argument: str) -> OptionError:
    """Return the error for an argument of `/copy` that does not exist."""
    return OptionError(
        f"Unknown argument {argument!r} for /copy",
        "Type /copy for the last reply, /copy code for its last code block, or /copy chat for everything",
    )


async def _copy(screen: ChatScreen, blocks: list[str], place: int) -> None:
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
