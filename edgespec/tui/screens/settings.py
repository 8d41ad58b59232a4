"""The form for the settings of a chat. Errors appear below a field while the user types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Input, Static

from edgespec.chat.store import Setting
from edgespec.errors import OptionError
from edgespec.tui.screens.form import FormScreen
from edgespec.tui.settings import FIELDS, Field, default_text, parse, shown

__all__ = ["SettingsScreen"]


class SettingsScreen(FormScreen[dict[str, Setting]]):
    """Form for the settings. The result contains all non-default settings, or is None after Cancel."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "app.focus_previous", "Previous", show=False),
        Binding("down", "app.focus_next", "Next", show=False),
    ]
    heading = "Settings of this chat"

    def __init__(self, settings: Mapping[str, Setting]) -> None:
        super().__init__()
        self._settings = settings

    def compose_fields(self) -> ComposeResult:
        """Create a row for each setting."""
        with VerticalScroll(id="settings-rows", can_focus=False):
            for field in FIELDS:
                value = self._settings.get(field.name)
                yield _Row(field, "" if value is None else shown(value))

    def on_mount(self) -> None:
        """Focus the first field."""
        self.query(Input).first().focus()

    def on_input_submitted(self) -> None:
        """Save the form when Enter is pressed in a field."""
        self.action_keep()

    def action_keep(self) -> None:
        """Close the form and return the settings, or focus the first invalid field."""
        wrong = [row for row in self.query(_Row) if not row.check()]
        if wrong:
            wrong[0].query_one(Input).focus()
            return
        rows = self.query(_Row)
        self.dismiss({row.field.name: row.value for row in rows if row.value is not None})


class _Row(Vertical):
    """A row of the form with a label, a field, a hint and an error message."""

    def __init__(self, field: Field, text: str) -> None:
        super().__init__(classes="setting")
        self.field = field
        self.value: Setting | None = None
        self._text = text

    def compose(self) -> ComposeResult:
        """Create the parts of the row."""
        with Horizontal():
            yield Static(Content(self.field.label), classes="setting-label")
            yield Input(
                self._text,
                placeholder=default_text(self.field),
                compact=True,
                id=f"set-{self.field.name.replace('_', '-')}",
            )
            yield Static(Content(self.field.hint), classes="setting-hint")
        yield Static("", classes="setting-error")

    def on_mount(self) -> None:
        """Check the initial value."""
        self.check()

    def on_input_changed(self) -> None:
        """Check the value after every key press."""
        self.check()

    def check(self) -> bool:
        """Parse the field's text and show any error. Return True if the text is valid."""
        text = self.query_one(Input).value
        problem = ""
        self.value = None
        if text.strip():
            try:
                self.value = parse(self.field, text)
            except OptionError as error:
                problem = error.next_step or error.what
        line = self.query_one(".setting-error", Static)
        line.update(Content(problem))
        line.display = bool(problem)
        self.set_class(bool(problem), "-wrong")
        return not problem
