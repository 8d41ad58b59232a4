"""Two references to a target and a draft that fits it: loaded, with the window and the tokens it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from edgespec.assembly.drafting_options import Drafting
from edgespec.backends.base import LanguageModel, LoadOptions, ModelFacts, Progress
from edgespec.backends.registry import same_backend
from edgespec.catalog import Resolved, choose_draft, resolve
from edgespec.drafters.base import Drafter
from edgespec.drafters.vocabularies import RetokenisedDrafter, TranslatedModel, compare_vocabularies
from edgespec.drafters.windowed import AttentionWindow, WindowedModel, choose_draft_window
from edgespec.errors import ModelFileError, OptionError
from edgespec.prepare.lowbit import find_valid_lowbit
from edgespec.prepare.store import check_prepared, find_prepared

__all__ = [
    "Draft",
    "Pair",
    "find_pair",
    "for_draft",
    "load_draft",
    "load_target",
    "meant_for",
]


FindModel = Callable[[str], Resolved]
# A draft with other tokens begins with so many: its text need not be as long as the target's.
_OTHER_TOKENS = 8192
# Logits of a draft: of a chain or a tree that pays (64, drafters/adaptive_tree.py), and of what two tokens of
# another vocabulary are spelled with (`MAX_SPELLING_TOKENS`).
_DRAFT_ROWS = 96


@dataclass(frozen=True, slots=True)
class Pair:
    """The files of a target and its draft.

    why_no_draft: said where there is none; why_draft: where one was chosen that nobody would have expected.
    """

    target: Resolved
    draft: Resolved | None
    why_no_draft: str
    why_draft: str = ""


@dataclass(frozen=True, slots=True)
class Draft:
    """A loaded draft model. notice: what a person should know of it.

    drafts: the drafter to use with it where that is not the usual one.
    """

    model: LanguageModel
    notice: str = ""
    drafts: Drafter | None = None


def find_pair(
    target: str,
    draft: str | None,
    how: Drafting,
    progress: Progress | None,
    options: LoadOptions | None = None,
    find_model: FindModel | None = None,
) -> Pair:
    """Find the files, downloading what is missing; of drafts, `auto` takes what is here and fits `options`.

    find_model: what finds one, where nothing is to be downloaded.
    A GGUF target that was prepared for early exit is taken in that form where a method asks for it, and for
    `auto` where that has nothing else to guess with.
    Raises what `resolve` does; ModelFileError for a prepared form that is damaged or stale; OptionError where
    a method needs a draft model and there is none, and for an adapter on a GGUF file.
    """
    find_model = find_model or partial(resolve, progress=progress)
    options = options or LoadOptions()
    found = find_model(target)
    found_draft, why, why_draft = _find_draft(found, draft, find_model, options)
    if options.adapter is not None and not found.file_format.adapters:
        raise OptionError(
            f"an adapter goes on an MLX model, and {found.name} is a GGUF file",
            "leave --adapter out, or name the model in MLX's form, such as 8b-mlx",
        )
    found = _in_halves(found, how, found_draft is not None)
    if not found_draft and "model" in how.asked:
        asked = next(method for method in how.methods if "model" in method.split("+"))
        raise OptionError(f"method {asked!r} needs a draft model: {why}", "give --draft REF")
    return Pair(found, found_draft, why, why_draft)


def _in_halves(found: Resolved, how: Drafting, has_draft: bool) -> Resolved:
    """The form that was prepared for early exit, where it is wanted; else the model as it was found."""
    if "layerskip" not in found.file_format.preparations:
        return found
    asked = "layerskip" in how.asked
    automatic = "auto" in how.methods and not has_draft and find_valid_lowbit(found.path) is None
    prepared = find_prepared("layerskip", found.path) if asked or automatic else None
    if prepared is None:
        return found
    try:
        check_prepared(prepared, found.path)
    except ModelFileError:
        if asked:
            raise
        return found  # nobody asked for it
    return replace(found, path=prepared.folder, note=str(prepared.folder), format=prepared.kind)


def _find_draft(
    target: Resolved, draft: str | None, find_model: FindModel, options: LoadOptions
) -> tuple[Resolved | None, str, str]:
    """The draft, or None and why not; and why it is this one."""
    if draft is None or draft == "none":
        return None, "no draft was wanted", ""
    if draft != "auto":
        return find_model(draft), "", ""
    choice = choose_draft(target, options.memory_bytes, options.context_tokens)
    if choice.draft is None:
        return None, choice.reason, ""
    return choice.draft, "", "" if choice.is_expected else f"{choice.draft.name} drafts: {choice.reason}"


def load_target(pair: Pair, options: LoadOptions, progress: Progress | None) -> LanguageModel:
    """Load the target with the backend of its format. Raises what that backend's `load` does."""
    return _load_model(pair.target, meant_for(pair.target, pair.draft, options), progress)


def load_draft(
    pair: Pair,
    found: Resolved,
    target: LanguageModel,
    how: Drafting,
    options: LoadOptions,
    progress: Progress | None,
) -> Draft:
    """Load the draft that was found for a loaded target.

    Raises what its backend's `load` does, and VocabularyMismatchError where the two have no token in common.
    """
    context_tokens = target.facts.max_context_tokens
    drafting = for_draft(options, how, context_tokens, _left(options, target.facts))
    if how.draft_kv_type:
        drafting = replace(drafting, kv_type=how.draft_kv_type)
    options = meant_for(found, pair.target, drafting)

    def window_of(trained_tokens: int) -> AttentionWindow | None:
        return choose_draft_window(context_tokens, trained_tokens, how.window_tokens, how.sink_tokens)

    def context_of(trained_tokens: int) -> int:
        window = window_of(trained_tokens)
        return window.context_tokens if window else context_tokens

    draft = _load_model(found, replace(options, choose_context_tokens=context_of), progress)
    try:
        window = window_of(draft.facts.trained_context_tokens)
        compared = compare_vocabularies(target.vocabulary, draft.vocabulary, target.facts.name, found.name)
        now, most = draft.facts.context_tokens, draft.facts.max_context_tokens
        if window:  # it never grows
            draft.resize(most)
        elif compared.translation is not None:
            draft.resize(max(now, min(most, _OTHER_TOKENS)))
        if how.learn:
            _check_learns(found, draft.facts, pair.target, compared.translation is None, window)
        said = [pair.why_draft, compared.explanation]
        if window:
            # The text may be longer in other tokens.
            longest = context_tokens * (1 if compared.translation is None else 4)
            draft = WindowedModel(draft, window, longest)
            said.append(f"{found.name} sees {window.description}")
        notice = " · ".join(filter(None, said))
        if compared.translation is None:
            return Draft(draft, notice)
        if compared.mapping == "translated":
            return Draft(TranslatedModel(draft, target.vocabulary, compared.translation), notice)
        if how.branches:
            raise OptionError(
                f"{found.name} has other tokens than {pair.target.name} and drafts chains",
                "leave --draft-branches out",
            )
        drafter = RetokenisedDrafter(
            draft, target.vocabulary, compared.translation, min_confidence=how.confidence
        )
        return Draft(draft, notice, drafter)
    except BaseException:
        draft.close()
        raise


def _check_learns(
    found: Resolved, draft: ModelFacts, target: Resolved, same_tokens: bool, window: AttentionWindow | None
) -> None:
    """Raises OptionError for a draft that cannot be trained between replies."""
    if not found.file_format.online_training:
        why, hint = "that takes an MLX draft", "give an MLX draft"
    elif not draft.capabilities.trainable:
        why, hint = "it remembers by a recurrent state", "give a draft without one"
    elif not same_tokens:
        why, hint = f"it has other tokens than {target.name}", "give a draft with the same tokens"
    elif window:
        why, hint = "it sees a window of the text only", "use --draft-window 0"
    else:
        return
    raise OptionError(f"the draft {found.name} cannot learn: {why}", f"{hint}, or leave --learn out")


def _load_model(found: Resolved, options: LoadOptions, progress: Progress | None) -> LanguageModel:
    return found.file_format.load(str(found.path), found.name, options, progress)


def _left(options: LoadOptions, target: ModelFacts) -> int | None:
    """The memory that a loaded target leaves."""
    if options.memory_bytes is None:
        return None
    return max(0, options.memory_bytes - target.weight_bytes - target.max_kv_bytes)


def for_draft(
    options: LoadOptions, how: Drafting, context_tokens: int, memory_bytes: int | None
) -> LoadOptions:
    """The draft sees the target's whole context. Trees that somebody named may be as wide as passes are."""
    return replace(
        options,
        context_tokens=context_tokens,
        memory_bytes=memory_bytes,
        max_logit_rows=_DRAFT_ROWS if how.branches in ((), "auto") else None,
        is_draft=True,
        adapter=None,
        exact=False,
        low_bits=False,
    )


def meant_for(found: Resolved, other: Resolved | None, options: LoadOptions) -> LoadOptions:
    """Return the options of one model of a pair, without those that only the other's backend has.

    In a pair of one backend, and for a model alone, nothing is left out: the backend refuses what it lacks.
    """
    if other is None or same_backend(found.format, other.format):
        return options
    left_out = set(found.backend.ignored_options)
    if options.is_draft and not found.backend.shares_kv_type:
        left_out.add("kv_type")
    defaults = LoadOptions()
    return replace(options, **{name: getattr(defaults, name) for name in left_out})
