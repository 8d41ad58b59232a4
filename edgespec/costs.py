"""What verify passes of a target cost here: measured once, kept, and measured again when that drifts."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LanguageModel, LoadOptions, Progress
from edgespec.learnt import LearntFile, identity_of
from edgespec.policy.curve import CostCurve, measure

__all__ = ["target_curve"]

# A plain step so much dearer or cheaper than it was means another load, another clock, other memory.
_DRIFT = 2.0
_PACKAGES = ("llama-cpp-python", "mlx", "mlx-lm")


def target_curve(
    model: LanguageModel, options: LoadOptions, progress: Progress | None = None
) -> tuple[CostCurve, str]:
    """The cost curve of a loaded target, and what went wrong with keeping it; its memory is emptied.

    It is read from the user's data folder where the same file was measured on this machine, with the same
    options and backend, and a plain step still takes about as long. progress: called before it is measured.
    Raises CancelledError.
    """
    model.truncate(0)
    notes = LearntFile("costs", f"{identity_of(model.facts)} {_how_run(options)}")
    curve = _read(notes.load())
    if curve is None or not _holds(curve, model):
        if progress:
            progress("measuring what a pass costs", 0.0)
        curve = measure(model)
        notes.save({"widths": np.array(curve.widths), "seconds": np.array(curve.seconds)})
    model.truncate(0)
    return curve, notes.notice


def _holds(curve: CostCurve, model: LanguageModel) -> bool:
    """Does a plain step still take about as long?"""
    now = measure(model, widths=(), repeats=1, budget_seconds=0.0).plain_step_seconds
    return 1 / _DRIFT < now / curve.plain_step_seconds < _DRIFT


def _how_run(options: LoadOptions) -> str:
    """All that changes what a pass costs, beside the weights."""
    chosen = (options.threads, options.gpu_layers, options.kv_type, options.flash_attention, options.adapter)
    machine = (platform.node(), platform.machine(), os.cpu_count())
    return repr((chosen, machine, [_version(name) for name in _PACKAGES]))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _read(values: Mapping[str, NDArray[Any]]) -> CostCurve | None:
    """The curve that was kept; None where there is none, or none that makes sense."""
    try:
        widths = tuple(int(width) for width in values["widths"])
        return CostCurve(widths, tuple(float(seconds) for seconds in values["seconds"]))
    except (KeyError, TypeError, ValueError):
        return None
