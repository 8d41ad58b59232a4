"""The settings form: the settings of replies, and how the model is loaded.

Errors appear below a field while the user types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

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
from edgespec.tui.settings import (
    LOAD_SETTINGS,
    SETTINGS,
    default_text,
    load_setting_text,
    parse,
    shown,
    with_load_setting,
)
from edgespec.tui.texts import loaded_value, sentences

if TYPE_CHECKING:
    from edgespec.api.sharing.base import ChatModel

__all__ = ["EditedSettings", "SettingsScreen"]


class EditedSettings(NamedTuple):
    """The result of the settings form.

    Attributes:
        replies: All settings of replies that differ from their defaults.
        loading: The load options whose fields the user has changed, as text for `with_load_setting`.
    """

    replies: dict[str, Setting]
    loading: dict[str, str]


class SettingsScreen(FormScreen[EditedSettings]):
    """Chat settings form. Its result is None after Cancel.

    Args:
        settings: The chat's settings of replies.
        changed: The load options that were changed in the chat.
        runtime: The loaded models.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "app.focus_previous", "Previous", show=False),
        Binding("down", "app.focus_next", "Next", show=False),
    ]
    heading = "Settings (empty = default)"

    def __init__(
        self, settings: Mapping[str, Setting], changed: Mapping[str, Any], runtime: ChatModel
    ) -> None:
        super().__init__()
        self._settings = settings
        self._changed = {name: load_setting_text(name, changed) for name in LOAD_SETTINGS}
        self._runtime = runtime

    def compose_fields(self) -> ComposeResult:
        with VerticalScroll(id="settings-rows", can_focus=False):
            for name, description in SETTINGS.items():
                value = shown(self._settings[name]) if name in self._settings else ""
                default = default_text(name, self._runtime, self._settings)
                yield from _field(name, description, value, default, parse)
            yield Static("A change of these settings loads the model again.", classes="setting-heading")
            for name, option in LOAD_SETTINGS.items():
                assert option.in_chat is not None
                default = loaded_value(name, self._runtime)
                yield from _field(name, option.in_chat, self._changed[name], default, _check_load_setting)

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
        fields = {str(field.name): field.value.strip() for field in self.query(Input)}
        replies = {name: parse(name, fields[name]) for name in SETTINGS if fields[name]}
        changed = {name: fields[name] for name in LOAD_SETTINGS if fields[name] != self._changed[name]}
        self.dismiss(EditedSettings(replies, {name: text or "default" for name, text in changed.items()}))


def _field(
    name: str, description: tuple[str, str], value: str, default: str, check: Callable[[str, str], object]
) -> ComposeResult:
    """Create the widgets of one setting.

    Args:
        name: The name of the setting.
        description: Its label and its hint.
        value: Its value. Empty for the default.
        default: The text that the field shows while it is empty.
        check: Raises OptionError if a text is not a value of the setting with this name.
    """
    label, hint = description
    with Vertical(classes="setting"):
        with Horizontal():
            yield Static(Content(label), classes="setting-label")
            yield Input(
                value,
                placeholder=default,
                validators=_SettingValidator(name, check),
                valid_empty=True,
                compact=True,
                name=name,
            )
            yield Static(Content(hint), classes="setting-hint")
        yield Static(id=f"{name}-error", classes="setting-error")


def _check_load_setting(name: str, text: str) -> object:
    return with_load_setting({}, name, text.strip())


class _SettingValidator(Validator):
    def __init__(self, name: str, check: Callable[[str, str], object]) -> None:
        super().__init__()
        self._name, self._check = name, check

    def validate(self, value: str) -> ValidationResult:
        try:
            if value.strip():
                self._check(self._name, value)
        except OptionError as error:
            return self.failure(sentences(error.what, error.next_step))
        return self.success()
