"""The chat's dialogs: confirmations, the system prompt, titles, the settings form and the list of presets.

The settings form contains the reply settings and the load options. Errors appear below a field while the user
types.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.validation import ValidationResult, Validator
from textual.widgets import Button, Input, OptionList, Static, TextArea
from textual.widgets.option_list import Option

from edgespec.chat.saved_chat import Setting
from edgespec.errors import ConfigurationError, OptionError
from edgespec.options.presets import Preset, preset_names, read_preset
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
from edgespec.tui.widgets.prompt import UNDO_KEYS

if TYPE_CHECKING:
    from edgespec.api.sharing.base import ChatModel

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


_MAX_SYSTEM_CHARACTERS = 200


class EditedSettings(NamedTuple):
    """The result of the settings form.

    Attributes:
        replies: All reply settings that differ from their defaults.
        loading: The load options that the user has changed, as strings for `with_load_setting`.
    """

    replies: dict[str, Setting]
    loading: dict[str, str]


class SettingsScreen(FormScreen[EditedSettings]):
    """Chat settings form. Its result is None after Cancel.

    Args:
        settings: The chat's reply settings.
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
                default = loaded_value(name, self._runtime, {})
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
    """Create the widgets for one setting.

    Args:
        name: The name of the setting.
        description: Its label and its hint.
        value: Its value. Empty for the default.
        default: The text that the field shows while it is empty.
        check: Called with the name and the text. Raises OptionError if the text is not a valid value.
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


class PresetScreen(ModalScreen[str | None]):
    """Dialog for choosing a preset. Its result is the preset's name, or None if the user cancels.

    Args:
        presets: The presets. An invalid preset is given as its name and a description of the problem.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,ctrl+c", "dismiss", "Cancel", show=False)]

    def __init__(self, presets: Sequence[Preset | tuple[str, str]]) -> None:
        super().__init__()
        self._presets = presets

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -large") as dialog:
            dialog.border_title = "Presets"
            dialog.border_subtitle = "Enter applies · Esc cancels"
            yield OptionList(*map(_option, self._presets), compact=True)

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()

    @on(OptionList.OptionSelected)
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option.id)


def _option(preset: Preset | tuple[str, str]) -> Option:
    if not isinstance(preset, Preset):
        name, problem = preset
        return Option(Content.assemble((name, "$muted"), "\n  ", (problem, "$error")), id=name, disabled=True)
    settings = dict(preset.settings)
    system = " ".join(str(settings.pop("system", "")).split())
    model = settings.pop("target", None)
    facts = [
        *([str(model)] if model else []),
        *(
            f"{name} {shown(list(each) if isinstance(each, tuple) else each)}"
            for name, each in settings.items()
        ),
        *([f"“{system[:_MAX_SYSTEM_CHARACTERS]}”"] if system else []),
    ]
    return Option(
        Content.assemble((preset.name, "bold"), "\n  ", (" · ".join(facts) or "no settings", "$muted")),
        id=preset.name,
    )


def all_presets() -> list[Preset | tuple[str, str]]:
    """Return all presets. An invalid preset is returned as its name and a description of the problem."""
    presets: list[Preset | tuple[str, str]] = []
    for name in preset_names():
        try:
            presets.append(read_preset(name))
        except (ConfigurationError, OptionError) as error:
            presets.append((name, error.what))
    return presets
