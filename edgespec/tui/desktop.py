"""Use other programs on this machine: the clipboard and the user's text editor."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from textual.app import App, SuspendNotSupported

from edgespec.chat.message import Message
from edgespec.errors import OptionError
from edgespec.system.files import error_reason, read_regular_file
from edgespec.tui.open_chat import ChatEntry, code_blocks
from edgespec.tui.widgets.long_texts import MAX_INPUT_CHARACTERS

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
        # The message whose code block was copied last, and the index of that block.
        self._entry: ChatEntry | None = None
        self._place = 0

    async def copy_next(self, app: App[None], entry: ChatEntry | None) -> str:
        """Copy the last code block of a message. Each further call copies the preceding block.

        Returns:
            A confirmation.
        """
        blocks = code_blocks(entry.content) if entry is not None else []
        if entry is None or not blocks:
            return "There is no code block to copy yet."
        self._place = ((self._place if entry is self._entry else 0) - 1) % len(blocks)
        self._entry = entry
        which = f"code block ({self._place + 1} of {len(blocks)})" if len(blocks) > 1 else "code block"
        return await copy_text(app, blocks[self._place].rstrip("\n"), which)


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


# Editors to try, in this order, if neither VISUAL nor EDITOR is set. nano comes first because it shows its
# key bindings on screen.
_COMMON_EDITORS = ("nano", "vi", "vim", "emacs")


def show_message(app: App[None], message: Message) -> None:
    """Show a message in the editor, including its reasoning and attached files. Edits are discarded.

    Raises:
        OptionError: No editor is set, or the editor failed.
    """
    edited(app, message.with_files_as_text().text)


def edited(app: App[None], text: str) -> str:
    """Open `text` in the editor and return the saved text.

    Raises:
        OptionError: No editor is set, or the editor failed.
    """
    command = _editor()
    try:
        with tempfile.TemporaryDirectory(prefix="edgespec-") as folder:
            path = Path(folder, "message.md")
            path.write_text(text, encoding="utf-8", errors="replace", newline="")
            status = _run(app, [*command, str(path)])
            saved = read_regular_file(path, 4 * MAX_INPUT_CHARACTERS).decode("utf-8-sig")
    except SuspendNotSupported:
        raise OptionError(
            "An editor cannot be opened in this terminal",
            "Run edgespec in another terminal",
            code="command_unavailable",
        ) from None
    except UnicodeDecodeError:
        raise OptionError(
            "The text was not changed, because the editor did not save it in UTF-8", _advice()
        ) from None
    except OSError as error:
        raise OptionError(f"The editor {command[0]} failed: {error_reason(error)}", _advice()) from error
    if status:
        ending = f"exited with status {status}" if status > 0 else "was interrupted"
        raise OptionError(f"The text was not changed: {command[0]} {ending}", _advice())
    return saved


def _advice() -> str:
    """Return advice for when an editor fails, mentioning an installed editor if there is one."""
    installed = next(filter(shutil.which, _COMMON_EDITORS), "")
    example = f", such as {installed}" if installed else ""
    return f"Set the environment variable EDITOR to an editor on this machine{example}"


def _editor() -> list[str]:
    """Return the command of the user's editor, or of a common editor if none is set. Raises OptionError."""
    for variable in ("VISUAL", "EDITOR"):
        try:
            command = shlex.split(os.environ.get(variable, ""))
        except ValueError:
            raise OptionError(
                f"{variable} is not a valid command: it has an unmatched quote", _advice()
            ) from None
        if command and shutil.which(command[0]) is None:
            raise OptionError(
                f"{variable} is set to {command[0]}, which is not installed",
                _advice(),
                code="command_unavailable",
            )
        if command:
            return command
    if (editor := next(filter(shutil.which, _COMMON_EDITORS), None)) is not None:
        return [editor]
    raise OptionError("No text editor is set", _advice(), code="command_unavailable")


def _run(app: App[None], command: list[str]) -> int:
    """Run the editor in the terminal and return its exit status."""
    with app.suspend():
        # Ignore Ctrl+C, which the terminal sends to both the editor and edgespec, so that the chat continues.
        before = signal.signal(signal.SIGINT, lambda *_: None)
        try:
            return subprocess.run(command, check=False).returncode
        finally:
            signal.signal(signal.SIGINT, before)
