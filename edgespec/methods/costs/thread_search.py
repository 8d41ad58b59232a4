"""Find the fastest number of CPU threads for a model on this machine.

This number cannot be derived from the number of cores, because cores can have different speeds, share an
execution unit, or compete for memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from time import perf_counter as now
from typing import Any

from edgespec.errors import CancelledError
from edgespec.methods.costs.constants import (
    MAX_THREAD_SLOWDOWN,
    MIN_THREAD_GAIN,
    THREAD_BUDGET_SECONDS,
    THREAD_ROUNDS,
    THREAD_SHARES,
)
from edgespec.methods.costs.curve import measure_costs
from edgespec.model.base import LanguageModel, Progress
from edgespec.store.saved_arrays import models_fingerprint
from edgespec.system.cores import CPU_LOAD, MAX_BUSY_CORES, usable_cores
from edgespec.system.facts import Facts

__all__ = ["fastest_threads", "thread_counts", "use_fastest_threads"]


def thread_counts(cores: int, logical_cores: int) -> tuple[int, ...]:
    """Return the thread counts to compare, starting with the number of physical cores.

    A single thread is left out, because some attention kernels round differently with it.
    """
    counts = dict.fromkeys([cores, logical_cores, *(round(share * cores) for share in THREAD_SHARES)])
    return tuple(count for count in counts if count > 1)


def fastest_threads(seconds: Mapping[int, float], cores: int) -> int:
    """Return the fastest number of threads, or the number of physical cores if it is about as fast.

    Args:
        seconds: Duration of a pass for each number of threads.
        cores: Number of physical cores.
    """
    best = min(seconds, key=lambda count: seconds[count])
    return best if seconds[best] * MIN_THREAD_GAIN < seconds[cores] else cores


def use_fastest_threads(
    model: LanguageModel, settings_key: str, progress: Progress | None = None, *, again: bool = False
) -> Mapping[int, float]:
    """Switch a model to the number of CPU threads that is fastest on this machine.

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
    seconds = {} if again else _from_json(Facts().get("threads", key))
    if set(seconds) != set(counts):
        if progress and not progress("finding the best number of CPU threads", 0.0):
            raise CancelledError("measuring the best number of CPU threads was cancelled")
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


def _from_json(saved: Any) -> dict[int, float]:
    try:
        return {int(count): float(seconds) for count, seconds in saved if seconds > 0}
    except (TypeError, ValueError, OverflowError):
        return {}
