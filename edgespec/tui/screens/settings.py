"""The chat settings form. Errors appear below a field while the user types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.validation import ValidationResult, Validator
from textual.widgets import Input, Static

from edgespec.chat.saved_chat import Setting
from edgespec.errors import OptionError
from edgespec.tui.screens.dialogs import FormScreen
from edgespec.tui.settings import SETTINGS, default_text, parse, shown
from edgespec.tui.texts import sentences

if TYPE_CHECKING:
    from edgespec.api.sharing.base import ChatModel

__all__ = ["SettingsScreen"]


class SettingsScreen(FormScreen[dict[str, Setting]]):
    """Chat settings form. Its result contains all non-default settings, or is None after Cancel."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "app.focus_previous", "Previous", show=False),
        Binding("down", "app.focus_next", "Next", show=False),
    ]
    heading = "Settings (empty = default)"

    def __init__(self, settings: Mapping[str, Setting], runtime: ChatModel) -> None:
        super().__init__()
        self._settings = settings
        self._runtime = runtime

    def compose_fields(self) -> ComposeResult:
        with VerticalScroll(id="settings-rows", can_focus=False):
            for name, (label, hint) in SETTINGS.items():
                with Vertical(classes="setting"):
                    with Horizontal():
                        yield Static(Content(label), classes="setting-label")
                        yield Input(
                            shown(self._settings[name]) if name in self._settings else "",
                            placeholder=default_text(name, self._runtime, self._settings),
                            validators=_SettingValidator(name),
                            valid_empty=True,
                            compact=True,
                            name=name,
                        )
                        yield Static(Content(hint), classes="setting-hint")
                    yield Static(id=f"{name}-error", classes="setting-error")

    def on_mount(self) -> None:
        self.query(Input).first().focus()

    @on(Input.Changed)
    def _show_error(self, event: Input.Changed) -> None:
        failures = event.validation_result.failure_descriptions if event.validation_result else []
        line = self.query_one(f"#{event.input.name}-error", Static)
        line.update(Content(" ".join(failures)))
        line.display = bool(failures)

    @on(Input.Submitted)
    def action_save(self) -> None:
        """Close the form and return the settings, or focus the first invalid field."""
        for field in self.query(Input):
            if not field.is_valid:
                field.focus()
                return
        fields = {str(field.name): field.value for field in self.query(Input) if field.value.strip()}
        self.dismiss({name: parse(name, text) for name, text in fields.items()})


class _SettingValidator(Validator):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def validate(self, value: str) -> ValidationResult:
        try:
            if value.strip():
                parse(self._name, value)
        except OptionError as error:
            return self.failure(sentences(error.what, error.next_step))
        return self.success()
