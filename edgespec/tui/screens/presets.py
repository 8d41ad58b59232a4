"""The list of presets to choose from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from edgespec.errors import ConfigurationError, OptionError
from edgespec.options.presets import Preset, preset_names, read_preset
from edgespec.tui.settings import shown

__all__ = ["PresetScreen", "all_presets"]

_MAX_SYSTEM_CHARACTERS = 200


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
