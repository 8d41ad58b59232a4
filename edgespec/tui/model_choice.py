"""The models and load options of a chat: what a saved chat uses, and what carries over to another model."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.chat.saved_chat import ModelReferences, Setting
from edgespec.errors import EdgespecError, OptionError
from edgespec.options.default_model import default_model
from edgespec.options.option import Option
from edgespec.options.settings import LOAD_OPTIONS, SETTINGS, load_arguments_for_another_model
from edgespec.tui.settings import ALL_LOAD_SETTINGS
from edgespec.tui.worker import Load, LoadOther, PlanModel

if TYPE_CHECKING:
    from edgespec import Preview
    from edgespec.api.sharing.base import ChatModel
    from edgespec.store.download import Progress
    from edgespec.tui.preferences import Preferences

# Draft models and heads belong to one model, so only the choice to use none carries over to another model.
_DRAFTERS = ("draft", "head")
# The load options that a saved chat keeps. `/set method` adds `methods` if the method is not loaded yet.
_SAVED: Mapping[str, Option] = {**ALL_LOAD_SETTINGS, "methods": LOAD_OPTIONS["methods"]}
# The options whose values name files.
_FILES = ("head", "mmproj", "adapter", "corpus")
# The values of these options that name no file.
_WORDS = ("auto", "none")
# In saved chats, this value stands for an option's own default, as in `/set parallel default`.
_OWN_DEFAULT = "default"


@dataclass(slots=True)
class ChosenLoadOptions:
    """The load options of a model that the user has chosen.

    Attributes:
        changed: Options that the user has changed for this model, or None when switching to another model.
            Loading removes `methods` if they cannot be used.
        wanted: The names of the previous model's options that this one keeps if they suit it.
        kept: These options. Loading removes those that do not suit the model.
        methods_error: Why loading removed `methods`, or None if it did not.
    """

    changed: dict[str, Any] | None
    wanted: Collection[str]
    kept: dict[str, Any]
    methods_error: EdgespecError | None = None

    @classmethod
    def of(
        cls, before: Mapping[str, Any], changed: Mapping[str, Any] | None, *, is_other: bool
    ) -> ChosenLoadOptions:
        """Return the options of a chosen model.

        Args:
            before: Options that the user had changed for the loaded model.
            changed: Options that the user has changed for the chosen model. See the class.
            is_other: Whether the chosen model is another one.
        """
        kept = kept_options(before) if is_other else {}
        kept = {name: value for name, value in kept.items() if name not in (changed or {})}
        return cls(None if changed is None else dict(changed), tuple(kept), kept)

    @property
    def all(self) -> dict[str, Any]:
        """All changed options of the loaded model."""
        return {**self.kept, **(self.changed or {})}

    @property
    def dropped(self) -> list[str]:
        """The names of the previous model's options that did not suit this one."""
        return [name for name in self.wanted if name not in self.kept]


def references_after(first: ModelReferences, reference: str, options: ChosenLoadOptions) -> ModelReferences:
    """Return the references to a chat's models after it has loaded a model.

    Args:
        first: The references that the program was started with.
        reference: The reference to the loaded model.
        options: Its load options.
    """
    changed = options.all
    default = first.draft if reference == first.target and options.changed is not None else ""
    draft = str(changed.get("draft", default))
    return ModelReferences(lasting(reference), lasting(draft), saved_options(changed))


def saved_options(changed: Mapping[str, Any]) -> dict[str, Setting]:
    """Return the changed load options, except for the draft model, as `load_options_of` reads them.

    Paths of existing files become absolute, so that they are valid in any folder.
    """
    names = [name for name in changed if name in _SAVED and name != "draft"]
    return {name: _saved_value(name, changed[name]) for name in names}


def _saved_value(name: str, value: Any) -> Setting:
    if value is None or value == ():
        return _OWN_DEFAULT
    if name == "adapter":
        return [f"{_absolute(name, path)}={scale}" for path, scale in value]
    if name == "methods":
        return list(value)
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    saved: Setting = _absolute(name, value) if name in _FILES else value
    return saved


def _absolute(option: str, path: str) -> str:
    if path in _WORDS or not os.path.exists(path):
        return path
    # The value of `head` can be a name if it has no folder.
    return os.path.abspath(path) if os.path.dirname(path) or option != "head" else path


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
            if (option := _SAVED.get(name)) is None:
                continue
            if value == _OWN_DEFAULT:
                options[name] = option.default
            else:
                given = option.kind.parse(value) if isinstance(value, str) else value
                options[name] = option.check(name, given)
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


def chooses_draft(reference: str, options: ChosenLoadOptions, preferences: Preferences) -> bool:
    """Return whether the user has chosen a draft model for the model that new chats open with.

    Args:
        reference: The reference to the loaded model.
        options: Its load options.
        preferences: What new chats open with.
    """
    return reference == preferences.target and "draft" in (options.changed or {})


def models_here(models: ModelReferences) -> ModelReferences | None:
    """Return a chat's models without the draft model and the other files that are not on this machine.

    Returns None if the target is unknown or not on this machine.
    """
    if not models.target or not _is_here(models.target):
        return None
    options = {name: value for name, value in models.options.items() if _is_file_here(name, value)}
    models = models._replace(options=options)
    return models if _is_here(models.draft) else models._replace(draft="")


def _is_file_here(name: str, value: Setting) -> bool:
    """Return whether the files that a saved load option names are on this machine."""
    if name not in _FILES or value in (*_WORDS, _OWN_DEFAULT):
        return True
    if name == "head":
        from edgespec.store.heads import resolve_head

        try:
            resolve_head(str(value), allow_download=False)
        except EdgespecError:
            return False
        return True
    try:
        checked = _SAVED[name].check(name, value)
    except OptionError:
        # `load_options_of` ignores invalid values.
        return True
    paths = [path for path, _ in checked] if name == "adapter" else [checked]
    return all(os.path.exists(os.path.expanduser(path)) for path in paths)


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


def load_chosen(load_other: LoadOther, plan: PlanModel, reference: str, options: ChosenLoadOptions) -> Load:
    """Return a function that loads the model that the user has chosen.

    Args:
        load_other: Returns a function that loads the model.
        plan: Plans the model.
        reference: A reference to the model.
        options: Its load options.
    """
    changed, kept = options.changed, options.kept

    def remember(error: EdgespecError) -> None:
        options.methods_error = error

    def load(progress: Progress) -> ChatModel:
        if kept:
            _, suitable = plan_kept(plan, reference, kept, changed or {})
            for name in kept.keys() - suitable.keys():
                del kept[name]
            return load_available(
                lambda: load_other(reference, changed, kept)(progress), changed, on_error=remember
            )
        if changed is None:
            return load_other(reference)(progress)
        return load_available(lambda: load_other(reference, changed)(progress), changed, on_error=remember)

    return load


def load_available(
    load: Callable[[], ChatModel],
    *changed: dict[str, Any] | None,
    on_error: Callable[[EdgespecError], None] = lambda _error: None,
) -> ChatModel:
    """Load a model. If it cannot use the methods in `methods`, remove these from `changed` and load it again.

    For example, the draft model that a method needs may have been deleted since the chat was saved.

    Args:
        load: Loads the model with the options in `changed`.
        changed: Load options that the user has changed, in one or more forms, or None if there are none.
        on_error: Called with the reason if the methods are removed.

    Raises:
        EdgespecError: The model cannot be loaded.
    """
    try:
        return load()
    except EdgespecError as error:
        given = [each for each in changed if each and "methods" in each]
        if not given or error.option not in ("method", "methods"):
            raise
        on_error(error)
    for each in given:
        del each["methods"]
    return load()
