"""The editor of the system prompt."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Static, TextArea

__all__ = ["SystemScreen"]


class SystemScreen(ModalScreen[str | None]):
    """Edit the system prompt. Gives the new text ('' for none), or None when left as it was."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "cancel", "Cancel", show=False),
        Binding("ctrl+s", "keep", "Save", show=False, priority=True),
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        """The text and two buttons."""
        with Vertical(classes="dialog -large") as dialog:
            dialog.border_title = "System prompt"
            dialog.border_subtitle = "Ctrl+S saves · Esc leaves it"
            yield Static("How the model should answer. It holds from your next message on.", classes="hint")
            yield TextArea(self._text, soft_wrap=True, highlight_cursor_line=False, id="system-text")
            with Horizontal(classes="buttons"):
                yield Button("Save", id="save", variant="primary", compact=True)
                yield Button("Cancel", id="cancel", compact=True)

    def on_mount(self) -> None:
        """Write at the end."""
        area = self.query_one("#system-text", TextArea)
        area.move_cursor(area.document.end)
        area.focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Save or leave."""
        if event.button.id == "save":
            self.action_keep()
        else:
            self.action_cancel()

    def action_keep(self) -> None:
        """Take the text."""
        self.dismiss(self.query_one("#system-text", TextArea).text.strip())

    def action_cancel(self) -> None:
        """Leave it as it was."""
        self.dismiss(None)
