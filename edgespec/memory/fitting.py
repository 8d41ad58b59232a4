"""Fitting a pair into a budget: what is given up, in which order, until target and draft fit.

The smallest loss comes first. Options that the user named are never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from edgespec.backends.memory_check import BLOCK_TOKENS
from edgespec.backends.memory_estimate import MemoryEstimate
from edgespec.errors import MemoryBudgetError, OptionError
from edgespec.memory.budget import Budget
from edgespec.memory.plan import Decision, Item, MemoryPlan

__all__ = ["PairEstimate", "PlanChoice", "PlanOption", "Preference", "fit_to_budget"]

Preference = Literal["speed", "context"]
"""What to keep where memory is short: the draft model (speed), or a long context."""

PlanOption = Literal[
    "context",
    "kv_type",
    "draft_kv_type",
    "draft_window",
    "float32",
    "draft_form",
    "draft",
    "copy",
    "gpu_layers",
]
"""The fields of `PlanChoice` that the planner may lower; `context` stands for `context_tokens`."""

# The planner first lowers the context to the first number, and to the second as a last resort. Chosen: a
# chat of a few turns fits the first, one short question and its answer the second.
_SHORT_CONTEXT_TOKENS, _MIN_CONTEXT_TOKENS = 2048, 512
_WINDOW_TOKENS = 1024
# Measured by scripts/bench_kv_types.py, against an f32 cache.
_QUALITY = {
    "q8_0": "the demo's likeliest token is then the same 99.8 % of the time",
    "q4_0": "the demo's likeliest token is then the same 97.8 % of the time",
}


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """How to load a pair, as far as the planner may change it.

    Attributes:
        context_tokens: size of the target's context.
        kv_type: number format of the target's KV cache.
        draft: whether to load the draft model.
        draft_window: tokens of the draft model's attention window; None for the default.
        gpu_layers: layers on graphics cards; None for all.
        float32: whether MLX widens 16-bit weights where that computes faster.
        copy: whether to load a low-bit copy of the target as a drafter, where there is one.
        draft_kv_type: number format of the draft's KV cache; empty for the target's.
        draft_form: another file of the draft model, with fewer bits; empty for the chosen file.
    """

    context_tokens: int
    kv_type: str = "auto"
    draft: bool = True
    draft_window: int | None = None
    gpu_layers: int | None = None
    float32: bool = True
    copy: bool = True
    draft_kv_type: str = ""
    draft_form: str = ""


@dataclass(frozen=True, slots=True)
class PairEstimate:
    """The memory of one `PlanChoice`.

    Attributes:
        items: the items of the plan.
        target: the estimate of the target alone.
    """

    items: tuple[Item, ...]
    target: MemoryEstimate


_Estimate = Callable[[PlanChoice], PairEstimate]
_Step = tuple[PlanOption, PlanChoice]


def fit_to_budget(
    start: PlanChoice,
    estimate: _Estimate,
    budget: Budget,
    *,
    fixed: frozenset[PlanOption] = frozenset(),
    prefer: Preference = "speed",
    gpu_layers: int = 0,
    draft_forms: Sequence[str] = (),
) -> tuple[PlanChoice, MemoryPlan]:
    """Return the choice closest to `start` that fits the budget, and its plan.

    Args:
        start: the choice with nothing given up.
        estimate: returns the memory of a choice.
        budget: the memory that may be used.
        fixed: options that must not change, because the user named them.
        prefer: whether to give up context before the draft model, or the draft model before context.
        gpu_layers: layers that may be moved off the graphics cards.
        draft_forms: values for `PlanChoice.draft_form`, the largest file first.

    Returns:
        The choice and its plan. If nothing fits, the smallest choice and a plan whose `fits` is false.

    Raises:
        OptionError: the model cannot be loaded with the options of `start`.
        MemoryBudgetError: there is too little memory even to estimate.
    """
    planner = _Planner(estimate, budget)
    choice = start
    passed = [start]
    for name, lower in _steps(start, prefer, gpu_layers, draft_forms):
        if planner.plan(choice).fits:
            break
        changed = replace(choice, **_values(name, lower))
        if name in fixed or not planner.saves_memory(choice, changed):
            continue
        choice = changed
        passed.append(choice)
    if planner.plan(choice).fits:
        choice = _restore_options(choice, passed, planner)
        choice = _maximise_context(choice, start.context_tokens, planner)
    if start.draft and not choice.draft:
        choice = replace(
            choice,
            draft_window=start.draft_window,
            draft_kv_type=start.draft_kv_type,
            draft_form=start.draft_form,
        )
    return choice, replace(planner.plan(choice), decisions=_decisions(start, choice, planner))


class _Planner:
    """Plans of choices, each computed once."""

    def __init__(self, estimate: _Estimate, budget: Budget) -> None:
        self._estimate = estimate
        self._budget = budget
        self._plans: dict[PlanChoice, MemoryPlan] = {}

    def plan(self, choice: PlanChoice) -> MemoryPlan:
        """Return the plan of a choice. Raises OptionError if the model cannot be loaded with it."""
        if choice not in self._plans:
            found = self._estimate(choice)
            self._plans[choice] = MemoryPlan(
                self._budget, found.target.context_tokens, found.target.kv_type, found.items
            )
        return self._plans[choice]

    def fits(self, choice: PlanChoice) -> bool:
        """Return whether a choice fits; false if the model cannot be loaded with it."""
        try:
            return self.plan(choice).fits
        except (OptionError, MemoryBudgetError):
            return False

    def saves_memory(self, before: PlanChoice, after: PlanChoice) -> bool:
        """Return whether `after` takes less than `before` of a pool that is too small."""
        try:
            old, new = self.plan(before), self.plan(after)
        except (OptionError, MemoryBudgetError):
            return False
        short = [pool for pool in old.pools if old.free_bytes(pool) < 0]
        return any(new.planned_bytes(pool) < old.planned_bytes(pool) for pool in short)


_OPTIONS: tuple[PlanOption, ...] = get_args(PlanOption)


def _values(name: PlanOption, choice: PlanChoice) -> dict[str, Any]:
    field = "context_tokens" if name == "context" else name
    return {field: getattr(choice, field)}


def _steps(start: PlanChoice, prefer: Preference, layers: int, draft_forms: Sequence[str]) -> list[_Step]:
    """Return the options to lower, in this order, with their lower values."""
    short = replace(start, context_tokens=min(start.context_tokens, _SHORT_CONTEXT_TOKENS))
    shortest = replace(start, context_tokens=min(start.context_tokens, _MIN_CONTEXT_TOKENS))
    drop_drafter: list[_Step] = [("draft", replace(start, draft=False)), ("copy", replace(start, copy=False))]
    keep_16_bit: _Step = ("float32", replace(start, float32=False))
    forms: list[_Step] = [("draft_form", replace(start, draft_form=form)) for form in draft_forms]
    # The draft's cache comes first: drafts are verified, so a coarser draft cache changes no reply.
    cache: list[_Step] = [
        ("draft_kv_type", replace(start, draft_kv_type="q8_0")),
        ("draft_kv_type", replace(start, draft_kv_type="q4_0")),
        ("kv_type", replace(start, kv_type="q8_0")),
        ("draft_window", replace(start, draft_window=_WINDOW_TOKENS)),
        ("kv_type", replace(start, kv_type="q4_0")),
    ]
    now = layers + 1 if start.gpu_layers is None else min(start.gpu_layers, layers + 1)
    cards: list[_Step] = [
        ("gpu_layers", replace(start, gpu_layers=fewer))
        for eighth in range(7, -1, -1)
        if layers and (fewer := (layers + 1) * eighth // 8) < now
    ]
    if prefer == "speed":
        return [("context", short), *cache, *forms, ("context", shortest), *drop_drafter, keep_16_bit, *cards]
    return [keep_16_bit, *cache, *forms, *drop_drafter, *cards, ("context", short), ("context", shortest)]


def _restore_options(choice: PlanChoice, passed: list[PlanChoice], planner: _Planner) -> PlanChoice:
    """Undo the steps that a later, larger step made unnecessary."""
    undo_order: tuple[PlanOption, ...] = (
        "float32",
        "kv_type",
        "draft_form",
        "draft_window",
        "draft_kv_type",
        "context",
    )
    for name in undo_order:
        for earlier in passed:
            restored = replace(choice, **_values(name, earlier))
            if restored == choice or planner.fits(restored):
                choice = restored
                break
    return choice


def _maximise_context(choice: PlanChoice, max_tokens: int, planner: _Planner) -> PlanChoice:
    """Return the choice with the longest context that still fits, up to `max_tokens`."""
    low, high = choice.context_tokens // BLOCK_TOKENS, max_tokens // BLOCK_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        if planner.fits(replace(choice, context_tokens=middle * BLOCK_TOKENS)):
            low = middle
        else:
            high = middle - 1
    return replace(choice, context_tokens=max(choice.context_tokens, low * BLOCK_TOKENS))


def _decisions(start: PlanChoice, choice: PlanChoice, planner: _Planner) -> tuple[Decision, ...]:
    """Return what was given up between `start` and `choice`, each with the memory that it saves."""
    plan = planner.plan(choice)
    decisions = []
    for name in _OPTIONS:
        restored = replace(choice, **_values(name, start))
        if restored == choice:
            continue
        before = planner.plan(restored)
        saved = max(before.planned_bytes(pool) - plan.planned_bytes(pool) for pool in plan.pools)
        # Another step may have made this one pointless: a draft's cache follows the target's, for example.
        if saved:
            what, why = _describe(name, start, choice)
            decisions.append(Decision(what, why, saved))
    return tuple(decisions)


def _describe(name: PlanOption, start: PlanChoice, choice: PlanChoice) -> tuple[str, str]:
    """Return what was given up, and why, for people."""
    if name == "context":
        return (
            f"a context of {choice.context_tokens:,} tokens, not {start.context_tokens:,}",
            "a shorter context takes less cache",
        )
    if name == "kv_type":
        return f"a cache of type {choice.kv_type}", _QUALITY[choice.kv_type]
    if name == "draft_kv_type":
        return f"a draft cache of type {choice.draft_kv_type}", "drafts are verified: replies stay the same"
    if name == "draft_form":
        what = f"{choice.draft_form} as the draft model"
        return what, "it is the same model with fewer bits; a few more of its tokens are rejected"
    if name == "draft_window":
        what = f"the draft model sees the last {choice.draft_window:,} tokens"
        return what, "its cache then stops growing with the context"
    if name == "float32":
        return "16-bit weights as they are", "float32 computes faster on a CPU, and takes twice the memory"
    if name == "draft":
        return "no draft model", "drafting from the prompt and the reply takes hardly any memory"
    if name == "copy":
        return "no low-bit copy", "drafting from the prompt and the reply takes hardly any memory"
    return f"{choice.gpu_layers} layers on graphics cards", "the CPU computes the others, more slowly"
