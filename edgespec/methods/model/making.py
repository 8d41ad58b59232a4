"""Create drafters that run a draft model, a head, or a view of the target that acts as a draft model."""

from __future__ import annotations

from typing import cast

from edgespec.errors import EdgespecError, about_option
from edgespec.methods.base import Drafter, DrafterContext, LoadedHead, MissingDrafter, why_no_view
from edgespec.methods.costs.curve import PassLimits
from edgespec.methods.draft_cache import DraftCache, HeadCache
from edgespec.methods.model.drafter import ModelDrafter
from edgespec.methods.tree_growth import AdaptiveTreeGrowth, TreeGrowth
from edgespec.model.base import LanguageModel
from edgespec.model.drafter_training import Trainable
from edgespec.model.hidden_states import HeadModel
from edgespec.model.registry import all_files
from edgespec.store.saved_arrays import SavedArrays, models_fingerprint
from edgespec.system.files import file_state

__all__ = ["draft_with", "make", "make_head_drafter"]


def make(context: DrafterContext) -> Drafter:
    """Create the drafter for the loaded draft model."""
    assert context.draft is not None
    if context.draft_drafter:
        return context.draft_drafter
    if context.arguments["learn"]:
        return _make_online(context, context.draft)
    return draft_with(context, context.draft, "model")


def draft_with(
    context: DrafterContext, draft: LanguageModel, name: str, cache: DraftCache | None = None
) -> ModelDrafter:
    """Create a drafter for a draft model or a view of the target.

    Args:
        context: The target and the options.
        draft: The draft model, or a view of the target.
        name: The name of the method.
        cache: The draft model's cache, or None for a new one.
    """
    return ModelDrafter(
        draft,
        context.target.facts.vocab_size,
        branches=_growth(context, draft),
        min_confidence=context.arguments["draft_confidence"],
        name=name,
        cache=cache,
    )


def _growth(context: DrafterContext, draft: LanguageModel) -> tuple[int, ...] | TreeGrowth:
    branches = context.arguments["draft_branches"]
    if not isinstance(branches, str):
        return branches
    limits = PassLimits.of(context.target.facts.capabilities, draft.facts.capabilities)
    return AdaptiveTreeGrowth(limits, context.measured_curve().v)


def _make_online(context: DrafterContext, draft: LanguageModel) -> Drafter:
    """Create a drafter that trains its draft model between replies."""
    from edgespec.methods.model.online import OnlineDrafter, OnlineTrainer

    saved = SavedArrays("online", models_fingerprint(context.target.facts, draft.facts))
    return OnlineDrafter(
        draft,
        context.target.facts.vocab_size,
        OnlineTrainer(DraftCache(draft), cast(Trainable, draft).trainer(), store=saved),
        branches=_growth(context, draft),
        min_confidence=context.arguments["draft_confidence"],
    )


def make_head_drafter(context: DrafterContext, name: str) -> Drafter | MissingDrafter:
    """Create the drafter that runs the target's head for a method, or explain why there is none.

    Args:
        context: The target and its heads.
        name: The name of the method.

    Raises:
        EdgespecError: The user named the head or its method, and the head cannot be loaded.
    """
    heads = {option.method: option for option in context.heads}
    option = heads.get(name)
    if option is None or option.head is None:
        if heads and (other := next(iter(heads.values()))).source == "named":
            return MissingDrafter(
                f"{other.name} is a draft head for the {other.method} method", f"use --method {other.method}"
            )
        reason = f"it needs a draft head trained for {context.target.facts.name}"
        advice = f"choose one with --head HEAD (see `edgespec models show {context.reference}`)"
        return MissingDrafter(f"{reason}, but {context.why_no_head}", context.head_advice or advice)
    if name not in context.target.facts.capabilities.self_draft_methods:
        missing = why_no_view(context.target, option.head)
        context.dropped_heads.append(f"not using the draft head {option.name}: {missing.reason}")
        return missing
    try:
        with about_option("head"):
            view = cast(HeadModel, context.target.self_draft(option.head))
    except EdgespecError as error:
        if option.source == "named" or name in context.named:
            raise
        context.dropped_heads.append(f"not using the draft head {option.name}: {error.what}")
        return MissingDrafter(error.what, error.next_step)
    files = all_files(option.head.path) if option.head.path else ()
    cache = HeadCache(view, " ".join((name, *map(file_state, files))))
    path = str(option.head.path) if option.head.path else ""
    context.loaded_heads.append(LoadedHead(option.name, path, cache))
    return draft_with(context, view, name, cache)
