"""The models and load options of a chat: what a saved chat uses, and what carries over to another model."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.chat.saved_chat import ModelReferences
from edgespec.errors import EdgespecError, OptionError
from edgespec.options.default_model import default_model
from edgespec.options.settings import SETTINGS, load_arguments_for_another_model
from edgespec.tui.settings import LOAD_SETTINGS
from edgespec.tui.worker import Load, LoadOther, PlanModel

if TYPE_CHECKING:
    from edgespec import Preview
    from edgespec.api.sharing.base import ChatModel
    from edgespec.store.download import Progress

__all__ = [
    "LoadOptions",
    "kept_options",
    "lasting",
    "load_chosen",
    "load_options_of",
    "models_here",
    "options_to_open",
    "plan_kept",
    "references_after",
]

# Draft models and heads belong to one model, so only the choice to use none carries over to another model.
_DRAFTERS = ("draft", "head")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The load options of a model that the user has chosen.

    Attributes:
        changed: Options that the user has changed for this model, or None when switching to another model.
        wanted: The names of the previous model's options that this one keeps if they suit it.
        kept: These options. Loading removes those that do not suit the model.
    """

    changed: Mapping[str, Any] | None
    wanted: Collection[str]
    kept: dict[str, Any]

    @classmethod
    def of(
        cls, before: Mapping[str, Any], changed: Mapping[str, Any] | None, *, is_other: bool
    ) -> LoadOptions:
        """Return the options of a chosen model.

        Args:
            before: Options that the user had changed for the loaded model.
            changed: Options that the user has changed for the chosen model. See the class.
            is_other: Whether the chosen model is another one.
        """
        kept = kept_options(before) if is_other else {}
        kept = {name: value for name, value in kept.items() if name not in (changed or {})}
        return cls(changed, tuple(kept), kept)

    @property
    def all(self) -> dict[str, Any]:
        """All changed options of the loaded model."""
        return {**self.kept, **(self.changed or {})}

    @property
    def dropped(self) -> list[str]:
        """The names of the previous model's options that did not suit this one."""
        return [name for name in self.wanted if name not in self.kept]


def references_after(first: ModelReferences, reference: str, options: LoadOptions) -> ModelReferences:
    """Return the references to a chat's models after it has loaded a model.

    Args:
        first: The references that the program was started with.
        reference: The reference to the loaded model.
        options: Its load options.
    """
    changed = options.all
    default = first.draft if reference == first.target and options.changed is not None else ""
    shown = {name: value for name, value in changed.items() if name in LOAD_SETTINGS and name != "draft"}
    for name in ("head", "mmproj"):
        value = str(shown.get(name, ""))
        # A value without a folder can be a name, so leave it unchanged.
        if os.path.dirname(value) and os.path.exists(value):
            shown[name] = os.path.abspath(value)
    return ModelReferences(lasting(reference), lasting(str(changed.get("draft", default))), shown)


def lasting(reference: str) -> str:
    """Return a reference to a model, made absolute if it is a path, so that it is valid in any folder."""
    if reference in ("", "auto", "none") or not Path(reference).exists():
        return reference
    from edgespec.store.reference import resolve

    # A file or folder can have the name of a model, which takes precedence.
    with suppress(EdgespecError):
        if resolve(reference, allow_download=False).source != "path":
            return reference
    return str(Path(reference).resolve())


def load_options_of(models: ModelReferences) -> dict[str, Any]:
    """Return the load options of a saved chat's models, without invalid ones."""
    options: dict[str, Any] = {"draft": models.draft or "auto"}
    for name, value in models.options.items():
        # An earlier or later version of edgespec may have written the file.
        with suppress(OptionError):
            if name in LOAD_SETTINGS:
                options[name] = LOAD_SETTINGS[name].check(name, value)
    return options


def options_to_open(
    own: ModelReferences, loaded: ModelReferences, changed: Mapping[str, Any], *, is_other: bool
) -> dict[str, Any] | None:
    """Return the load options for opening a saved chat, or None if its models are loaded with these options.

    Options that the chat does not name can have any value.

    Args:
        own: The references to the chat's models.
        loaded: The references to the loaded models.
        changed: The load options that the user has changed.
        is_other: Whether the chat's target is not loaded.
    """
    options = load_options_of(own)
    if is_other:
        return options
    values = {**changed, "draft": loaded.draft or "auto"}
    if all(values.get(name) == value for name, value in options.items()):
        return None
    return {**changed, **options}


def models_here(models: ModelReferences) -> ModelReferences | None:
    """Return a chat's models without a draft model that is not on this machine.

    Returns None if the target is unknown or not on this machine.
    """
    if not models.target or not _is_here(models.target):
        return None
    return models if _is_here(models.draft) else models._replace(draft="")


def _is_here(reference: str) -> bool:
    """Return whether a model can be loaded without a download."""
    if reference in ("", "auto", "none", default_model()):
        return True
    from edgespec.store.reference import resolve

    try:
        resolve(reference, allow_download=False)
    except EdgespecError:
        return False
    return True


def kept_options(changed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changed load options that also apply to other models."""
    kept = {
        name: value
        for name, value in load_arguments_for_another_model(changed).items()
        if name in SETTINGS and name not in _DRAFTERS
    }
    return kept | {name: "none" for name in _DRAFTERS if changed.get(name) == "none"}


def plan_kept(
    plan: PlanModel, reference: str, kept: Mapping[str, Any], fixed: Mapping[str, Any]
) -> tuple[Preview, dict[str, Any]]:
    """Plan another model with the load options that the user has changed in the chat.

    Leave out options that the model does not support, and a context that it was not trained for or that does
    not fit in memory.

    Args:
        plan: Plans the model.
        reference: A reference to the model.
        kept: The options to keep if they suit the model. See `kept_options`.
        fixed: Further options of the plan.

    Returns:
        The plan, and the options in `kept` that it was made with.

    Raises:
        EdgespecError: The model cannot be loaded.
    """
    kept = dict(kept)
    while True:
        try:
            preview = plan(reference, {**kept, **fixed})
        except OptionError as error:
            if error.option not in kept:
                raise
            del kept[error.option]
            continue
        if (tokens := kept.get("context")) is None:
            return preview, kept
        if preview.plan.fits and tokens <= (preview.trained_context_tokens or tokens):
            return preview, kept
        del kept["context"]


def load_chosen(load_other: LoadOther, plan: PlanModel, reference: str, options: LoadOptions) -> Load:
    """Return a function that loads the model that the user has chosen.

    Args:
        load_other: Returns a function that loads the model.
        plan: Plans the model.
        reference: A reference to the model.
        options: Its load options.
    """
    changed, kept = options.changed, options.kept
    if not kept:
        return load_other(reference) if changed is None else load_other(reference, changed)

    def load(progress: Progress) -> ChatModel:
        _, suitable = plan_kept(plan, reference, kept, changed or {})
        for name in kept.keys() - suitable.keys():
            del kept[name]
        return load_other(reference, changed, kept)(progress)

    return load
