"""Fit a target and its draft model into a memory budget by reducing load options.

Tries the least harmful reductions first, and never changes options set by the user.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from edgespec.errors import MemoryBudgetError, OptionError
from edgespec.memory.constants import (
    DRAFT_READS,
    MAIN_MEMORY_COST,
    MIN_CONTEXT_TOKENS,
    SAVING_WINDOW_TOKENS,
    SHORT_CONTEXT_TOKENS,
    TOKENS_PER_DRAFT,
)
from edgespec.memory.plan import Decision, MemoryPlan
from edgespec.model.memory_estimate import BLOCK_TOKENS, Pool

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

# The options that enable drafters. The planner drops them in this order: heads last, because they need the
# least memory.
_DRAFTERS: tuple[PlanOption, ...] = ("draft", "copy", "heads")
# Load options to restore after a reduction, in this order, while memory allows.
_RESTORABLE: dict[Preference, tuple[PlanOption, ...]] = {
    "speed": ("float32", *_DRAFTERS, "kv_type", "draft_form", "draft_window", "draft_kv_type", "context"),
    "context": ("float32", "kv_type", "context", *_DRAFTERS, "draft_form", "draft_window", "draft_kv_type"),
}
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
        batch_tokens: Number of prompt tokens per pass, and 0 for the default.
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
    batch_tokens: int = 0
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

    The planner first tries to keep all layers on the GPUs. If that does not fit, or only without drafters, it
    moves as many layers as necessary to main memory. Passes are then slower, so drafting saves more time, and
    the drafters are kept if the expected speed is higher with them.

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
    steps = _steps(start, prefer, draft_forms)
    can_move = gpu_layers > 0 and "gpu_layers" not in fixed

    def place_experts(choice: PlanChoice) -> PlanChoice:
        # Moving experts slows down replies, but every other reduction takes something away from the user.
        return choice if "experts" in fixed else _with_fewest_experts_in_memory(choice, plan)

    def place_layers(choice: PlanChoice) -> PlanChoice:
        return _with_most_layers_on_gpu(choice, start, gpu_layers, plan, place_experts)

    # To a user who prefers a long context, it is worth more than layers on the GPU.
    keeps_context = can_move and prefer == "context"
    choice = _reduce(start, steps, {*fixed, "context"} if keeps_context else fixed, plan, place_experts)
    is_whole = _fits(plan, choice) and all(
        _values(name, choice) == _values(name, start) for name in _DRAFTERS
    )
    if can_move and not is_whole:
        moved = replace(start, gpu_layers=0)
        if prefer == "speed" and "context" not in fixed:
            # A long context would take GPU memory from the layers even while it is unused.
            moved = replace(moved, context_tokens=min(start.context_tokens, SHORT_CONTEXT_TOKENS))
        drafting = _reduce(moved, steps, {*fixed, *_DRAFTERS}, plan, place_layers)
        if _fits(plan, drafting) and _drafting_pays(plan(drafting), plan(start)):
            choice = drafting
        elif not _fits(plan, choice):
            none = replace(start, draft=False, copy=False, heads=0)
            for name in set(_DRAFTERS) - fixed:
                moved = replace(moved, **_values(name, none))
            choice = _reduce(moved, steps, fixed, plan, place_layers)
    if _fits(plan, choice):
        choice = _restore_options(choice, start, steps, prefer, plan)
    if start.draft and not choice.draft:
        unused: tuple[PlanOption, ...] = ("draft_window", "draft_kv_type", "draft_form")
        for name in unused:
            choice = replace(choice, **_values(name, start))
    return choice, replace(plan(choice), decisions=_decisions(start, choice, plan))


def _reduce(
    choice: PlanChoice,
    steps: Sequence[_Step],
    fixed: AbstractSet[PlanOption],
    plan: _Plan,
    place: Callable[[PlanChoice], PlanChoice],
) -> PlanChoice:
    """Return `choice` after as few reductions as necessary, or after all of them if it never fits.

    Args:
        choice: The choice to reduce.
        steps: The reductions to try, in order.
        fixed: Options that must not change.
        plan: Returns the memory plan for a choice.
        place: Divides the model between the GPUs and main memory. Its result is what has to fit.
    """
    placed = place(choice)
    for name, lower in steps:
        if _fits(plan, placed):
            break
        value = _values(name, lower)
        # Memory that a reduction frees on the GPUs can be filled with layers, which frees main memory.
        if name not in fixed and any(
            _saves_memory(plan, each, replace(each, **value)) for each in (choice, placed)
        ):
            choice = replace(choice, **value)
            placed = place(choice)
    return placed


def _drafting_pays(drafting: MemoryPlan, whole: MemoryPlan) -> bool:
    """Return whether replies are expected to be faster with the drafters than without them.

    Without the drafters, their GPU memory could hold layers that are otherwise in main memory. The time of a
    pass is estimated from the sizes of the weights that it reads.

    Args:
        drafting: A plan with drafters and with layers in main memory.
        whole: The plan with all layers on the GPUs.
    """
    drafters = [item for item in drafting.items if item.role not in ("target", "projector")]
    # Some weights are in main memory anyway, such as the token embedding.
    moved_bytes = _target_weights(drafting, "memory") - _target_weights(whole, "memory")
    room_bytes = drafting.free_bytes("gpu") + sum(each.bytes for each in drafters if each.pool == "gpu")
    draft_bytes = sum(
        each.bytes * (1 if each.pool == "gpu" else MAIN_MEMORY_COST)
        for each in drafters
        if each.kind == "weights"
    )
    target_bytes, slowdown = _target_weights(drafting, "memory", "gpu"), MAIN_MEMORY_COST - 1
    with_drafters = target_bytes + slowdown * moved_bytes + DRAFT_READS * draft_bytes
    without = target_bytes + slowdown * max(0, moved_bytes - room_bytes)
    return with_drafters < TOKENS_PER_DRAFT * without


def _target_weights(plan: MemoryPlan, *pools: Pool) -> int:
    return sum(
        item.bytes
        for item in plan.items
        if (item.role, item.kind) == ("target", "weights") and item.pool in pools
    )


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
    if not _fits_on_gpu(plan, most := replace(choice, experts=experts.layers)):
        return most
    return replace(
        choice,
        experts=_fewest(experts.layers, lambda count: _fits_on_gpu(plan, replace(choice, experts=count))),
    )


def _with_most_layers_on_gpu(
    choice: PlanChoice,
    start: PlanChoice,
    layers: int,
    plan: _Plan,
    place_experts: Callable[[PlanChoice], PlanChoice],
) -> PlanChoice:
    """Return the choice with as many layers on the GPUs as fit there alongside everything else.

    Args:
        choice: A choice without layers on the GPUs.
        start: The choice with all layers there that may be there.
        layers: The model's number of layers.
        plan: Returns the memory plan for a choice.
        place_experts: Moves experts to main memory, which is better than moving whole layers.
    """
    if not _could_fit(plan, choice):
        return choice  # Trying numbers of layers would take long, because each one opens the model again.
    whole = place_experts(replace(choice, gpu_layers=start.gpu_layers))
    # llama.cpp counts the output layer as one more layer.
    most = layers + 1 if start.gpu_layers is None else min(start.gpu_layers, layers + 1)

    def without(moved: int) -> PlanChoice:
        return replace(whole, gpu_layers=most - moved) if moved else whole

    return without(_fewest(most, lambda moved: _fits_on_gpu(plan, without(moved))))


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
    return _satisfies(plan, choice, lambda planned: planned.fits)


def _fits_on_gpu(plan: _Plan, choice: PlanChoice) -> bool:
    return _satisfies(plan, choice, lambda planned: planned.free_bytes("gpu") >= 0)


def _could_fit(plan: _Plan, choice: PlanChoice) -> bool:
    """Return whether a choice could fit if its layers were divided between main memory and the GPUs."""
    return _satisfies(plan, choice, lambda planned: planned.total_bytes <= planned.budget.total_bytes)


def _satisfies(plan: _Plan, choice: PlanChoice, condition: Callable[[MemoryPlan], bool]) -> bool:
    try:
        return condition(plan(choice))
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


def _steps(start: PlanChoice, prefer: Preference, draft_forms: Sequence[str]) -> list[_Step]:
    """Return the reductions to try, in order: which option to reduce, and to what value."""
    short = replace(start, context_tokens=min(start.context_tokens, SHORT_CONTEXT_TOKENS))
    shortest = replace(start, context_tokens=min(start.context_tokens, MIN_CONTEXT_TOKENS))
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
    if prefer == "speed":
        return [("context", short), *cache, *forms, ("context", shortest), *no_drafter, keep_16_bit]
    return [keep_16_bit, *cache, *forms, *no_drafter, ("context", short), ("context", shortest)]


def _restore_options(
    choice: PlanChoice, start: PlanChoice, steps: Sequence[_Step], prefer: Preference, plan: _Plan
) -> PlanChoice:
    """Return the choice with every option restored as far as memory allows."""
    for name in _RESTORABLE[prefer]:
        for earlier in (start, *(lower for step, lower in steps if step == name)):
            restored = replace(choice, **_values(name, earlier))
            if restored == choice or _fits(plan, restored):
                choice = restored
                break
        if name == "context":
            choice = _maximise_context(choice, start.context_tokens, plan)
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
