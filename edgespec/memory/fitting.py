"""What is given up, in what order, until target and draft fit: the smallest loss first.

Nothing that was asked for in so many words is given up.
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

# A chat begins with so much at least, before anything else is given up for it; and at the end with so much.
_SMALL_CONTEXT_TOKENS, _LEAST_CONTEXT_TOKENS = 2048, 512
_WINDOW_TOKENS = 1024
# PairEstimate by scripts/bench_kv_types.py, against an f32 cache.
_QUALITY = {
    "q8_0": "the demo's likeliest token is then the same 99.8 % of the time",
    "q4_0": "the demo's likeliest token is then the same 97.8 % of the time",
}


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """How a pair is loaded, as far as that may be given up.

    context_tokens: of the target. draft: the draft is loaded too. draft_window: None is as without a budget.
    draft_kv_type: empty is as the target's. draft_form: another file of the draft, with fewer bits; empty is
    the one that was chosen.
    gpu_layers: None is all. float32: where that computes faster, 16-bit weights are widened. copy: a copy of
    the target with fewer bits drafts, where there is one.
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
    """What a choice comes to."""

    items: tuple[Item, ...]
    target: MemoryEstimate


Measure = Callable[[PlanChoice], PairEstimate]
_Step = tuple[PlanOption, PlanChoice]


def fit_to_budget(
    start: PlanChoice,
    measure: Measure,
    budget: Budget,
    *,
    fixed: frozenset[PlanOption] = frozenset(),
    prefer: Preference = "speed",
    gpu_layers: int = 0,
    draft_forms: Sequence[str] = (),
) -> tuple[PlanChoice, MemoryPlan]:
    """The first choice down the ladder that fits, or the last one, whose plan then does not.

    fixed: what was asked for and is kept. prefer: give up context before the draft, or the draft before
    context. gpu_layers: how many layers may be taken off graphics cards.
    draft_forms: see `PlanChoice.draft_form`, the largest first.
    """
    ladder = _Ladder(measure, budget)
    choice = start
    passed = [start]
    for name, lower in _steps(start, prefer, gpu_layers, draft_forms):
        if ladder.plan(choice).fits:
            break
        changed = replace(choice, **_values(name, lower))
        if name in fixed or not ladder.frees(choice, changed):
            continue
        choice = changed
        passed.append(choice)
    if ladder.plan(choice).fits:
        choice = _given_back(choice, passed, ladder)
        choice = _with_most_context(choice, start.context_tokens, ladder)
    if start.draft and not choice.draft:
        choice = replace(
            choice,
            draft_window=start.draft_window,
            draft_kv_type=start.draft_kv_type,
            draft_form=start.draft_form,
        )
    return choice, replace(ladder.plan(choice), decisions=_decisions(start, choice, ladder))


class _Ladder:
    """Plans of choices, each made once."""

    def __init__(self, measure: Measure, budget: Budget) -> None:
        self._measure = measure
        self._budget = budget
        self._plans: dict[PlanChoice, MemoryPlan] = {}

    def plan(self, choice: PlanChoice) -> MemoryPlan:
        """Raises OptionError and MemoryBudgetError for what the model cannot be loaded with."""
        if choice not in self._plans:
            measured = self._measure(choice)
            self._plans[choice] = MemoryPlan(
                self._budget,
                measured.target.context_tokens,
                measured.target.kv_type,
                measured.items,
            )
        return self._plans[choice]

    def fits(self, choice: PlanChoice) -> bool:
        """False too where the model cannot be loaded like that."""
        try:
            return self.plan(choice).fits
        except (OptionError, MemoryBudgetError):
            return False

    def frees(self, before: PlanChoice, after: PlanChoice) -> bool:
        """Whether a step takes less of some memory that is short."""
        try:
            old, new = self.plan(before), self.plan(after)
        except (OptionError, MemoryBudgetError):
            return False
        short = [pool for pool in old.pools if old.free_bytes(pool) < 0]
        return any(new.planned_bytes(pool) < old.planned_bytes(pool) for pool in short)


_NAMES: tuple[PlanOption, ...] = get_args(PlanOption)


def _values(name: PlanOption, choice: PlanChoice) -> dict[str, Any]:
    field = "context_tokens" if name == "context" else name
    return {field: getattr(choice, field)}


def _steps(start: PlanChoice, prefer: Preference, layers: int, draft_forms: Sequence[str]) -> list[_Step]:
    """What is given up, one after the other."""
    small = replace(start, context_tokens=min(start.context_tokens, _SMALL_CONTEXT_TOKENS))
    least = replace(start, context_tokens=min(start.context_tokens, _LEAST_CONTEXT_TOKENS))
    none: list[_Step] = [("draft", replace(start, draft=False)), ("copy", replace(start, copy=False))]
    narrow: _Step = ("float32", replace(start, float32=False))
    forms: list[_Step] = [("draft_form", replace(start, draft_form=form)) for form in draft_forms]
    # Guesses are checked: where they come from a coarser cache, the reply is the same.
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
        return [("context", small), *cache, *forms, ("context", least), *none, narrow, *cards]
    return [narrow, *cache, *forms, *none, *cards, ("context", small), ("context", least)]


def _given_back(choice: PlanChoice, passed: list[PlanChoice], ladder: _Ladder) -> PlanChoice:
    """The choice without what a later, larger step made needless."""
    undone: tuple[PlanOption, ...] = (
        "float32",
        "kv_type",
        "draft_form",
        "draft_window",
        "draft_kv_type",
        "context",
    )
    for name in undone:
        for earlier in passed:
            tried = replace(choice, **_values(name, earlier))
            if tried == choice or ladder.fits(tried):
                choice = tried
                break
    return choice


def _with_most_context(choice: PlanChoice, wanted_tokens: int, ladder: _Ladder) -> PlanChoice:
    """The largest context that still fits, where a shorter one had to be taken."""
    low, high = choice.context_tokens // BLOCK_TOKENS, wanted_tokens // BLOCK_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        if ladder.fits(replace(choice, context_tokens=middle * BLOCK_TOKENS)):
            low = middle
        else:
            high = middle - 1
    return replace(choice, context_tokens=max(choice.context_tokens, low * BLOCK_TOKENS))


def _decisions(start: PlanChoice, choice: PlanChoice, ladder: _Ladder) -> tuple[Decision, ...]:
    """What was given up, each with what it frees beside the others."""
    plan = ladder.plan(choice)
    found = []
    for name in _NAMES:
        with_it = replace(choice, **_values(name, start))
        if with_it == choice:
            continue
        before = ladder.plan(with_it)
        freed = max(before.planned_bytes(pool) - plan.planned_bytes(pool) for pool in plan.pools)
        if not freed:  # another step made it needless, as a target's cache does where a draft's follows it
            continue
        what, why = _told(name, start, choice)
        found.append(Decision(what, why, freed))
    return tuple(found)


def _told(name: PlanOption, start: PlanChoice, choice: PlanChoice) -> tuple[str, str]:
    """What was given up, and why that."""
    if name == "context":
        return (
            f"a context of {choice.context_tokens:,} tokens, not {start.context_tokens:,}",
            "a shorter context takes less cache",
        )
    if name == "kv_type":
        return f"a cache of type {choice.kv_type}", _QUALITY[choice.kv_type]
    if name == "draft_kv_type":
        return f"a draft cache of type {choice.draft_kv_type}", "guesses are checked: replies stay the same"
    if name == "draft_form":
        what = f"{choice.draft_form} as the draft"
        return what, "it is the same model with fewer bits, whose guesses come true a little less often"
    if name == "draft_window":
        what = f"drafts see the last {choice.draft_window:,} tokens"
        return what, "its cache stops growing with the text"
    if name == "float32":
        return "16-bit weights as they are", "float32 computes faster on a processor, and takes twice as much"
    if name == "draft":
        return "no draft model", "guesses from the text itself take hardly any memory"
    if name == "copy":
        return "no copy with fewer bits", "guesses from the text itself take hardly any memory"
    return f"{choice.gpu_layers} layers on graphics cards", "the processor computes the others, more slowly"
