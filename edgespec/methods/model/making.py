"""Create drafters that run a draft model or a view of the target that behaves like one."""

from __future__ import annotations

from typing import cast

from edgespec.methods.adaptive_tree import AdaptiveTreeGrowth
from edgespec.methods.base import Drafter
from edgespec.methods.context import DrafterContext
from edgespec.methods.costs.pass_limits import PassLimits
from edgespec.methods.draft_cache import DraftCache
from edgespec.methods.model.drafter import ModelDrafter
from edgespec.methods.tree_growth import TreeGrowth
from edgespec.model.base import LanguageModel
from edgespec.model.drafter_training import Trainable
from edgespec.store.saved_arrays import SavedArrays, models_fingerprint

__all__ = ["draft_with", "make"]


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
    """Create a drafter that runs a model.

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
