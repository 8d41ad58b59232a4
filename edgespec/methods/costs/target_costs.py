"""Measure a loaded target's cost curve and fastest CPU thread count, and save them for later runs.

The fastest thread count cannot be derived from the number of cores, because cores can have different speeds,
share an execution unit, or compete for memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from statistics import median
from time import perf_counter as now
from typing import Any, TypeAlias

from edgespec.errors import CancelledError
from edgespec.methods.costs.constants import (
    BUDGET_SECONDS,
    MAX_STEP_RATIO,
    MAX_THREAD_SLOWDOWN,
    MIN_THREAD_GAIN,
    REPEATS,
    STREAMED_LAYERS_RATIO,
    THREAD_BUDGET_SECONDS,
    THREAD_ROUNDS,
    THREAD_SHARES,
)
from edgespec.methods.costs.curve import CostCurve, measure_costs
from edgespec.methods.costs.machine_speed import machine_identity
from edgespec.model.base import LanguageModel, LoadOptions, Progress
from edgespec.store.saved_arrays import models_fingerprint
from edgespec.system.cores import CPU_LOAD, MAX_BUSY_CORES, usable_cores
from edgespec.system.facts import Facts

__all__ = [
    "FreeCosts",
    "PassCosts",
    "TargetCosts",
    "fastest_threads",
    "settings_key",
    "streaming_key",
    "thread_counts",
    "use_fastest_threads",
]


class FreeCosts:
    """Cost model in which a pass takes the same time regardless of its width."""

    settings_key = "free"
    has_loss_limit = False
    fixes_threads = False
    notice = ""

    def curve(self, _progress: Progress | None = None, /) -> CostCurve:
        return CostCurve((1, 2), (1.0, 1.0))


class TargetCosts:
    """Provides the cost curve of a loaded target and saves it for later runs.

    A saved curve is used only for the same model file, machine, load options, backend version and number of
    CPU threads. The number of threads can differ between runs, because it depends on what else is running.
    Both `curve` and `remeasure` clear the target's cache.

    Args:
        model: The loaded target model.
        options: The options that the target was loaded with.
        is_measuring: Whether to measure multi-token passes. If False and there is no valid saved curve, only
            the target step is measured, and the cost of multi-token passes is estimated.

    Attributes:
        settings_key: Key that identifies all settings that affect the duration of a pass, except how many
            layers are streamed. See `streaming_key`.
        has_loss_limit: Whether to limit how much time a reply can lose to rejected drafts.
        fixes_threads: Whether replies depend on the number of CPU threads, so that it must not change.
        thread_seconds: Duration of a single-token pass in seconds for each number of CPU threads that
            `choose_threads` compared.
    """

    has_loss_limit = True

    def __init__(self, model: LanguageModel, options: LoadOptions, is_measuring: bool = True) -> None:
        self._model = model
        self._is_measuring = is_measuring
        self._is_remote = options.workers is not None
        self.settings_key, self._streaming_key = settings_key(options), streaming_key(options)
        self.fixes_threads = False
        self.thread_seconds: Mapping[int, float] = {}

    @property
    def notice(self) -> str:
        """Why the cost curve could not be saved, or empty if there was no error."""
        return Facts().notice

    def _key(self) -> str:
        settings = f"{self.settings_key} {self._model.threads}{self._streaming_key}"
        return f"{models_fingerprint(self._model.facts)} {settings}"

    def choose_threads(self, progress: Progress | None = None, *, again: bool = False) -> None:
        """Switch the target to the fastest CPU thread count. See `use_fastest_threads`.

        Has no effect if `fixes_threads` is set.
        """
        if self.fixes_threads:
            return
        self.thread_seconds = use_fastest_threads(self._model, self.settings_key, progress, again=again)

    def curve(self, progress: Progress | None = None) -> CostCurve:
        """Return the saved cost curve if it still matches the target's speed, or measure a new one.

        Args:
            progress: Called before each pass of a new measurement. Returns False to cancel it.

        Raises:
            CancelledError: `progress` returned False.
        """
        self._model.truncate(0)
        # If layers run on workers, never use a saved curve, because network speed varies.
        widths = self._model.facts.capabilities.pass_widths
        saved = None if self._is_remote else _curve_from_json(Facts().get("costs", self._key()), widths)
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
        self.save(curve)
        return curve

    def save(self, curve: CostCurve) -> None:
        """Save a cost curve that was just measured, so that `curve` does not measure it again."""
        Facts().put("costs", {self._key(): {"widths": curve.widths, "seconds": curve.seconds}})


PassCosts: TypeAlias = FreeCosts | TargetCosts


def settings_key(options: LoadOptions) -> str:
    """Return a key that identifies this machine and all options that affect the duration of a pass."""
    chosen = (options.threads, options.gpu_layers, options.kv_type, options.flash_attention, options.adapters)
    kernels = " exact" * options.exact + " not repacked" * (not options.repack)
    kernels += " low bits" * options.low_bits
    # Leave out the number of streamed layers, because it varies with the amount of free memory. Results such
    # as the logits do not depend on it, but durations do. See `streaming_key`.
    kernels += " streamed" * (options.streamed_layers > 0)
    kernels += f" experts {options.experts}" if options.experts else ""
    links = options.workers.links if options.workers else ()
    workers = "".join(f" {link.address}" for link in links)
    split = " tensors" * options.split_tensors + " output" * options.output_on_worker
    return repr((chosen, machine_identity())) + kernels + workers + split


def streaming_key(options: LoadOptions) -> str:
    """Return a suffix of `settings_key` for saved durations, or "" if no layers are streamed.

    The more layers a pass reads from disk, the less its width matters. Durations measured with many streamed
    layers would therefore make wide passes, and padding to them, seem nearly free with few.
    """
    if not options.streamed_layers:
        return ""
    return f" streamed {round(log(options.streamed_layers, STREAMED_LAYERS_RATIO))}"


def _curve_from_json(saved: Any, pass_widths: tuple[int, ...]) -> CostCurve | None:
    try:
        widths = tuple(int(width) for width in saved["widths"])
        return CostCurve(widths, tuple(float(seconds) for seconds in saved["seconds"]), pass_widths)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def thread_counts(cores: int, logical_cores: int) -> tuple[int, ...]:
    """Return the thread counts to compare, starting with the number of physical cores.

    A single thread is left out, because some attention kernels round differently with it.
    """
    counts = dict.fromkeys([cores, logical_cores, *(round(share * cores) for share in THREAD_SHARES)])
    return tuple(count for count in counts if count > 1)


def fastest_threads(seconds: Mapping[int, float], cores: int) -> int:
    """Return the fastest thread count, or the number of physical cores if that is nearly as fast.

    Args:
        seconds: Duration of a pass for each number of threads.
        cores: Number of physical cores.
    """
    best = min(seconds, key=lambda count: seconds[count])
    return best if seconds[best] * MIN_THREAD_GAIN < seconds[cores] else cores


def use_fastest_threads(
    model: LanguageModel, settings_key: str, progress: Progress | None = None, *, again: bool = False
) -> Mapping[int, float]:
    """Switch a model to the fastest CPU thread count for this machine.

    Thread counts are compared once for each model and machine, in an empty context. If other programs are
    busy, the result is not used, and the comparison is repeated when the model is next loaded.

    Args:
        model: The loaded model. Its cache is cleared.
        settings_key: Identifies this machine and all options that affect the duration of a pass.
        progress: Called before the measurement. Returning False cancels it.
        again: Whether to remeasure even if there is a saved result.

    Returns:
        Duration of a single-token pass in seconds for each number of threads. Empty if there was nothing to
        compare or the measurement was disturbed.

    Raises:
        CancelledError: `progress` returned False.
    """
    cores = usable_cores()
    counts = thread_counts(cores, usable_cores(logical=True))
    # Small models use a single thread, so the number of cores does not matter.
    if model.max_threads <= 1 or len(counts) < 2:
        return {}
    key = f"{models_fingerprint(model.facts)} {settings_key} {counts}"
    seconds = {} if again else _seconds_from_json(Facts().get("threads", key))
    if set(seconds) != set(counts):
        if progress and not progress("finding the best number of CPU threads", 0.0):
            raise CancelledError("cancelled while finding the best number of CPU threads")
        seconds = _measure(model, counts)
        if CPU_LOAD.busy_cores() > MAX_BUSY_CORES:
            model.set_max_threads(cores)
            return {}
        Facts().put("threads", {key: list(seconds.items())})
    model.set_max_threads(fastest_threads(seconds, cores))
    return seconds


def _measure(model: LanguageModel, counts: tuple[int, ...]) -> dict[int, float]:
    model.truncate(0)
    found: dict[int, list[float]] = {count: [] for count in counts}
    started, remaining = now(), list(counts)
    for _ in range(THREAD_ROUNDS):
        for count in remaining:
            model.set_max_threads(count)
            found[count].append(measure_costs(model, (), repeats=0).target_step_seconds)
        fastest = min(median(each) for each in found.values())
        remaining = [count for count in remaining if median(found[count]) <= MAX_THREAD_SLOWDOWN * fastest]
        if now() - started > THREAD_BUDGET_SECONDS:
            break
    return {count: median(each) for count, each in found.items()}


def _seconds_from_json(saved: Any) -> dict[int, float]:
    try:
        return {int(count): float(seconds) for count, seconds in saved if seconds > 0}
    except (TypeError, ValueError, OverflowError):
        return {}
