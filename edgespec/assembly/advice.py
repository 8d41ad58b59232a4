"""What to give up, or to choose instead, where a plan does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from edgespec.assembly.pair_estimate import compute_headroom_bytes, opened
from edgespec.assembly.pairing import ModelPair
from edgespec.backends.base import LoadOptions
from edgespec.backends.registry import backend_of, same_backend
from edgespec.catalog import Resolved, find_installed, load_catalogue, smaller_models
from edgespec.errors import EdgespecError
from edgespec.files import format_bytes
from edgespec.memory import Budget, MemoryPlan, PlanChoice, PlanOption

__all__ = ["advice_for"]

# A model is worth naming where its weights leave so much for its cache.
_WEIGHTS_SHARE = 0.85
# With so short a context at least, unless another was asked for.
_LEAST_CONTEXT_TOKENS = 512
_ADVICE: Mapping[PlanOption, str] = {
    "context": "use --context {context} or less, or give more with --memory",
    "draft_window": "leave --draft-window out, or give more with --memory",
    "kv_type": "leave --kv-type out, or give more with --memory",
    "draft": "use --draft none, or give more with --memory",
}


def advice_for(
    fixed: set[PlanOption],
    fit: Callable[[set[PlanOption]], tuple[PlanChoice, MemoryPlan]],
    pair: ModelPair,
    options: LoadOptions,
    budget: Budget,
) -> str:
    """What to give up of what was asked for, or the nearest model that would fit."""
    for name, text in _ADVICE.items():
        if name in fixed:
            choice, plan = fit(fixed - {name})
            if plan.fits:
                return text.format(context=choice.context_tokens)
    room = budget.bytes + budget.gpu_bytes
    more = "give more with --memory"
    for smaller in smaller_models(pair.target, find_installed()):
        if weight_bytes := _fitting_weights(smaller, options, room):
            size = format_bytes(weight_bytes)
            return f"choose {smaller.name} ({size}), the nearest model on this machine, or {more}"
    fitting = [
        entry
        for entry in load_catalogue().entries
        if entry.approximate_file_bytes + backend_of(entry.format).process_bytes < room * _WEIGHTS_SHARE
        and same_backend(entry.format, pair.target.format)
        and not entry.embedded_file  # no such model is what anybody wanted
    ]
    if not fitting:
        return f"choose a smaller model or quantisation, or {more}"
    nearest = max(fitting, key=lambda entry: entry.approximate_file_bytes)
    size = format_bytes(nearest.approximate_file_bytes)
    return f"choose a smaller model, such as {nearest.name} ({size}), or a smaller quantisation, or {more}"


def _fitting_weights(found: Resolved, options: LoadOptions, room_bytes: int) -> int:
    """What the weights of a model take; 0 where it does not fit by itself, nor with a short context."""
    asked = replace(options, context_tokens=options.context_tokens or _LEAST_CONTEXT_TOKENS, memory_bytes=0)
    try:
        model = opened(found, asked)
    except EdgespecError:
        return 0
    try:
        footprint = model.estimate(replace(asked, memory_bytes=room_bytes))
    except EdgespecError:
        return 0
    finally:
        model.close()
    taken = footprint.bytes + compute_headroom_bytes(footprint.bytes) + found.backend.process_bytes
    return footprint.of("weights") if taken <= room_bytes else 0
