"""Write prompts and read messages in the user's text editor."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from textual.app import App, SuspendNotSupported

from edgespec.chat.message import Message
from edgespec.errors import OptionError
from edgespec.system.files import error_reason, read_regular_file
from edgespec.tui.chat_view import ChatView
from edgespec.tui.widgets.long_texts import MAX_INPUT_CHARACTERS

__all__ = ["show_message", "write_prompt"]

# Editors to try, in this order, if neither VISUAL nor EDITOR is set. nano comes first because it shows its
# key bindings on screen.
_COMMON_EDITORS = ("nano", "vi")
_OTHER_EDITORS = ("vim", "emacs")


def write_prompt(screen: ChatView) -> None:
    """Edit the text of the input box in the editor. If the editor fails, leave the text unchanged."""
    prompt = screen.prompt
    try:
        text = _edited(screen.app, prompt.whole_text).removesuffix("\n")
    except OptionError as error:
        screen.say(f"{error.what}. {error.next_step}.")
        return
    if len(text) > MAX_INPUT_CHARACTERS:
        screen.say(
            f"The edited text was not used: it has {len(text):,} characters, but the input takes at most"
            f" {MAX_INPUT_CHARACTERS:,}."
        )
    elif text != prompt.whole_text:
        prompt.replace_text(text)
    prompt.focus()


def show_message(app: App[None], message: Message) -> None:
    """Show a message in the editor, including its reasoning and attached files. Edits are discarded.

    Raises:
        OptionError: No editor is set, or the editor failed.
    """
    _edited(app, message.with_files_as_text().text)


def _edited(app: App[None], text: str) -> str:
    """Open `text` in the editor and return the saved text. Raises OptionError if the editor fails."""
    command = _editor()
    try:
        with tempfile.TemporaryDirectory(prefix="edgespec-") as folder:
            path = Path(folder, "message.md")
            path.write_text(text, encoding="utf-8", errors="replace", newline="")
            status = _run(app, [*command, str(path)])
            edited = read_regular_file(path, 4 * MAX_INPUT_CHARACTERS).decode("utf-8-sig")
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
    return edited


def _advice() -> str:
    """Return advice for when an editor fails, mentioning an installed editor if there is one."""
    installed = next((name for name in (*_COMMON_EDITORS, *_OTHER_EDITORS) if shutil.which(name)), "")
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
    for editor in _COMMON_EDITORS:
        if shutil.which(editor):
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
