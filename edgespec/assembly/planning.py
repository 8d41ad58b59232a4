"""Planning a load: from a pair of models and options to what is loaded within the memory budget."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

from edgespec.assembly.advice import find_advice
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
    MemoryPlan,
    PlanChoice,
    PlanOption,
    Preference,
    find_budget,
    fit_to_budget,
    within_limits,
)
from edgespec.memory.context_resize import has_room_to_resize
from edgespec.memory.prefix_cache import default_memory_bytes, max_copy_bytes

__all__ = ["PREFERENCES", "LoadPlan", "PlanRequest", "budget_for", "check_fits", "plan_pair"]

PREFERENCES: Mapping[str, Preference] = {"speed": "speed", "context": "context"}


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What the user asked of the planner.

    Attributes:
        fixed: options that the user named, which the planner must not change.
        prefer: what to keep where memory is short.
        prefix_cache_bytes: size limit of the prefix cache in memory; None for `default_memory_bytes`.
        headroom_bytes: memory that the plan leaves for what it does not model; None for the default.
    """

    fixed: frozenset[PlanOption] = frozenset()
    prefer: Preference = "speed"
    prefix_cache_bytes: int | None = 0
    headroom_bytes: int | None = None

    @classmethod
    def from_options(
        cls,
        prefer: str,
        options: LoadOptions,
        draft: str | None,
        prefix_cache_bytes: int | None = 0,
        headroom_bytes: int | None = None,
    ) -> PlanRequest:
        """Create a request from the options of `load`. Raises OptionError for an unknown `prefer`."""
        if prefer not in PREFERENCES:
            raise OptionError(f"prefer is {prefer!r}", f"choose one of {', '.join(PREFERENCES)}")
        named: dict[PlanOption, bool] = {
            "context": options.context_tokens is not None,
            "kv_type": options.kv_type != "auto",
            "draft": draft not in (None, "auto", "none"),
            "gpu_layers": options.gpu_layers is not None,
        }
        fixed = frozenset(name for name, is_fixed in named.items() if is_fixed)
        return cls(fixed, PREFERENCES[prefer], prefix_cache_bytes, headroom_bytes)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Everything that a load needs to know, decided before anything is loaded.

    Attributes:
        pair: the models to load.
        drafting: the drafting options, with what the planner changed.
        options: load options for both models together.
        float32: see `PlanChoice`.
        plan: the memory plan.
        advice: what the user can do if the plan does not fit; empty if it fits.
        trained_tokens: context length that the target was trained for; 0 if unknown.
        longrope_switch_tokens: see `initial_context`.
        draft_window: the draft model's attention window; None if it sees the whole context.
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
        """`options` for the target alone, without the memory of the draft's weights and cache."""
        kinds = ("weights", "cache")
        draft_bytes = sum(i.bytes for i in self.plan.items if i.role == "draft" and i.kind in kinds)
        left = (self.options.memory_bytes or 0) - draft_bytes
        # MLX widens weights to float32 wherever there is room, so a plan without that leaves no room.
        if not self.float32:
            target = (i.bytes for i in self.plan.items if i.role == "target" and i.kind in kinds)
            left = min(left, sum(target))
        return replace(self.options, memory_bytes=max(0, left))

    @property
    def initial_context_tokens(self) -> int:
        """The context size at load, from which it grows on demand; 0 where caches grow token by token."""
        if self.pair.target.backend.cache_follows_text:
            return 0
        tokens, first = self.plan.context_tokens, self.options.initial_context_tokens
        return tokens if first is None else initial_context(tokens, first, self.longrope_switch_tokens)

    @property
    def notice(self) -> str:
        """What the planner gave up, for people; empty if nothing."""
        given_up = ", ".join(decision.what for decision in self.plan.decisions)
        return f"to fit {format_bytes(self.plan.budget.bytes)}: {given_up}" if given_up else ""


def budget_for(pair: ModelPair, memory_bytes: int | None, reserve_bytes: int | None = None) -> Budget:
    """Return the budget of a pair: given by the user or found, and within the hard limits of this process.

    Args:
        pair: the models, whose backend reports the graphics cards.
        memory_bytes: the value of `--memory`, or None.
        reserve_bytes: the value of `--reserve`, or None.
    """
    if address_space_is_limited():
        # Libraries that would be loaded later take addresses, so they are loaded before the rest is counted.
        limit_malloc_arenas()
        for model in filter(None, (pair.target, pair.draft)):
            model.backend.preload()
    budget = find_budget(memory_bytes, pair.target.backend.graphics_cards(), reserve_bytes)
    return within_limits(budget, reserve_bytes)


def plan_pair(
    pair: ModelPair,
    drafting: DraftingOptions,
    options: LoadOptions,
    budget: Budget,
    request: PlanRequest | None = None,
) -> LoadPlan:
    """Decide how to load a pair so that it fits the budget. Call `check_fits` on the result.

    A context that the user did not name has the default length, or is longer if nothing else is given up
    for it.

    Raises:
        ModelFileError, BackendMissingError: a model cannot be opened.
        OptionError: the models cannot be loaded with these options.
    """
    request = request or PlanRequest()
    fixed = _fixed_options(request, drafting)
    with ExitStack() as undo:
        estimator = PairEstimator(pair, drafting, options, undo, request.headroom_bytes)
        target = estimator.target
        start = PlanChoice(
            requested_context(options, target.trained_context_tokens),
            options.kv_type,
            pair.draft is not None,
            drafting.window_tokens,
            options.gpu_layers,
        )
        forms = [] if "draft" in request.fixed else estimator.smaller_drafts(start, budget)

        def fit(fixed: set[PlanOption]) -> tuple[PlanChoice, MemoryPlan]:
            return fit_to_budget(
                start,
                estimator.estimate,
                budget,
                fixed=frozenset(fixed),
                prefer=request.prefer,
                gpu_layers=target.layers,
                draft_forms=forms,
            )

        choice, plan = fit(fixed)
        plan = replace(plan, prefix_cache_bytes=_prefix_cache_bytes(plan, request.prefix_cache_bytes))
        grows = options.initial_context_tokens is not None and has_room_to_resize(plan)
        if grows and options.context_tokens is None and plan.fits and not plan.decisions:
            choice, plan = _extend_context(choice, plan, estimator, budget)
        chosen = estimator.load_options(choice)
        window = estimator.draft_window(choice, plan.context_tokens)
        if choice.draft_form:
            pair = replace(pair, draft=estimator.draft_file(choice))
        advice = "" if plan.fits else find_advice(fixed, fit, pair, options, budget, request.headroom_bytes)
    if pair.draft and not choice.draft:
        why = f"the draft model {pair.draft.name} does not fit the memory"
        pair = replace(pair, draft=None, why_no_draft=why)
    drafting = replace(
        drafting,
        window_tokens=choice.draft_window,
        # A low-bit copy is planned only without a draft model, so dropping the draft leaves no room for one.
        has_room_for_copy=choice.copy and start.draft == choice.draft,
        draft_kv_type=choice.draft_kv_type,
    )
    # Backends check weights and caches against this. The headroom stays in, because they count both a little
    # more closely than the plan, with a file's header for example.
    others = ("process", "compute", "output", "vocabulary")
    left = budget.bytes + budget.gpu_bytes - sum(item.bytes for item in plan.items if item.kind in others)
    chosen = replace(
        chosen,
        memory_bytes=max(0, left),
        initial_context_tokens=options.initial_context_tokens if grows else None,
    )
    return LoadPlan(
        pair,
        drafting,
        chosen,
        choice.float32,
        plan,
        advice,
        target.trained_context_tokens,
        target.longrope_switch_tokens,
        window,
    )


def _fixed_options(request: PlanRequest, drafting: DraftingOptions) -> set[PlanOption]:
    """Return the options that the planner must not change."""
    fixed = set(request.fixed)
    if "kv_type" in fixed:
        fixed.add("draft_kv_type")
    if "model" in drafting.named_drafters or drafting.arguments["learn"]:
        fixed.add("draft")
    if "lowbit" in drafting.named_drafters:
        fixed.add("copy")
    if drafting.window_tokens is not None or not {"auto", "model", "lowbit"} & set(drafting.methods):
        fixed.add("draft_window")
    return fixed


def _prefix_cache_bytes(plan: MemoryPlan, requested_bytes: int | None) -> int:
    """Return the size limit of the prefix cache: as requested, but never more than the plan leaves free."""
    if not plan.fits:
        return 0
    free = plan.free_bytes("memory")
    return default_memory_bytes(free) if requested_bytes is None else min(requested_bytes, free)


def _extend_context(
    choice: PlanChoice, plan: MemoryPlan, estimator: PairEstimator, budget: Budget
) -> tuple[PlanChoice, MemoryPlan]:
    """Return the choice with the longest context that takes nothing away from the plan, and its plan.

    Candidates are the length that target and draft were trained for, and powers of two below it.
    """
    max_tokens = min(estimator.target.trained_context_tokens, estimator.max_context_for_draft(choice))
    powers = (1 << exponent for exponent in reversed(range(max_tokens.bit_length())))
    for tokens in dict.fromkeys((max_tokens, *powers)):
        if tokens <= choice.context_tokens:
            break
        longer = replace(choice, context_tokens=tokens)
        try:
            candidate = estimator.plan(longer, budget)
        except (OptionError, MemoryBudgetError):
            continue
        candidate = replace(candidate, prefix_cache_bytes=plan.prefix_cache_bytes)
        if _keeps_everything(candidate, plan):
            return longer, candidate
    return choice, plan


def _keeps_everything(longer: MemoryPlan, plan: MemoryPlan) -> bool:
    """Return whether a plan with a longer context takes nothing away from `plan`.

    Prefixes as long as the shorter context must still fit into one copy of the prefix cache.
    """
    copy_bytes = 0
    if plan.prefix_cache_bytes:
        cache_bytes = sum(i.bytes for i in plan.items if (i.role, i.kind) == ("target", "cache"))
        copy_bytes = min(max_copy_bytes(plan.free_bytes("memory")), cache_bytes)
    return (
        longer.fits
        and longer.free_bytes("memory") >= longer.prefix_cache_bytes
        and longer.kv_type == plan.kv_type
        and has_room_to_resize(longer)
        and max_copy_bytes(longer.free_bytes("memory")) >= copy_bytes
    )


def check_fits(planned: LoadPlan) -> None:
    """Raise MemoryBudgetError, with the largest items and the advice, if the plan does not fit."""
    plan = planned.plan
    if plan.fits:
        return
    pool = min(plan.pools, key=plan.free_bytes)
    where = " on the graphics cards" if pool == "gpu" else ""
    largest = sorted((i for i in plan.items if i.pool == pool), key=lambda item: -item.bytes)[:3]
    named = ", ".join(f"{item.name} {format_bytes(item.bytes)}" for item in largest)
    raise MemoryBudgetError(
        f"{planned.pair.target.name} with a context of {planned.options.context_tokens:,} tokens needs"
        f" {format_bytes(plan.planned_bytes(pool))}{where}, and the budget is"
        f" {format_bytes(plan.budget_bytes(pool))} ({plan.budget.source}): {named}",
        planned.advice,
    )
