"""The editor of the system prompt."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.widgets import Static, TextArea

from edgespec.tui.screens.form import FormScreen

__all__ = ["SystemScreen"]


class SystemScreen(FormScreen[str]):
    """Edit the system prompt. The result is the new text, empty for none, or None after Cancel."""

    heading = "System prompt"

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose_fields(self) -> ComposeResult:
        """Create the text area."""
        yield Static("How the model should answer. This applies from your next message on.", classes="hint")
        yield TextArea(self._text, soft_wrap=True, highlight_cursor_line=False, id="system-text")

    def on_mount(self) -> None:
        """Put the cursor at the end."""
        area = self.query_one("#system-text", TextArea)
        area.move_cursor(area.document.end)
        area.focus()

    def action_keep(self) -> None:
        """Close with the text."""
        self.dismiss(self.query_one("#system-text", TextArea).text.strip())
