"""From two references and options to what is loaded and what that takes, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

from edgespec.assembly.advice import advice_for
from edgespec.assembly.context_extension import longest
from edgespec.assembly.drafting_options import DraftingOptions
from edgespec.assembly.pair_estimate import PairEstimator
from edgespec.assembly.pairing import ModelPair
from edgespec.backends.base import LoadOptions
from edgespec.backends.memory_check import initial_context, requested_context
from edgespec.drafters.windowed import AttentionWindow
from edgespec.errors import MemoryBudgetError, OptionError
from edgespec.files import format_bytes
from edgespec.heap import address_space_is_limited, limit_malloc_arenas
from edgespec.memory import (
    Budget,
    Item,
    MemoryPlan,
    PlanChoice,
    PlanOption,
    Preference,
    find_budget,
    fit_to_budget,
    within_limits,
)
from edgespec.memory.context_resize import has_room_to_resize
from edgespec.memory.prefix_cache import default_memory_bytes

__all__ = ["PREFERENCES", "LoadPlan", "PlanRequest", "budget_for", "check_fits", "plan_pair"]

PREFERENCES: Mapping[str, Preference] = {"speed": "speed", "context": "context"}


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What was asked for in so many words and is not given up; and what is given up first.

    prefix_cache_bytes: the size limit of the prefix cache; None for `default_memory_bytes`.
    """

    fixed: frozenset[PlanOption] = frozenset()
    prefer: Preference = "speed"
    prefix_cache_bytes: int | None = 0

    @classmethod
    def read(
        cls, prefer: str, options: LoadOptions, draft: str | None, prefix_cache_bytes: int | None = 0
    ) -> PlanRequest:
        """From what `load` was given: whatever is not left to us is fixed. Raises OptionError."""
        if prefer not in PREFERENCES:
            raise OptionError(f"prefer is {prefer!r}", f"choose one of {', '.join(PREFERENCES)}")
        named: dict[PlanOption, bool] = {
            "context": options.context_tokens is not None,
            "kv_type": options.kv_type != "auto",
            "draft": draft not in (None, "auto", "none"),
            "gpu_layers": options.gpu_layers is not None,
        }
        return cls(
            frozenset(name for name, fixed in named.items() if fixed), PREFERENCES[prefer], prefix_cache_bytes
        )


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to load, and how. options: for both models together. float32: see `PlanChoice`.

    advice: the next step where the plan does not fit. trained_tokens: of context; 0 where that is unknown.
    longrope_switch_tokens: see `initial_context`.
    draft_window: what the draft sees of the text; None where that is all.
    """

    pair: ModelPair
    drafting: DraftingOptions
    options: LoadOptions
    float32: bool
    plan: MemoryPlan
    advice: str = ""
    trained_tokens: int = 0
    longrope_switch_tokens: int = 0
    draft_window: AttentionWindow | None = None

    @property
    def target_options(self) -> LoadOptions:
        """`options` for the target alone: the draft's weights and cache are not there for it."""
        kinds = ("weights", "cache")
        of_draft = sum(item.bytes for item in self.plan.items if item.role == "draft" and item.kind in kinds)
        left = (self.options.memory_bytes or 0) - of_draft
        if not self.float32:  # MLX takes float32 wherever there is room
            target = (item for item in self.plan.items if item.role == "target" and item.kind in kinds)
            left = min(left, sum(item.bytes for item in target))
        return replace(self.options, memory_bytes=max(0, left))

    @property
    def initial_context_tokens(self) -> int:
        """What the context begins with, and grows from with the text; all of it where it does not grow.

        MLX makes its caches as large as the text: 0.
        """
        if self.pair.target.backend.cache_follows_text:
            return 0
        tokens, first = self.plan.context_tokens, self.options.initial_context_tokens
        return tokens if first is None else initial_context(tokens, first, self.longrope_switch_tokens)

    @property
    def notice(self) -> str:
        """What was given up, for people; empty where nothing was."""
        given_up = ", ".join(decision.what for decision in self.plan.decisions)
        return f"to fit {format_bytes(self.plan.budget.bytes)}: {given_up}" if given_up else ""


def budget_for(pair: ModelPair, given_bytes: int | None) -> Budget:
    """The budget of a pair: given, or found, and never more than this process can have at all.

    What no plan counts is taken before it is asked how much is left, so that a plan says what a load finds.
    """
    if address_space_is_limited():
        _take_addresses(pair)
    return within_limits(_budget_of(pair, given_bytes))


def _take_addresses(pair: ModelPair) -> None:
    """Load what a backend would load by and by, and let threads take no addresses."""
    limit_malloc_arenas()
    for found in filter(None, (pair.target, pair.draft)):
        found.backend.preload()


def _budget_of(pair: ModelPair, given_bytes: int | None) -> Budget:
    """Given, or found; the memory of graphics cards only where they may be used."""
    return find_budget(given_bytes, pair.target.backend.graphics_cards())


def plan_pair(
    pair: ModelPair,
    drafting: DraftingOptions,
    options: LoadOptions,
    budget: Budget,
    wishes: PlanRequest | None = None,
) -> LoadPlan:
    """Decide what is loaded so that it fits the budget. The plan may not fit: see `check_fits`.

    A context that nobody asked for is the usual one; one that grows is as long as costs nothing else.

    Raises what opening the models does: ModelFileError, BackendMissingError, OptionError.
    """
    wishes = wishes or PlanRequest()
    fixed = set(wishes.fixed)
    if "kv_type" in fixed:
        fixed.add("draft_kv_type")
    if "model" in drafting.named_drafters or drafting.arguments["learn"]:
        fixed.add("draft")
    if "lowbit" in drafting.named_drafters:
        fixed.add("copy")
    if drafting.window_tokens is not None or not {"auto", "model", "lowbit"} & set(drafting.methods):
        fixed.add("draft_window")
    with ExitStack() as undo:
        pairs = PairEstimator(pair, drafting, options, undo)
        start = PlanChoice(
            requested_context(options, pairs.target.trained_context_tokens),
            options.kv_type,
            pair.draft is not None,
            drafting.window_tokens,
            options.gpu_layers,
        )

        forms = [] if "draft" in wishes.fixed else pairs.smaller_drafts(start, budget)

        def fit(kept: set[PlanOption]) -> tuple[PlanChoice, MemoryPlan]:
            return fit_to_budget(
                start,
                pairs.estimate,
                budget,
                fixed=frozenset(kept),
                prefer=wishes.prefer,
                gpu_layers=pairs.target.layers,
                draft_forms=forms,
            )

        choice, plan = fit(fixed)
        plan = _with_kept(plan, wishes.prefix_cache_bytes)
        grows = options.initial_context_tokens is not None and has_room_to_resize(plan)
        if grows and options.context_tokens is None and plan.fits and not plan.decisions:
            choice, plan = longest(choice, plan, pairs, budget)
        trained_tokens, switch_tokens = (
            pairs.target.trained_context_tokens,
            pairs.target.longrope_switch_tokens,
        )
        chosen, window = pairs.options_of(choice), pairs.draft_window(choice, plan.context_tokens)
        if choice.draft_form:
            pair = replace(pair, draft=pairs.draft_of(choice))
        advice = "" if plan.fits else advice_for(fixed, fit, pair, options, budget)
    if pair.draft and not choice.draft:
        pair = replace(pair, draft=None, why_no_draft=f"the draft {pair.draft.name} does not fit the memory")
    drafting = replace(
        drafting,
        window_tokens=choice.draft_window,
        # Beside a draft that was given up no copy was planned.
        has_room_for_copy=choice.copy and start.draft == choice.draft,
        draft_kv_type=choice.draft_kv_type,
    )
    # The headroom is there for what backends count more closely, such as a file's own header.
    beside = ("process", "cells", "compute", "graphs", "output", "vocabulary", "heap")
    left = budget.bytes + budget.gpu_bytes - sum(item.bytes for item in plan.items if item.kind in beside)
    chosen = replace(
        chosen,
        memory_bytes=max(0, left),
        initial_context_tokens=options.initial_context_tokens if grows else None,
    )
    return LoadPlan(
        pair, drafting, chosen, choice.float32, plan, advice, trained_tokens, switch_tokens, window
    )


def _with_kept(plan: MemoryPlan, wanted_bytes: int | None) -> MemoryPlan:
    """The plan with what texts that are kept may take: never more than the rest leaves."""
    left = plan.free_bytes("memory")
    kept_bytes = default_memory_bytes(left) if wanted_bytes is None else min(wanted_bytes, left)
    if not plan.fits or kept_bytes <= 0:
        return plan
    return replace(plan, items=(*plan.items, Item("kept", "kept texts, at most", "kept", kept_bytes)))


def check_fits(planned: LoadPlan) -> None:
    """Raises MemoryBudgetError with the numbers and the next step where the plan does not fit."""
    plan = planned.plan
    if plan.fits:
        return
    pool = min(plan.pools, key=plan.free_bytes)
    where = "on the graphics cards" if pool == "gpu" else ""
    parts = [item for item in plan.items if item.pool == pool]
    largest = sorted(parts, key=lambda item: -item.bytes)[:3]
    named = ", ".join(f"{item.name} {format_bytes(item.bytes)}" for item in largest)
    raise MemoryBudgetError(
        f"{planned.pair.target.name} with a context of {planned.options.context_tokens:,} tokens takes"
        f" {format_bytes(plan.planned_bytes(pool))}{where}"
        f" and {format_bytes(plan.budget_bytes(pool))} are there"
        f" ({plan.budget.source}): {named}",
        planned.advice,
    )
