"""What a form is: something to fill in, saved or left as it was."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, TypeVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button

__all__ = ["FormScreen"]

T = TypeVar("T")


class FormScreen(ModalScreen[T | None]):
    """A dialog with two buttons. Gives what was filled in, or None when it was left.

    heading, leaves: what is said above it, and of leaving.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "cancel", "Cancel", show=False),
        Binding("ctrl+s", "keep", "Save", show=False, priority=True),
    ]
    heading: str
    leaves: str

    def compose(self) -> ComposeResult:
        """The fields, then two buttons."""
        with Vertical(classes="dialog -large") as dialog:
            dialog.border_title = self.heading
            dialog.border_subtitle = f"Ctrl+S saves · Esc leaves {self.leaves}"
            yield from self.compose_fields()
            with Horizontal(classes="buttons"):
                yield Button("Save", id="save", variant="primary", compact=True)
                yield Button("Cancel", id="cancel", compact=True)

    @abstractmethod
    def compose_fields(self) -> ComposeResult:
        """What is to be filled in."""

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Save or leave."""
        if event.button.id == "save":
            self.action_keep()
        else:
            self.action_cancel()

    @abstractmethod
    def action_keep(self) -> None:
        """Give what was filled in."""

    def action_cancel(self) -> None:
        """Leave it as it was."""
        self.dismiss(None)
