"""The screen shown while the model loads."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import Screen
from textual.widgets import ProgressBar, Static

__all__ = ["LoadingScreen"]

# The end of the typed text that is shown.
_SHOWN_LINES = 5
_SHOWN_CHARACTERS = 200


class LoadingScreen(Screen[None]):
    """Screen that shows the model name and the loading progress, and keeps what the user types meanwhile.

    Attributes:
        message: The text that the user ended with Enter, to be sent once the model is loaded. May be empty.
        typed: The text that the user has typed and not sent.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c,ctrl+q", "app.cancel_load", "Cancel", show=False, priority=True),
    ]

    def __init__(self, name: str) -> None:
        super().__init__()
        self.message = ""
        self.typed = ""
        self._model = name
        self._bar = ProgressBar(total=1.0, show_eta=False, id="loading-bar")
        self._what = Static(Content("Starting"), id="loading-what")
        self._hint = Static(Content("Esc cancels"), id="loading-hint")
        self._shown_text = Static(id="loading-text")
        self._shown_text.display = False

    def compose(self) -> ComposeResult:
        heading = Static(Content.assemble(("edgespec", "bold"), "  ", (self._model, "$muted")))
        yield Vertical(heading, self._bar, self._what, self._hint, self._shown_text, id="loading")

    def show(self, description: str, fraction: float) -> None:
        """Show what is being loaded, and the completed fraction from 0 to 1."""
        self._bar.update(progress=fraction)
        self._what.update(Content(description))

    def on_key(self, event: events.Key) -> None:
        """Collect what the user types while the model loads. Enter ends the message."""
        if event.is_printable and event.character is not None:
            self.typed += event.character
        elif event.key == "enter" and not self.message and self.typed.strip():
            self.message, self.typed = self.typed, ""
        elif event.key in ("enter", "ctrl+j"):
            self.typed += "\n"
        elif event.key == "backspace":
            if not self.typed:
                self.typed, self.message = self.message + " ", ""
            self.typed = self.typed[:-1]
        self._show_typed()

    def on_paste(self, event: events.Paste) -> None:
        """Collect pasted text like typed text."""
        self.typed += event.text
        self._show_typed()

    def _show_typed(self) -> None:
        """Show the end of the collected text, so that the user sees that it is not lost."""
        shown = (self.message or self.typed).rstrip("\n").split("\n")[-_SHOWN_LINES:]
        content = Content("\n".join(shown)[-_SHOWN_CHARACTERS:])
        if self.message:
            content += Content.styled("\nThis is sent as soon as the model is loaded.", "$muted")
            if self.typed.strip():
                content += Content("\n" + self.typed.rstrip("\n").split("\n")[-1][-_SHOWN_CHARACTERS:])
        self._shown_text.update(content)
        self._shown_text.display = bool(self.message or self.typed)

    def take_message(self) -> str:
        """Return the text that the user ended with Enter, and clear it."""
        message, self.message = self.message, ""
        return message

    def take_typed(self) -> str:
        """Return the text typed so far and clear it."""
        typed, self.typed = self.typed, ""
        return typed

    def show_stopping(self) -> None:
        """Tell the user that loading will stop soon."""
        self._hint.update(Content("Stopping. Press Esc again to quit immediately."))
