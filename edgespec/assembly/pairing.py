"""Find a target, its draft model and its heads by reference, and check that they can be loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from edgespec.assembly.drafting_options import DraftingOptions
from edgespec.assembly.heads import FindHead, find_heads, without_heads
from edgespec.backends.base import LoadOptions, Progress
from edgespec.backends.model_facts import Adapter
from edgespec.backends.registry import Backend, same_backend
from edgespec.backends.trial_load import TrialModel, check_loadable
from edgespec.catalog import MetadataCache, Resolved, choose_draft, resolve
from edgespec.catalog.heads import HeadOption
from edgespec.catalog.installed import model_info_or_none
from edgespec.catalog.reference import refused_head
from edgespec.errors import ModelFileError, OptionError
from edgespec.method_names import DRAFT_MODEL_USERS
from edgespec.prepare.lowbit import find_valid_lowbit
from edgespec.prepare.store import check_prepared, find_prepared

__all__ = [
    "ModelPair",
    "draft_load_options",
    "find_pair",
    "options_in_pair",
    "try_pair",
    "with_own_adapters",
]


FindModel = Callable[[str], Resolved]
# Maximum number of tokens per forward pass for which a draft model computes logits.
_DRAFT_ROWS = 96


@dataclass(frozen=True, slots=True)
class ModelPair:
    """The files of a target, its draft model and its heads. The draft model and heads are optional.

    Attributes:
        target: The target.
        draft: The draft model, or None.
        why_no_draft: The reason why there is no draft model. Empty if there is one.
        why_draft: The reason why `auto` chose this draft model. Empty if the user chose it or the catalogue
            recommends it.
        heads: Heads to draft with, at most one per method, most preferred first.
        why_no_head: The reason why there is no head, or why heads were dropped. Empty otherwise.
        why_heads: Notice for the user that names the chosen heads. Empty if the user chose the head.
        head_advice: What to do to draft with a head that is used only if the user names it. Empty if there is
            none.
    """

    target: Resolved
    draft: Resolved | None
    why_no_draft: str
    why_draft: str = ""
    heads: tuple[HeadOption, ...] = ()
    why_no_head: str = ""
    why_heads: str = ""
    head_advice: str = ""

    @property
    def backends(self) -> tuple[Backend, ...]:
        """The backends of the models, the target's first."""
        return tuple(found.backend for found in (self.target, self.draft) if found)


def find_pair(
    target: str,
    draft: str | None,
    drafting: DraftingOptions,
    progress: Progress | None,
    options: LoadOptions | None = None,
    find_model: FindModel | None = None,
    find_head: FindHead | None = None,
) -> ModelPair:
    """Find the files of a target, its draft model and its heads, downloading files that the user named.

    Uses the files that `edgespec prepare layerskip` created for a GGUF target if a method names `layerskip`,
    or if `auto` has nothing else to draft with.

    Args:
        target: Reference to the target.
        draft: Reference to the draft model. `auto` chooses from the models on this machine, or chooses none
            if the user named a head.
        drafting: The methods that replies can use.
        progress: Called during downloads. Returning False cancels them.
        options: Memory and context limits for `auto` to respect when it chooses a draft model.
        find_model: Finds a model by reference. The default downloads missing files.
        find_head: Finds a head by reference. The default downloads missing files, and converts the head to
            the target's format.

    Raises:
        OptionError: A method needs a draft model and there is none, or the target does not support adapters.
        CapabilityError: The head that the user named cannot draft for the target.
        ModelFileError: The prepared files are damaged or outdated.
        EdgespecError: Any error raised by `catalog.resolve`.
    """
    find_model = find_model or partial(resolve, progress=progress)
    found = find_model(target)
    options = with_own_adapters(options or LoadOptions(), found)
    metadata = MetadataCache()
    _check_is_model(found, metadata)
    heads = find_heads(found, drafting, metadata, find_head, progress)
    on_workers = drafting.arguments["workers"] is not None
    names_head = any(head.source == "named" for head in heads.chosen)
    if names_head and draft == "auto" and not DRAFT_MODEL_USERS & drafting.named_drafters:
        found_draft, why_none, why_draft = None, "the head drafts instead", ""
    else:
        # The memory of this machine does not limit a target whose layers are on workers.
        limits = replace(options, memory_bytes=None) if on_workers else options
        found_draft, why_none, why_draft = _find_draft(found, draft, find_model, limits)
        if found_draft and not why_draft:
            _check_is_model(found_draft, metadata)
        if not found_draft and draft == "auto":
            why_none += heads.suggestion
    if options.adapters:
        _check_adapters(options.adapters, found, drafting)
    else:
        drafts_otherwise = found_draft is not None or bool(heads.chosen) or on_workers
        found = _prepared_for_early_exit(found, drafting, drafts_otherwise)
    if heads.chosen and not found.file_format.head_formats:
        heads = without_heads(heads, f"{found.name} is used as prepared for early exit")
    if not found_draft and DRAFT_MODEL_USERS & drafting.named_drafters:
        method = next(method for method in drafting.methods if DRAFT_MODEL_USERS & {*method.split("+")})
        raise OptionError(
            f"method {method!r} needs a draft model: {why_none}", "pass a draft model with --draft REF"
        )
    return ModelPair(
        found,
        found_draft,
        why_none,
        why_draft,
        heads.chosen,
        heads.why_none,
        heads.notice,
        heads.advice,
    )


def with_own_adapters(options: LoadOptions, target: Resolved) -> LoadOptions:
    """Add the adapters that are part of the target, as in some models of Ollama, before the user's own."""
    own = (Adapter(str(path)) for path in target.adapters)
    return replace(options, adapters=(*own, *options.adapters))


def _check_is_model(found: Resolved, metadata: MetadataCache) -> None:
    """Raise an error if `found` is a head instead of a model."""
    info = model_info_or_none(found, metadata)
    if info is not None and info.kind == "head":
        raise refused_head(found.name)


def _check_adapters(adapters: Sequence[Adapter], target: Resolved, drafting: DraftingOptions) -> None:
    """Raise an error if the adapters cannot be applied to the target with the methods that it needs."""
    form = target.file_format
    if form.check_adapters is None:
        raise OptionError(f"{target.name} does not support adapters", "omit --adapter, or use another model")
    form.check_adapters(adapters, target.path)
    if "layerskip" in form.preparations & drafting.named_drafters:
        raise OptionError(
            "method 'layerskip' cannot be used with adapters for a GGUF model, because the files that"
            " `edgespec prepare layerskip` makes do not support adapters",
            "omit --adapter, or use another method, such as suffix",
        )


def _prepared_for_early_exit(found: Resolved, drafting: DraftingOptions, drafts_otherwise: bool) -> Resolved:
    if "layerskip" not in found.file_format.preparations:
        return found
    named = "layerskip" in drafting.named_drafters
    drafts_otherwise = drafts_otherwise or find_valid_lowbit(found.path) is not None
    automatic = "auto" in drafting.methods and not drafts_otherwise
    prepared = find_prepared("layerskip", found.path) if named or automatic else None
    if prepared is None:
        return found
    try:
        check_prepared(prepared, found.path)
    except ModelFileError:
        if named:
            raise
        return found
    return replace(found, path=prepared.folder, note=str(prepared.folder), format=prepared.kind)


def _find_draft(
    target: Resolved, draft: str | None, find_model: FindModel, options: LoadOptions
) -> tuple[Resolved | None, str, str]:
    if draft is None or draft == "none":
        return None, "no draft model was requested", ""
    if draft != "auto":
        return find_model(draft), "", ""
    choice = choose_draft(target, options.memory_bytes, options.context_tokens)
    if choice.draft is None:
        return None, choice.reason, ""
    return (
        choice.draft,
        "",
        "" if choice.is_expected else f"drafting with {choice.draft.name}: {choice.reason}",
    )


def try_pair(pair: ModelPair, options: LoadOptions, progress: Progress | None) -> tuple[ModelPair, str]:
    """Check that models and heads can be loaded. Uses a child process, because damaged files can crash it.

    Reads only the metadata of models larger than the memory limit in `options`. Raises the same errors as
    `check_loadable`, but drops heads that fail if `auto` chose them.

    Returns:
        The pair without the heads that failed, and a notice for the user, which can be empty.
    """
    models, trials = [], []
    for found in filter(None, (pair.target, pair.draft)):
        with suppress(OSError, ModelFileError):
            size_bytes = sum(file.stat().st_size for file in found.file_format.files(found.path))
            runs = options.memory_bytes is None or size_bytes <= options.memory_bytes
            model = TrialModel(found.name, found.path, found.file_format, runs)
            models.append(model)
            if runs and found is pair.target:
                if options.adapters:
                    models.append(model._replace(adapters=options.adapters))
                trials = [model._replace(head=option.head) for option in pair.heads]
    try:
        return pair, check_loadable([*models, *trials], progress)
    except ModelFileError:
        if not any(option.source != "named" for option in pair.heads):
            raise
    # Try the models and heads one by one to find the heads that fail. Trial results are saved, so completed
    # trials are not repeated.
    check_loadable(models, progress)
    return _without_crashing_heads(pair, trials, progress)


def _without_crashing_heads(
    pair: ModelPair, trials: Sequence[TrialModel], progress: Progress | None
) -> tuple[ModelPair, str]:
    heads, failures = [], []
    for option, trial in zip(pair.heads, trials, strict=True):
        try:
            check_loadable([trial], progress)
            heads.append(option)
        except ModelFileError as error:
            failures.append(error.what)
    reason = "; ".join(failures)
    return replace(pair, heads=tuple(heads), why_no_head=reason, why_heads=""), reason


def draft_load_options(
    options: LoadOptions, drafting: DraftingOptions, context_tokens: int, memory_bytes: int | None
) -> LoadOptions:
    """Return the draft model's load options, derived from the target's.

    Args:
        options: The target's load options.
        drafting: The drafting options.
        context_tokens: The context size of the draft model.
        memory_bytes: The memory limit of the draft model, or None for no limit.
    """
    adapts = drafting.arguments["draft_branches"] in ((), "auto")
    return replace(
        options.for_draft(),
        context_tokens=context_tokens,
        memory_bytes=memory_bytes,
        max_logit_rows=_DRAFT_ROWS if adapts else None,
    )


def options_in_pair(found: Resolved, other: Resolved | None, options: LoadOptions) -> LoadOptions:
    """Return the options for loading `found`, one model of a pair.

    If the other model uses a different backend, options that the backend of `found` does not support are
    reset to their defaults.
    """
    if other is None or same_backend(found.format, other.format):
        return options
    foreign = set(found.backend.ignored_options)
    if options.is_draft and not found.backend.shares_kv_type:
        foreign.add("kv_type")
    defaults = LoadOptions()
    return replace(options, **{name: getattr(defaults, name) for name in foreign})
