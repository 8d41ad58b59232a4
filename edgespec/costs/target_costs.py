"""The cost curve of a loaded target, measured once per machine and saved for later runs."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LanguageModel, LoadOptions, Progress
from edgespec.backends.registry import backends
from edgespec.costs.curve import CostCurve, measure_costs
from edgespec.errors import CancelledError
from edgespec.saved_arrays import SavedArrays, models_fingerprint

__all__ = ["FreeCosts", "PassCosts", "TargetCosts"]

# A saved curve is discarded if a target step now takes this many times more or less: another load, clock
# speed or kind of memory.
_MAX_STEP_RATIO = 2.0


class PassCosts(Protocol):
    """Source of a target's cost curve."""

    @property
    def settings_key(self) -> str:
        """Text that identifies all settings that change the duration of a pass."""

    @property
    def has_loss_limit(self) -> bool:
        """Whether replies are subject to the loss limit."""

    @property
    def notice(self) -> str:
        """Why the curve could not be saved or loaded; empty if nothing failed."""

    def curve(self, progress: Progress | None = None, /) -> CostCurve:
        """Return the cost curve, measured if need be.

        Raises:
            CancelledError: `progress` returned False.
        """


class FreeCosts:
    """Costs for tests and for drafting in every round: a pass of any width costs one target step."""

    settings_key = "free"
    has_loss_limit = False
    notice = ""

    def curve(self, _progress: Progress | None = None, /) -> CostCurve:
        return CostCurve((1, 2), (1.0, 1.0))


class TargetCosts:
    """The cost curve of one loaded target, saved in the user's data folder.

    A saved curve holds for the same model file, machine, load options and backend version. Measuring empties
    the target's cache.

    Args:
        model: The loaded target.
        options: The options that it was loaded with.
        is_measuring: False to measure only the target step and assume the cost of wider passes.
    """

    has_loss_limit = True

    def __init__(self, model: LanguageModel, options: LoadOptions, is_measuring: bool = True) -> None:
        self._model = model
        self._is_measuring = is_measuring
        self.settings_key = _settings_key(options)

    @property
    def notice(self) -> str:
        return self._store.notice

    @cached_property
    def _store(self) -> SavedArrays:
        return SavedArrays("costs", f"{models_fingerprint(self._model.facts)} {self.settings_key}")

    def curve(self, progress: Progress | None = None) -> CostCurve:
        """Return the saved curve if a target step still takes about as long, else a new one.

        Args:
            progress: Called before a measurement, which False cancels.

        Raises:
            CancelledError: `progress` returned False.
        """
        self._model.truncate(0)
        saved = _load_curve(self._store.load())
        if saved is None or not _is_current(saved, self._model):
            return self.remeasure(progress) if self._is_measuring else _measure_target_step(self._model)
        self._model.truncate(0)
        return saved

    def remeasure(
        self, progress: Progress | None = None, repeats: int = 5, budget_seconds: float = 2.0
    ) -> CostCurve:
        """Measure the curve and save it.

        Args:
            progress: Called before the measurement, which False cancels.
            repeats: Further passes per width.
            budget_seconds: Time after which no further pass begins.

        Raises:
            CancelledError: `progress` returned False.
        """
        if progress and not progress("measuring the speed of the model", 0.0):
            raise CancelledError("the speed measurement was cancelled")
        self._model.truncate(0)
        curve = measure_costs(self._model, repeats=repeats, budget_seconds=budget_seconds)
        self._model.truncate(0)
        self._store.save({"widths": np.array(curve.widths), "seconds": np.array(curve.seconds)})
        return curve


def _is_current(curve: CostCurve, model: LanguageModel) -> bool:
    """Return whether a target step takes about as long as when the curve was measured."""
    seconds = measure_costs(model, widths=(), repeats=1, budget_seconds=0.0).target_step_seconds
    return 1 / _MAX_STEP_RATIO < seconds / curve.target_step_seconds < _MAX_STEP_RATIO


def _measure_target_step(model: LanguageModel) -> CostCurve:
    """Return a curve of target steps only, so that `CostCurve.v` assumes the rest."""
    curve = measure_costs(model, widths=(), repeats=1, budget_seconds=0.0)
    model.truncate(0)
    return curve


def _settings_key(options: LoadOptions) -> str:
    chosen = (options.threads, options.gpu_layers, options.kv_type, options.flash_attention, options.adapter)
    machine = (platform.node(), platform.machine(), os.cpu_count())
    exact = " exact" if options.exact else ""
    packages = [name for backend in backends() for name in backend.packages]
    return repr((chosen, machine, [_version(name) for name in packages])) + exact


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _load_curve(saved: Mapping[str, NDArray[Any]]) -> CostCurve | None:
    """Return a saved curve; None if nothing was saved or the arrays are damaged."""
    try:
        widths = tuple(int(width) for width in saved["widths"])
        return CostCurve(widths, tuple(float(seconds) for seconds in saved["seconds"]))
    except (KeyError, TypeError, ValueError):
        return None
