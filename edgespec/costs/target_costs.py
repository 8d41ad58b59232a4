"""What verify passes of a target cost here: measured once, kept, and measured again when that drifts."""

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
from edgespec.costs.curve import CostCurve, measure
from edgespec.errors import CancelledError
from edgespec.saved_arrays import SavedArrays, models_fingerprint

__all__ = ["FreeCosts", "PassCosts", "TargetCosts"]

# A plain step so much dearer or cheaper than it was means another load, another clock, other memory.
_DRIFT = 2.0


class PassCosts(Protocol):
    """What verify passes of a target cost, for those who decide whether guessing pays."""

    @property
    def how(self) -> str:
        """All that changes what a pass costs, beside the weights."""

    @property
    def bounded(self) -> bool:
        """Whether replies are to be held to what they may lose by guessing."""

    @property
    def notice(self) -> str:
        """What went wrong with keeping it; empty where nothing did."""

    def curve(self, progress: Progress | None = None, /) -> CostCurve:
        """The cost curve. progress: called before it is measured. Raises CancelledError."""


class FreeCosts:
    """A pass costs what a plain step does, however wide it is: nothing is measured, and every guess pays."""

    how = "free"
    bounded = False
    notice = ""

    def curve(self, _progress: Progress | None = None, /) -> CostCurve:
        return CostCurve((1, 2), (1.0, 1.0))


class TargetCosts:
    """The cost curve of one loaded target, kept in the user's data folder.

    It holds for the same file on the same machine, with the same options and backend. measures: False does
    without where none was kept, and assumes that each row costs a twentieth of a plain step until replies
    tell. notice: what went wrong with keeping it. Measuring empties the target's memory.
    """

    bounded = True

    def __init__(self, model: LanguageModel, options: LoadOptions, measures: bool = True) -> None:
        self._model = model
        self._measures = measures
        self.how = _how_run(options)

    @property
    def notice(self) -> str:
        return self._notes.notice

    @cached_property
    def _notes(self) -> SavedArrays:
        return SavedArrays("costs", f"{models_fingerprint(self._model.facts)} {self.how}")

    def curve(self, progress: Progress | None = None) -> CostCurve:
        """The curve that was kept, or one that is measured now where a plain step takes another time.

        progress: called before it is measured. Raises CancelledError.
        """
        self._model.truncate(0)
        kept = _read(self._notes.load())
        if kept is None or not _holds(kept, self._model):
            return self.renew(progress) if self._measures else _assumed(self._model)
        self._model.truncate(0)
        return kept

    def renew(
        self, progress: Progress | None = None, repeats: int = 5, budget_seconds: float = 2.0
    ) -> CostCurve:
        """The curve measured now, and kept. Raises CancelledError."""
        if progress and not progress("measuring what a pass costs", 0.0):
            raise CancelledError("measuring was cancelled")
        self._model.truncate(0)
        curve = measure(self._model, repeats=repeats, budget_seconds=budget_seconds)
        self._model.truncate(0)
        self._notes.save({"widths": np.array(curve.widths), "seconds": np.array(curve.seconds)})
        return curve


def _holds(curve: CostCurve, model: LanguageModel) -> bool:
    """Does a plain step still take about as long?"""
    now = measure(model, widths=(), repeats=1, budget_seconds=0.0).target_step_seconds
    return 1 / _DRIFT < now / curve.target_step_seconds < _DRIFT


def _assumed(model: LanguageModel) -> CostCurve:
    """A curve of plain steps only; see `CostCurve.v` for wider passes."""
    curve = measure(model, widths=(), repeats=1, budget_seconds=0.0)
    model.truncate(0)
    return curve


def _how_run(options: LoadOptions) -> str:
    """All that changes what a pass costs, beside the weights."""
    chosen = (options.threads, options.gpu_layers, options.kv_type, options.flash_attention, options.adapter)
    machine = (platform.node(), platform.machine(), os.cpu_count())
    exact = " exact" if options.exact else ""
    return repr((chosen, machine, [_version(name) for each in backends() for name in each.packages])) + exact


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
