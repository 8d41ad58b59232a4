"""Measure a loaded target's cost curve once per machine, and save it for later runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from edgespec.methods.costs.constants import BUDGET_SECONDS, MAX_STEP_RATIO, REPEATS
from edgespec.methods.costs.curve import CostCurve, measure_costs
from edgespec.methods.costs.machine_speed import machine_identity
from edgespec.methods.costs.thread_search import use_fastest_threads
from edgespec.model.base import LanguageModel, LoadOptions, Progress
from edgespec.store.saved_arrays import models_fingerprint
from edgespec.system.facts import Facts

__all__ = ["FreeCosts", "PassCosts", "TargetCosts", "settings_key"]


class FreeCosts:
    """Cost model in which a pass takes the same time regardless of its width."""

    settings_key = "free"
    has_loss_limit = False
    notice = ""

    def curve(self, _progress: Progress | None = None, /) -> CostCurve:
        return CostCurve((1, 2), (1.0, 1.0))


class TargetCosts:
    """Provides the cost curve of a loaded target and saves it for later runs.

    A saved curve is used only for the same model file, machine, load options, backend version and number of
    CPU threads, which depends on what else is running. Both `curve` and `remeasure` clear the target's cache.

    Args:
        model: The loaded target model.
        options: The options that the target was loaded with.
        is_measuring: Whether to measure multi-token passes. If False and there is no valid saved curve, only
            the target step is measured, and the cost of multi-token passes is estimated.

    Attributes:
        settings_key: Key that identifies all settings that affect the duration of a pass.
        has_loss_limit: Whether to limit the time that a reply can lose to rejected drafts.
        thread_seconds: Duration of a single-token pass in seconds for each number of CPU threads that
            `choose_threads` compared.
    """

    has_loss_limit = True

    def __init__(self, model: LanguageModel, options: LoadOptions, is_measuring: bool = True) -> None:
        self._model = model
        self._is_measuring = is_measuring
        self._is_remote = options.workers is not None
        self.settings_key = settings_key(options)
        self.thread_seconds: Mapping[int, float] = {}

    @property
    def notice(self) -> str:
        """Why the cost curve could not be saved. Empty if there was no error."""
        return Facts().notice

    def _key(self) -> str:
        return f"{models_fingerprint(self._model.facts)} {self.settings_key} {self._model.threads}"

    def choose_threads(self, progress: Progress | None = None, *, again: bool = False) -> None:
        """Switch the target to the fastest number of CPU threads. See `use_fastest_threads`."""
        self.thread_seconds = use_fastest_threads(self._model, self.settings_key, progress, again=again)

    def curve(self, progress: Progress | None = None) -> CostCurve:
        """Return the saved cost curve if the target's speed has barely changed, or else measure a new one.

        Args:
            progress: Called before each pass of a new measurement. Returns False to cancel it.

        Raises:
            CancelledError: `progress` returned False.
        """
        self._model.truncate(0)
        # Network speed varies, so measure passes on workers every time.
        widths = self._model.facts.capabilities.pass_widths
        saved = None if self._is_remote else _from_json(Facts().get("costs", self._key()), widths)
        step = None
        if saved or not self._is_measuring:
            step = measure_costs(self._model, widths=(), repeats=1, budget_seconds=0.0)
            self._model.truncate(0)
        if saved and step:
            ratio = step.target_step_seconds / saved.target_step_seconds
            if 1 / MAX_STEP_RATIO < ratio < MAX_STEP_RATIO:
                return saved
        return self.remeasure(progress) if self._is_measuring or step is None else step

    def remeasure(
        self, progress: Progress | None = None, repeats: int = REPEATS, budget_seconds: float = BUDGET_SECONDS
    ) -> CostCurve:
        """Measure the durations of passes of different widths and save them as a cost curve.

        Args:
            progress: Called before each pass. Returns False to cancel the measurement.
            repeats: The number of additional passes per width.
            budget_seconds: The time budget for the measurement. See `measure_costs`.

        Raises:
            CancelledError: `progress` returned False.
        """
        self._model.truncate(0)
        curve = measure_costs(self._model, repeats=repeats, budget_seconds=budget_seconds, progress=progress)
        self._model.truncate(0)
        Facts().put("costs", {self._key(): {"widths": curve.widths, "seconds": curve.seconds}})
        return curve


PassCosts: TypeAlias = FreeCosts | TargetCosts


def settings_key(options: LoadOptions) -> str:
    """Return a key that identifies this machine and all options that affect the duration of a pass."""
    chosen = (options.threads, options.gpu_layers, options.kv_type, options.flash_attention, options.adapters)
    kernels = " exact" * options.exact + " not repacked" * (not options.repack)
    # How many layers are streamed depends on the memory that is free at the moment. Do not measure again.
    kernels += " streamed" * (options.streamed_layers > 0)
    links = options.workers.links if options.workers else ()
    workers = "".join(f" {link.address}" for link in links)
    split = " tensors" * options.split_tensors + " output" * options.output_on_worker
    return repr((chosen, machine_identity())) + kernels + workers + split


def _from_json(saved: Any, pass_widths: tuple[int, ...]) -> CostCurve | None:
    try:
        widths = tuple(int(width) for width in saved["widths"])
        return CostCurve(widths, tuple(float(seconds) for seconds in saved["seconds"]), pass_widths)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
