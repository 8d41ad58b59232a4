"""Advice for a plan that does not fit: which option to change, or which smaller model to choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from edgespec.assembly.pair_estimate import open_estimator
from edgespec.assembly.pairing import ModelPair
from edgespec.backends.base import LoadOptions
from edgespec.backends.registry import backend_of, same_backend
from edgespec.catalog import Resolved, find_installed, load_catalogue, smaller_models
from edgespec.errors import EdgespecError
from edgespec.files import format_bytes
from edgespec.memory import Budget, MemoryPlan, PlanChoice, PlanOption, compute_headroom_bytes

__all__ = ["find_advice"]

# A model of the catalogue is suggested if its file takes at most this share of the memory. The rest is for
# its cache and buffers, which are not known before it is downloaded.
_MAX_WEIGHTS_SHARE = 0.85
# A model on this machine is suggested if it fits with this context, unless the user named another.
_MIN_CONTEXT_TOKENS = 512
_ADVICE: Mapping[PlanOption, str] = {
    "context": "use --context {context} or less, or give more with --memory",
    "draft_window": "leave --draft-window out, or give more with --memory",
    "kv_type": "leave --kv-type out, or give more with --memory",
    "draft": "use --draft none, or give more with --memory",
}


def find_advice(
    fixed: set[PlanOption],
    fit: Callable[[set[PlanOption]], tuple[PlanChoice, MemoryPlan]],
    pair: ModelPair,
    options: LoadOptions,
    budget: Budget,
    headroom_bytes: int | None = None,
) -> str:
    """Return what the user can do: change one option that they named, or choose a smaller model.

    Args:
        fixed: the options that the user named.
        fit: returns the best choice and its plan if only the given options are fixed.
        pair: the models that do not fit.
        options: the load options.
        budget: the memory that may be used.
        headroom_bytes: the value of `--headroom`, or None.
    """
    for name, text in _ADVICE.items():
        if name in fixed:
            choice, plan = fit(fixed - {name})
            if plan.fits:
                return text.format(context=choice.context_tokens)
    room = budget.bytes + budget.gpu_bytes
    more = "give more with --memory"
    for smaller in smaller_models(pair.target, find_installed()):
        if weight_bytes := _weight_bytes_if_it_fits(smaller, options, room, headroom_bytes):
            size = format_bytes(weight_bytes)
            return f"choose {smaller.name} ({size}), the nearest model on this machine, or {more}"
    fitting = [
        entry
        for entry in load_catalogue().entries
        if entry.approximate_file_bytes + backend_of(entry.format).process_bytes < room * _MAX_WEIGHTS_SHARE
        and same_backend(entry.format, pair.target.format)
        and not entry.embedded_file  # The demo models are too small to be of use.
    ]
    if not fitting:
        return f"choose a smaller model or quantisation, or {more}"
    nearest = max(fitting, key=lambda entry: entry.approximate_file_bytes)
    size = format_bytes(nearest.approximate_file_bytes)
    return f"choose a smaller model, such as {nearest.name} ({size}), or a smaller quantisation, or {more}"


def _weight_bytes_if_it_fits(
    model: Resolved, options: LoadOptions, room_bytes: int, headroom_bytes: int | None
) -> int:
    """Return the bytes of a model's weights; 0 if it does not fit alone, even with a short context."""
    context_tokens = options.context_tokens or _MIN_CONTEXT_TOKENS
    options = replace(options, context_tokens=context_tokens, memory_bytes=0)
    try:
        estimator = open_estimator(model, options)
    except EdgespecError:
        return 0
    try:
        estimate = estimator.estimate(replace(options, memory_bytes=room_bytes))
    except EdgespecError:
        return 0
    finally:
        estimator.close()
    headroom = compute_headroom_bytes(estimate.total_bytes, headroom_bytes)
    fits = estimate.total_bytes + headroom + model.backend.process_bytes <= room_bytes
    return estimate.bytes_of("weights") if fits else 0
