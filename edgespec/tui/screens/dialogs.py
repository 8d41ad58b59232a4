"""The chat's dialogs for confirmations, system prompts and titles, and the base class for forms."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, TypeVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Static, TextArea

from edgespec.tui.widgets.prompt import UNDO_KEYS

__all__ = ["ConfirmScreen", "FormScreen", "RenameScreen", "SystemScreen"]

T = TypeVar("T")


class ConfirmScreen(ModalScreen[bool]):
    """Dialog that asks for confirmation before deleting something. Esc means no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,n,ctrl+c", "dismiss(False)", "No", show=False),
        Binding("y", "dismiss(True)", "Yes", show=False),
        Binding("left,right", "app.focus_next", "Other", show=False),
    ]

    def __init__(self, question: str, yes: str) -> None:
        super().__init__()
        self._question = question
        self._yes = yes

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -small"):
            yield Static(Content(self._question))
            with Horizontal(classes="buttons"):
                yield Button("Keep", action="screen.dismiss(False)", compact=True)
                yield Button(self._yes, action="screen.dismiss(True)", variant="error", compact=True)


class FormScreen(ModalScreen[T | None]):
    """A dialog with fields, a Save button and a Cancel button. Its result is None after Cancel.

    Attributes:
        heading: The title of the dialog.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c", "dismiss", "Cancel", show=False),
        Binding("ctrl+s", "save", "Save", show=False, priority=True),
    ]
    heading: str

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -large") as dialog:
            dialog.border_title = self.heading
            dialog.border_subtitle = "Ctrl+S saves · Esc cancels"
            yield from self.compose_fields()
            with Horizontal(classes="buttons"):
                yield Button("Save", action="screen.save", variant="primary", compact=True)
                yield Button("Cancel", action="screen.dismiss", compact=True)

    @abstractmethod
    def compose_fields(self) -> ComposeResult:
        """Create the dialog's input fields."""

    @abstractmethod
    def action_save(self) -> None:
        """Close the dialog and return the field values."""


class SystemScreen(FormScreen[str]):
    """Editor for the system prompt. The result is the new text, which may be empty, or None after Cancel."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding(UNDO_KEYS, "undo", show=False)]
    heading = "System prompt"

    def __init__(self, text: str) -> None:
        super().__init__()
        self._area = TextArea(text, highlight_cursor_line=False, id="system-text")

    def compose_fields(self) -> ComposeResult:
        yield Static(
            "Tell the model how to answer, for example: Be brief. Takes effect with your next message.",
            classes="hint",
        )
        yield self._area

    def on_mount(self) -> None:
        self._area.move_cursor(self._area.document.end)
        self._area.focus()

    def action_undo(self) -> None:
        self._area.undo()

    def action_save(self) -> None:
        """Close the editor and return its text."""
        self.dismiss(self._area.text.strip())


class RenameScreen(FormScreen[str]):
    """Dialog for the title of a chat. The result is the text that the user typed, or None after Cancel."""

    heading = "Rename chat"

    def __init__(self, title: str) -> None:
        super().__init__()
        self._input = Input(title, compact=True, select_on_focus=False)

    def compose_fields(self) -> ComposeResult:
        yield self._input

    def on_mount(self) -> None:
        self.query_one(".dialog").border_subtitle = "Enter saves · Esc cancels"
        self._input.focus()

    @on(Input.Submitted)
    def action_save(self) -> None:
        """Close the dialog and return its text."""
        self.dismiss(self._input.value)
