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
    """Screen that shows the model name and the loading progress."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c,ctrl+q", "app.cancel_load", "Cancel", show=False, priority=True),
    ]

    def __init__(self, name: str) -> None:
        super().__init__()
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
        """Collect text that the user types while the model loads, to put it into the chat's input later."""
        if event.is_printable and event.character is not None:
            self.typed += event.character
        elif event.key in ("enter", "ctrl+j"):
            self.typed += "\n"
        elif event.key == "backspace":
            self.typed = self.typed[:-1]
        self._show_typed()

    def on_paste(self, event: events.Paste) -> None:
        """Collect pasted text like typed text."""
        self.typed += event.text
        self._show_typed()

    def _show_typed(self) -> None:
        """Show the end of the collected text, so that the user sees that it is not lost."""
        lines = self.typed.rstrip("\n").split("\n")[-_SHOWN_LINES:]
        self._shown_text.update(Content("\n".join(lines)[-_SHOWN_CHARACTERS:]))
        self._shown_text.display = bool(self.typed)

    def take_typed(self) -> str:
        """Return the text typed so far and clear it."""
        typed, self.typed = self.typed, ""
        return typed

    def show_stopping(self) -> None:
        """Tell the user that loading will stop soon."""
        self._hint.update(Content("Stopping. Press Esc again to quit immediately."))
