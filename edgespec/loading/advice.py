"""Suggest which option to change, or which smaller model to use, if a plan does not fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from edgespec.errors import EdgespecError
from edgespec.loading.constants import MAX_WEIGHTS_SHARE, MIN_SUGGESTED_CONTEXT_TOKENS
from edgespec.loading.pair_estimate import open_estimator
from edgespec.loading.pairing import ModelPair
from edgespec.memory import Budget, MemoryPlan, PlanChoice, PlanOption, shared_items
from edgespec.model.base import LoadOptions
from edgespec.model.registry import backend_of, same_backend
from edgespec.model.trial_load import TrialModel, check_loadable
from edgespec.store.catalogue import load_catalogue
from edgespec.store.installed import find_installed, smaller_models
from edgespec.store.reference import Resolved
from edgespec.system.files import format_bytes

__all__ = ["find_advice"]

_ADVICE: Mapping[PlanOption, str] = {
    "gpu_layers": "use --gpu-layers {gpu_layers} or less, or omit it",
    "context": "use --context {context} or less, or raise --memory",
    "draft_window": "omit --draft-window, or raise --memory",
    "kv_type": "omit --kv-type, or raise --memory",
    "draft": "use --draft none, or raise --memory",
    "heads": "use --head none, or raise --memory",
}


def find_advice(
    fixed: set[PlanOption],
    fit: Callable[[set[PlanOption]], tuple[PlanChoice, MemoryPlan]],
    pair: ModelPair,
    options: LoadOptions,
    budget: Budget,
    headroom_bytes: int | None = None,
) -> str:
    """Suggest an option to change or a smaller model for a plan that does not fit in memory.

    Args:
        fixed: The options that the user set.
        fit: Returns the best load options that leave the given options unchanged, and their memory plan.
        pair: The target and its draft model.
        options: The load options.
        budget: The memory budget.
        headroom_bytes: Additional memory to reserve, or None for the default.
    """
    for name, text in _ADVICE.items():
        if name in fixed:
            choice, plan = fit(fixed - {name})
            if plan.fits:
                return text.format(context=choice.context_tokens, gpu_layers=choice.gpu_layers)
    room = budget.total_bytes
    more = "raise --memory"
    target_bytes = pair.target.file_format.read_info(pair.target.path).size_bytes
    for smaller in smaller_models(pair.target, find_installed()):
        if weight_bytes := _weight_bytes_if_it_fits(smaller, options, room, headroom_bytes):
            size = format_bytes(weight_bytes)
            return f"choose {smaller.name} ({size}), which fits and is on this machine, or {more}"
    fitting = [
        entry
        for entry in load_catalogue().entries
        if entry.approximate_file_bytes + backend_of(entry.format).process_bytes < room * MAX_WEIGHTS_SHARE
        and same_backend(entry.format, pair.target.format)
        # Never suggest the demo models, which are too small to be useful.
        and not entry.embedded_file
        # A model at least as large as the target does not fit either. This also excludes the target itself.
        and entry.approximate_file_bytes < target_bytes
    ]
    # A model in a Python package has no other versions to download.
    is_packaged = pair.target.entry is not None and pair.target.entry.embedded_path is not None
    if not fitting:
        _, plan = fit(fixed)
        if plan.free_bytes("memory") >= 0:
            return f"choose a smaller quantisation of the model, or {more}"
        # Round up, because less memory would not be enough.
        needed_mib = -(-plan.planned_bytes("memory") // 2**20)
        or_smaller = "" if is_packaged else ", or choose a smaller quantisation of the model"
        return f"{more} to {needed_mib:,} MiB or more{or_smaller}"
    nearest = max(fitting, key=lambda entry: entry.approximate_file_bytes)
    size = format_bytes(nearest.approximate_file_bytes)
    return f"choose a smaller model, such as {nearest.name} ({size}), or a smaller quantisation, or {more}"


def _weight_bytes_if_it_fits(
    model: Resolved, options: LoadOptions, room_bytes: int, headroom_bytes: int | None
) -> int:
    """Return the size of a model's weights in bytes, or 0 if it does not fit even with a short context."""
    context_tokens = options.context_tokens or MIN_SUGGESTED_CONTEXT_TOKENS
    options = replace(options, context_tokens=context_tokens, memory_bytes=0)
    try:
        check_loadable([TrialModel(model.name, model.path, model.file_format, runs=False)])
        estimator = open_estimator(model, options)
    except EdgespecError:
        return 0
    try:
        estimate = estimator.estimate(replace(options, memory_bytes=room_bytes))
    except EdgespecError:
        return 0
    finally:
        estimator.close()
    shared = shared_items(estimate.total_bytes, model.backend.process_bytes, headroom_bytes)
    fits = estimate.total_bytes + sum(item.bytes for item in shared) <= room_bytes
    return estimate.bytes_of("weights") if fits else 0
