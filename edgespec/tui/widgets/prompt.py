"""The text input. Enter sends the text; Up and Down browse sent messages."""

from __future__ import annotations

from dataclasses import dataclass

from textual import events
from textual.message import Message as Event
from textual.widgets import TextArea

from edgespec.tui.commands import completion
from edgespec.tui.history import History

__all__ = ["PromptInput"]

_NEW_LINE_KEYS = frozenset({"shift+enter", "ctrl+j", "alt+enter"})


class PromptInput(TextArea):
    """Text input for messages and slash commands."""

    @dataclass
    class Sent(Event):
        """Enter was pressed."""

        text: str

    class HelpWanted(Event):
        """A question mark was typed into the empty input."""

    @dataclass
    class Scroll(Event):
        """Request to scroll the transcript by `pages` pages. Negative values scroll up."""

        pages: int

    class EndOfInput(Event):
        """Ctrl+D was pressed on the empty input."""

    def __init__(self, sent: History, *, id: str) -> None:  # noqa: A002 - textual's own name
        super().__init__(
            id=id,
            soft_wrap=True,
            tab_behavior="focus",
            show_line_numbers=False,
            highlight_cursor_line=False,
            placeholder="Message",
        )
        self._sent = sent

    def replace_text(self, text: str) -> None:
        """Replace the text and move the cursor to its end."""
        self.text = text
        self.move_cursor(self.document.end)

    def update_suggestion(self) -> None:
        """Suggest the rest of a partly typed slash command."""
        at_end = self.cursor_location == self.document.end
        self.suggestion = completion(self.text) if at_end else ""

    async def _on_key(self, event: events.Key) -> None:
        if event.key in _NEW_LINE_KEYS:
            self.insert("\n")
        elif event.key == "enter":
            self.post_message(self.Sent(self.text))
        elif event.key == "tab" and self.suggestion:
            self.insert(self.suggestion + " ")
        elif event.key == "question_mark" and not self.text:
            self.post_message(self.HelpWanted())
        elif event.key == "ctrl+d" and not self.text:
            self.post_message(self.EndOfInput())
        else:
            await super()._on_key(event)
            return
        event.stop()
        event.prevent_default()

    def action_cursor_up(self, select: bool = False) -> None:
        """Move up a line. In the first line, show the previous sent message."""
        if not select and self.navigator.is_first_wrapped_line(self.cursor_location):
            older = self._sent.older(self.text)
            if older is not None:
                self.replace_text(older)
            return
        super().action_cursor_up(select)

    def action_cursor_down(self, select: bool = False) -> None:
        """Move down a line. In the last line, show the next sent message."""
        if not select and self.navigator.is_last_wrapped_line(self.cursor_location):
            newer = self._sent.newer()
            if newer is not None:
                self.replace_text(newer)
            return
        super().action_cursor_down(select)

    def action_cursor_page_up(self) -> None:
        """Scroll the transcript up one page, because the input itself is too short to scroll."""
        self.post_message(self.Scroll(-1))

    def action_cursor_page_down(self) -> None:
        """Scroll the transcript down one page."""
        self.post_message(self.Scroll(1))
