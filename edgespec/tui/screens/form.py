"""The base class of the form dialogs."""

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
    """A dialog with fields and the buttons Save and Cancel. Its result is None after Cancel.

    Attributes:
        heading: The title of the dialog.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "cancel", "Cancel", show=False),
        Binding("ctrl+s", "keep", "Save", show=False, priority=True),
    ]
    heading: str

    def compose(self) -> ComposeResult:
        """Create the fields and the buttons."""
        with Vertical(classes="dialog -large") as dialog:
            dialog.border_title = self.heading
            dialog.border_subtitle = "Ctrl+S saves · Esc cancels"
            yield from self.compose_fields()
            with Horizontal(classes="buttons"):
                yield Button("Save", id="save", variant="primary", compact=True)
                yield Button("Cancel", id="cancel", compact=True)

    @abstractmethod
    def compose_fields(self) -> ComposeResult:
        """Create the fields."""

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Save or cancel, depending on the pressed button."""
        if event.button.id == "save":
            self.action_keep()
        else:
            self.action_cancel()

    @abstractmethod
    def action_keep(self) -> None:
        """Close the dialog and return the contents of the fields."""

    def action_cancel(self) -> None:
        """Close the dialog without changes."""
        self.dismiss(None)
