"""Fit a target and its draft model into a memory budget by reducing load options.

Tries the least harmful reductions first, and never changes options set by the user.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from edgespec.errors import MemoryBudgetError, OptionError
from edgespec.memory.constants import MIN_CONTEXT_TOKENS, SAVING_WINDOW_TOKENS, SHORT_CONTEXT_TOKENS
from edgespec.memory.plan import Decision, MemoryPlan
from edgespec.model.memory_estimate import BLOCK_TOKENS

__all__ = ["PlanChoice", "PlanOption", "Preference", "fit_to_budget", "stream_least"]

Preference = Literal["speed", "context"]
"""What to preserve when memory is short: the draft model (speed), or a long context."""

PlanOption = Literal[
    "context",
    "kv_type",
    "draft_kv_type",
    "draft_window",
    "float32",
    "draft_form",
    "draft",
    "copy",
    "heads",
    "experts",
    "gpu_layers",
]
"""Fields of `PlanChoice` that the planner can reduce. `context` refers to `context_tokens`."""

# Load options to restore after a reduction, in this order, while memory allows.
_RESTORABLE: tuple[PlanOption, ...] = (
    "float32",
    "kv_type",
    "draft_form",
    "draft_window",
    "draft_kv_type",
    "context",
)
# Effect of each KV cache format on quality. No figures are given, because they depend on the model.
# `scripts/bench_kv_types.py` measures the effect.
_QUALITY = {
    "q8_0": "it takes about half the memory of a 16-bit cache, and hardly changes replies",
    "q4_0": "it takes about a quarter of the memory of a 16-bit cache, but can make replies worse",
}


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """Load options that the planner can change.

    Attributes:
        context_tokens: Size of the target's context.
        kv_type: Data type of the target's KV cache.
        draft: Whether to load the draft model.
        draft_window: Size of the draft model's attention window in tokens. None means the default.
        gpu_layers: Number of layers on GPUs. None means all layers.
        experts: Number of layers whose experts are in main memory instead of on GPUs.
        float32: Whether MLX converts 16-bit weights to float32 where that is faster.
        copy: Whether to load a low-bit copy of the target for drafting, if one exists.
        draft_kv_type: Data type of the draft model's KV cache. Empty means the target's data type.
        draft_form: Name of a smaller, lower-bit version of the draft model. Empty means the originally chosen
            one.
        heads: Number of heads to load.
        streamed_layers: Number of layers whose feed-forward weights are read from disk in every pass.
        substitutes: File of low-bit copies. Only layers with a copy are then streamed, and the target drafts
            with the copies in place of these layers. None if there are none.
    """

    context_tokens: int
    kv_type: str = "auto"
    draft: bool = True
    draft_window: int | None = None
    gpu_layers: int | None = None
    experts: int = 0
    float32: bool = True
    copy: bool = True
    draft_kv_type: str = ""
    draft_form: str = ""
    heads: int = 0
    streamed_layers: int = 0
    substitutes: Path | None = None


_Plan = Callable[[PlanChoice], MemoryPlan]
_Step = tuple[PlanOption, PlanChoice]


def fit_to_budget(
    start: PlanChoice,
    plan: _Plan,
    *,
    fixed: frozenset[PlanOption] = frozenset(),
    prefer: Preference = "speed",
    gpu_layers: int = 0,
    draft_forms: Sequence[str] = (),
) -> tuple[PlanChoice, MemoryPlan]:
    """Return the load options closest to `start` that fit the memory budget, and their memory plan.

    Args:
        start: The preferred choice, before any reduction.
        plan: Returns the memory plan for a choice.
        fixed: Options set by the user, which must not change.
        prefer: Whether to keep a long context or the draft model if only one of them fits.
        gpu_layers: Number of layers that can be moved off the GPUs.
        draft_forms: Possible values of `PlanChoice.draft_form`, largest file first.

    Returns:
        The choice and its plan. If nothing fits, the smallest choice, with a plan whose `fits` is False.

    Raises:
        OptionError: The model cannot be loaded with the options of `start`.
        MemoryBudgetError: There is not enough memory even to make an estimate.
    """
    # Move experts to main memory first. This slows down replies, but every other reduction takes something
    # away from the user.
    choice = start if "experts" in fixed else _with_fewest_experts_in_memory(start, plan)
    passed = [start]
    for name, lower in _steps(start, prefer, gpu_layers, draft_forms):
        if plan(choice).fits:
            break
        changed = replace(choice, **_values(name, lower))
        if name not in fixed and _saves_memory(plan, choice, changed):
            choice = changed
            passed.append(choice)
    if plan(choice).fits:
        choice = choice if "experts" in fixed else _with_fewest_experts_in_memory(choice, plan)
        choice = _restore_options(choice, passed, plan)
        choice = _maximise_context(choice, start.context_tokens, plan)
    if start.draft and not choice.draft:
        unused: tuple[PlanOption, ...] = ("draft_window", "draft_kv_type", "draft_form")
        for name in unused:
            choice = replace(choice, **_values(name, start))
    return choice, replace(plan(choice), decisions=_decisions(start, choice, plan))


def stream_least(choice: PlanChoice, plan: _Plan) -> PlanChoice:
    """Return the choice with the fewest streamed layers that fits the memory budget."""
    fewest = _fewest(
        choice.streamed_layers, lambda count: _fits(plan, replace(choice, streamed_layers=count))
    )
    return replace(choice, streamed_layers=fewest)


def _with_fewest_experts_in_memory(choice: PlanChoice, plan: _Plan) -> PlanChoice:
    """Return the choice with as many experts on the GPUs as fit there alongside everything else."""
    experts = plan(choice).experts
    if experts is None:
        return choice

    def fits_on_gpu(count: int) -> bool:
        try:
            return plan(replace(choice, experts=count)).free_bytes("gpu") >= 0
        except (OptionError, MemoryBudgetError):
            return False

    return replace(choice, experts=_fewest(experts.layers, fits_on_gpu))


def _fewest(most: int, is_enough: Callable[[int], bool]) -> int:
    """Return the smallest sufficient number, or `most` if no smaller number is sufficient."""
    fewest = 0
    while fewest < most:
        middle = (fewest + most) // 2
        if is_enough(middle):
            most = middle
        else:
            fewest = middle + 1
    return most


def _fits(plan: _Plan, choice: PlanChoice) -> bool:
    try:
        return plan(choice).fits
    except (OptionError, MemoryBudgetError):
        return False


def _saves_memory(plan: _Plan, before: PlanChoice, after: PlanChoice) -> bool:
    try:
        old, new = plan(before), plan(after)
    except (OptionError, MemoryBudgetError):
        return False
    return any(
        old.free_bytes(pool) < 0 and new.planned_bytes(pool) < old.planned_bytes(pool) for pool in old.pools
    )


def _values(name: PlanOption, choice: PlanChoice) -> dict[str, Any]:
    field = "context_tokens" if name == "context" else name
    return {field: getattr(choice, field)}


def _steps(start: PlanChoice, prefer: Preference, layers: int, draft_forms: Sequence[str]) -> list[_Step]:
    """Return the reductions to try, in order: which option to reduce, and to what value."""
    short = replace(start, context_tokens=min(start.context_tokens, SHORT_CONTEXT_TOKENS))
    shortest = replace(start, context_tokens=min(start.context_tokens, MIN_CONTEXT_TOKENS))
    # Drop heads last, because they need the least memory.
    no_drafter: list[_Step] = [
        ("draft", replace(start, draft=False)),
        ("copy", replace(start, copy=False)),
        *(("heads", replace(start, heads=count)) for count in reversed(range(start.heads))),
    ]
    keep_16_bit: _Step = ("float32", replace(start, float32=False))
    forms: list[_Step] = [("draft_form", replace(start, draft_form=form)) for form in draft_forms]
    # Start with the precision of the draft model's KV cache, which never affects replies.
    cache: list[_Step] = [
        ("draft_kv_type", replace(start, draft_kv_type="q8_0")),
        ("draft_kv_type", replace(start, draft_kv_type="q4_0")),
        ("kv_type", replace(start, kv_type="q8_0")),
        ("draft_window", replace(start, draft_window=SAVING_WINDOW_TOKENS)),
        ("kv_type", replace(start, kv_type="q4_0")),
    ]
    now = layers + 1 if start.gpu_layers is None else min(start.gpu_layers, layers + 1)
    cards: list[_Step] = [
        ("gpu_layers", replace(start, gpu_layers=fewer))
        for eighth in range(7, -1, -1)
        if layers and (fewer := (layers + 1) * eighth // 8) < now
    ]
    if prefer == "speed":
        return [("context", short), *cache, *forms, ("context", shortest), *no_drafter, keep_16_bit, *cards]
    return [keep_16_bit, *cache, *forms, *no_drafter, *cards, ("context", short), ("context", shortest)]


def _restore_options(choice: PlanChoice, passed: list[PlanChoice], plan: _Plan) -> PlanChoice:
    for name in _RESTORABLE:
        for earlier in passed:
            restored = replace(choice, **_values(name, earlier))
            if restored == choice or _fits(plan, restored):
                choice = restored
                break
    return choice


def _maximise_context(choice: PlanChoice, max_tokens: int, plan: _Plan) -> PlanChoice:
    """Return the load options with the longest context that still fits, up to `max_tokens`."""
    low, high = choice.context_tokens // BLOCK_TOKENS, max_tokens // BLOCK_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        if _fits(plan, replace(choice, context_tokens=middle * BLOCK_TOKENS)):
            low = middle
        else:
            high = middle - 1
    return replace(choice, context_tokens=max(choice.context_tokens, low * BLOCK_TOKENS))


def _decisions(start: PlanChoice, choice: PlanChoice, plan: _Plan) -> tuple[Decision, ...]:
    chosen = plan(choice)
    decisions = []
    for name, (what, why) in _descriptions(start, choice).items():
        restored = replace(choice, **_values(name, start))
        if restored == choice:
            continue
        before = plan(restored)
        saved = max(before.planned_bytes(pool) - chosen.planned_bytes(pool) for pool in chosen.pools)
        if saved:
            decisions.append(Decision(what, why, saved))
    return tuple(decisions)


def _descriptions(start: PlanChoice, choice: PlanChoice) -> dict[PlanOption, tuple[str, str]]:
    no_drafter = "repeated text can still speed up replies, and takes hardly any memory"
    return {
        "context": (
            f"a context of {choice.context_tokens:,} tokens instead of {start.context_tokens:,}",
            "a shorter context needs a smaller KV cache",
        ),
        "kv_type": (f"a KV cache of type {choice.kv_type}", _QUALITY.get(choice.kv_type, "")),
        "draft_kv_type": (
            f"a KV cache of type {choice.draft_kv_type} for the draft model",
            "the model checks what the draft model proposes, so replies stay the same",
        ),
        "draft_window": (
            f"the draft model sees only the last {choice.draft_window or 0:,} tokens",
            "the draft model's KV cache then stops growing with the chat",
        ),
        "float32": (
            "16-bit weights, not converted to float32",
            "float32 is faster on a CPU, but takes twice the memory",
        ),
        "draft_form": (
            f"{choice.draft_form} as the draft model",
            "it is a lower-bit version of the same model, so slightly fewer of its tokens are accepted",
        ),
        "draft": ("no draft model", no_drafter),
        "copy": ("no low-bit copy of the model", no_drafter),
        "heads": (
            f"only {choice.heads} of {start.heads} draft heads" if choice.heads else "no draft head",
            no_drafter,
        ),
        "experts": (
            f"the experts of {choice.experts} layers in main memory",
            "each token uses only a few experts, so GPU memory is better spent on the rest of the model",
        ),
        "gpu_layers": (
            f"only {choice.gpu_layers} layers on the GPU",
            "the CPU runs the other layers, but more slowly",
        ),
    }
