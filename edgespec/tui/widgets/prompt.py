"""The text input. Enter sends the text; Up and Down browse sent messages; @ refers to files.

Messages that wait for the end of the running reply are shown above the input.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from textual import events, work
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message as Event
from textual.strip import Strip
from textual.widgets import Static, TextArea
from textual.widgets.text_area import Edit, EditResult, Location

from edgespec.attachments.clipboard import clipboard_files
from edgespec.attachments.finding import shown_path
from edgespec.chat.prompt_history import PromptHistory
from edgespec.errors import AttachmentError
from edgespec.tui.background import in_thread
from edgespec.tui.commands.table import completion, typed_path
from edgespec.tui.input_syntax import (
    QUOTES,
    block_text,
    ending_reference,
    ends_block,
    open_reference,
    reference,
)
from edgespec.tui.texts import sentences
from edgespec.tui.widgets.files import FileChips, PathList, dropped
from edgespec.tui.widgets.long_texts import MAX_INPUT_CHARACTERS, PastedTexts, too_long_text

UNDO_KEYS = "ctrl+underscore,ctrl+slash"
"""The undo keys, which are those of common shells, because Ctrl+Z suspends the program. Most terminals send
the same character for both.
"""
# Maximum time in seconds to read the clipboard. Encoding a 40-megapixel image takes several seconds.
_MAX_CLIPBOARD_SECONDS = 20.0
# Maximum number of sent messages in the history.
_MAX_SENT_MESSAGES = 500
# Maximum number of waiting messages to show.
_MAX_SHOWN_WAITING = 4


class PromptInput(TextArea):
    """Text input for messages and slash commands."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("shift+enter,ctrl+j,alt+enter", "new_line", show=False),
        # Some terminals cannot distinguish Shift+Up from Up, so Shift+Tab works too.
        Binding("shift+up,shift+tab", "screen.select_message(-1)", show=False),
        Binding("pageup", "screen.page(-1)", show=False),
        Binding("pagedown", "screen.page(1)", show=False),
        Binding(UNDO_KEYS, "undo", show=False),
        Binding("ctrl+v", "paste_image", show=False),
    ]

    @dataclass
    class Sent(Event):
        """Posted when the user presses Enter to send the text."""

        text: str

    def __init__(
        self,
        sent: History,
        paths: PathList,
        chips: FileChips,
        waiting: WaitingMessages,
        pasted: PastedTexts,
        data_folder: Path,
        *,
        id: str,  # noqa: A002 - textual's own name
    ) -> None:
        super().__init__(id=id, tab_behavior="focus", highlight_cursor_line=False, placeholder="Message")
        self._sent = sent
        self._paths = paths
        self._chips = chips
        self._waiting = waiting
        self._data_folder = data_folder
        self._pasted = pasted

    @property
    def whole_text(self) -> str:
        """The whole message, with each label replaced by the pasted text that it represents."""
        return self._pasted.whole(self.text)

    def edit(self, edit: Edit) -> EditResult:
        """Edit the text, treating each pasted-text label as a unit."""
        start, end = edit.top, edit.bottom
        if label := self._label_at(start):
            # Typing inside a label inserts text after it. Deleting part of a label deletes all of it.
            start = start[0], label[1] if start == end else label[0]
        if label := self._label_at(end):
            end = end[0], label[1]
        if (start, end) != (edit.top, edit.bottom):
            edit = Edit(edit.text, start, end, edit.maintain_selection_offset)
        return super().edit(edit)

    def _label_at(self, location: Location) -> tuple[int, int] | None:
        """Return the first and end columns of the label that encloses a location, or None."""
        row, column = location
        # To delete to the end of the text, Textual passes a line number past the last line.
        if row >= self.document.line_count:
            return None
        return self._pasted.label_at(self.document.get_line(row), column)

    def render_line(self, y: int) -> Strip:
        if self.content_size.width < 1:
            # Textual's own method raises an exception if there is no room for text.
            return Strip.blank(self.size.width)
        return super().render_line(y)

    def replace_text(self, text: str) -> None:
        """Replace the text and move the cursor to its end. Previously pasted texts are folded again."""
        self.text = self._pasted.folded(text)
        self.move_cursor(self.document.end)

    def update_suggestion(self) -> None:
        self.suggestion = completion(self.text) if self.cursor_location == self.document.end else ""

    def follow_references(self) -> None:
        """Update the list of paths and the chips after the text or the cursor position has changed."""
        found = self._open_path if self.selection.is_empty else None
        typed = found[0] if found else None
        self._paths.follow(typed)
        self._chips.follow(self.whole_text, typed)

    @property
    def _line_before_cursor(self) -> str:
        row, column = self.cursor_location
        return self.document.get_line(row)[:column]

    @property
    def _open_path(self) -> tuple[str, int] | None:
        """The path before the cursor (a reference or a command's argument) and its first column, or None."""
        line = self._line_before_cursor
        return typed_path(line if line == self.text else "") or open_reference(line)

    def choose_path(self, path: str) -> None:
        """Replace the path at the cursor with `path`."""
        found = self._open_path
        if found is None:
            return
        row, column = self.cursor_location
        if typed_path(self.text):
            text = path
        else:
            # Leave out the closing quote after a folder, so that completion can continue inside the folder.
            written = reference(path)
            text = written.removesuffix('"') if path.endswith("/") else f"{written} "
        self.replace(text, (row, found[1]), (row, column))

    def _remove_reference(self) -> bool:
        """Remove the whole reference before the cursor if it has a chip. Return whether it was removed."""
        found = ending_reference(self._line_before_cursor) if self.selection.is_empty else None
        if found is None or not self._chips.shows(found[0]):
            return False
        row, column = self.cursor_location
        self.delete((row, column - found[1]), (row, column))
        return True

    async def _on_key(self, event: events.Key) -> None:
        if self._paths.display and event.key in ("up", "down"):
            (self._paths.action_cursor_up if event.key == "up" else self._paths.action_cursor_down)()
        elif event.key in ("enter", "tab") and (path := self._paths.chosen):
            self.choose_path(path)
        elif event.key == "backspace" and self._remove_reference():
            pass
        elif event.key == "enter" and self.is_in_block:
            self.action_new_line()
        elif event.key == "enter":
            # Clear the input before sending, so that keys pressed meanwhile start a new message.
            text = block_text(self.text.rstrip().split("\n")) if self.text.startswith(QUOTES) else self.text
            self.clear()
            self.post_message(self.Sent(self._pasted.whole(text)))
        elif event.key == "tab" and self.text.startswith("/"):
            # Tab completes a command. Without a suggestion, do nothing, so that Tab does not move the focus.
            if self.suggestion:
                self.insert(self.suggestion + " ")
        elif event.key == "question_mark" and not self.text:
            await self.run_action("screen.help")
        elif event.key == "ctrl+d" and not self.text:
            await self.run_action("app.quit")
        else:
            await super()._on_key(event)
            return
        event.stop()
        event.prevent_default()

    @property
    def is_in_block(self) -> bool:
        """Whether the text starts with triple quotes that have not been closed yet, as in Ollama's chat."""
        return self.text.startswith(QUOTES) and not ends_block(self.text.rstrip().split("\n"))

    async def _on_paste(self, event: events.Paste) -> None:
        if len(event.text) > MAX_INPUT_CHARACTERS:
            self.notify(too_long_text(len(event.text)), markup=False)
            event.stop()
            event.prevent_default()
        elif not event.text:
            # Terminals paste empty text if the clipboard contains an image.
            self.action_paste_image()
        elif paths := await dropped(event.text):
            self._insert_references(paths)
            event.stop()
            event.prevent_default()
        elif self._pasted.is_long(event.text):
            event.stop()
            event.prevent_default()
            label = self._pasted.fold(event.text, await self._chips.count_tokens(event.text))
            self.replace(label, *self.selection, maintain_selection_offset=False)

    def _insert_references(self, paths: Sequence[str]) -> None:
        self.insert(references_to(paths, self.text, self._line_before_cursor))

    @work(exclusive=True)
    async def action_paste_image(self) -> None:
        """Attach the image in the clipboard. If there is none, paste the text last copied in the chat."""
        problem = "The clipboard contains no image."
        paths: list[str] = []
        try:
            reading = in_thread(partial(clipboard_files, self._data_folder))
            paths = await asyncio.wait_for(reading, _MAX_CLIPBOARD_SECONDS)
        except TimeoutError:
            problem = (
                "The clipboard could not be read, because the program that provides it is not responding."
            )
        except AttachmentError as error:
            problem = sentences(error.what, error.next_step)
        if paths:
            self._insert_references([shown_path(Path(path)) for path in paths])
        elif self.app.clipboard:
            self.action_paste()
        else:
            self.notify(problem, markup=False)

    def action_new_line(self) -> None:
        self.insert("\n")

    def action_cursor_up(self, select: bool = False) -> None:
        """Move the cursor up. On the first line, replace the text with the previous message.

        If the input is empty and messages wait for the end of the reply, put the newest one back into the
        input.
        """
        if select or not self.navigator.is_first_wrapped_line(self.cursor_location):
            super().action_cursor_up(select)
        elif self._waiting.texts and not self.text:
            self.replace_text(self._waiting.take(-1))
        elif (older := self._sent.older(self.whole_text)) is not None:
            self.replace_text(older)

    def action_cursor_down(self, select: bool = False) -> None:
        """Move the cursor down. On the last line, replace the text with the next message."""
        if select or not self.navigator.is_last_wrapped_line(self.cursor_location):
            super().action_cursor_down(select)
        elif (newer := self._sent.newer()) is not None:
            self.replace_text(newer)


def references_to(paths: Sequence[str], text: str, before: str) -> str:
    """Return the text to insert for dropped files: references to them, or a path if a command is being typed.

    Args:
        paths: The paths of the files.
        text: The whole text of the input.
        before: The text before the cursor.
    """
    if typed_path(text) is not None:
        # The argument of a command is a single path without `@`.
        return paths[0]
    # A reference must be preceded by a space.
    space = " " if before[-1:].strip() else ""
    return space + "".join(f"{reference(path)} " for path in paths)


class History:
    """The messages that the user has sent, and the unsent text in the input.

    Args:
        saved: The file of prompts from earlier runs, to which new prompts are added. If None, no prompts are
            loaded or saved.
    """

    def __init__(self, saved: PromptHistory | None = None) -> None:
        self._saved = saved
        self._sent: list[str] = saved.read() if saved is not None else []
        self._place = len(self._sent)
        self._unsent = ""
        self._is_newest_saved = bool(self._sent)

    @property
    def draft(self) -> str:
        """The text that an earlier message has replaced in the input, or an empty string."""
        return self._unsent if self._place < len(self._sent) else ""

    @property
    def shown(self) -> str | None:
        """The earlier message that was put into the input, or None."""
        return self._sent[self._place] if self._place < len(self._sent) else None

    def add(self, text: str) -> bool:
        """Append a message and save it. Return whether it is saved."""
        self._add_draft()
        if self._append(text) and self._saved is not None:
            self._is_newest_saved = self._saved.add(text)
        return self._is_newest_saved

    def _append(self, text: str) -> bool:
        new = bool(text.strip()) and self._sent[-1:] != [text]
        if new:
            self._sent.append(text)
            del self._sent[:-_MAX_SENT_MESSAGES]
            self._is_newest_saved = False
        self._place = len(self._sent)
        self._unsent = ""
        return new

    def seed(self, texts: Iterable[str]) -> None:
        """Add an opened chat's user messages to the input history."""
        self._add_draft()
        for text in texts:
            self._append(text)

    def _add_draft(self) -> None:
        """Append the replaced text, so that it is not lost when a new message ends browsing."""
        if draft := self.draft:
            self._place = len(self._sent)
            self.add(draft)

    def older(self, current: str) -> str | None:
        """Go to the previous message and return it, or None at the oldest. `current` is the input's text."""
        if self._place == 0:
            return None
        if self._place == len(self._sent):
            self._unsent = current
        self._place -= 1
        return self._sent[self._place]

    def newer(self) -> str | None:
        """Go to the next message and return it. After the newest, return the unsent text, then None."""
        if self._place == len(self._sent):
            return None
        self._place += 1
        return self._unsent if self._place == len(self._sent) else self._sent[self._place]


class WaitingMessages(Static):
    """Messages entered during a reply or while a model was loading, to be sent one at a time.

    Attributes:
        texts: The messages, oldest first.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.texts: list[str] = []

    def add(self, text: str) -> None:
        """Add a message to the end of the queue."""
        self.texts.append(text)
        self._show()

    def take(self, place: int) -> str:
        """Remove and return the oldest message (0) or the newest one (-1)."""
        text = self.texts.pop(place)
        self._show()
        return text

    def take_texts(self) -> list[str]:
        """Remove and return all messages, oldest first."""
        texts, self.texts = self.texts, []
        self._show()
        return texts

    def take_all(self) -> str:
        """Remove all messages and return them joined with blank lines."""
        return "\n\n".join(self.take_texts())

    def _show(self) -> None:
        rows = [Content.assemble(("Waiting  ", "$primary"), " ".join(text.split())) for text in self.texts]
        if len(rows) > _MAX_SHOWN_WAITING:
            hidden = len(rows) - _MAX_SHOWN_WAITING + 1
            rows = [Content.styled(f"{hidden} older messages are also waiting", "$muted"), *rows[hidden:]]
        self.update(Content("\n").join(rows))
        self.display = bool(rows)
