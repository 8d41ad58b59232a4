"""The editor of the system prompt."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.widgets import Static, TextArea

from edgespec.tui.screens.form import FormScreen

__all__ = ["SystemScreen"]


class SystemScreen(FormScreen[str]):
    """Editor of the system prompt. The result is the new text, which may be empty, or None after Cancel."""

    heading = "System prompt"

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose_fields(self) -> ComposeResult:
        """Create the text area."""
        yield Static("How the model should answer. This applies from your next message on.", classes="hint")
        yield TextArea(self._text, soft_wrap=True, highlight_cursor_line=False, id="system-text")

    def on_mount(self) -> None:
        """Move the cursor to the end of the text."""
        area = self.query_one("#system-text", TextArea)
        area.move_cursor(area.document.end)
        area.focus()

    def action_keep(self) -> None:
        """Close the editor and return its text."""
        self.dismiss(self.query_one("#system-text", TextArea).text.strip())
