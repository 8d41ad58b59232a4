"""Choose the number of CPU threads for each pass, depending on how busy other programs keep the cores."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import psutil

from edgespec.backends.base import LoadOptions
from edgespec.backends.llamacpp.kv_types import KvTypes, prefill_kernel_differs
from edgespec.cores import CPU_LOAD

__all__ = ["ThreadCount", "adapts_threads"]

# Give up a core if other programs keep more than this share of it busy. A pass waits for its slowest thread,
# so a thread that shares its core slows down all the others.
_GIVE_UP_SHARE = 0.4
# Use a core again when other programs keep less than this share of it busy.
_TAKE_BACK_SHARE = 0.3


def adapts_threads(options: LoadOptions, kv_types: KvTypes) -> bool:
    """Return whether the number of threads can change between passes.

    With `--exact`, the number stays fixed if attention would otherwise round differently.
    """
    changes_rounding = options.exact and prefill_kernel_differs(kv_types, options, threads=1)
    return options.threads is None and not changes_rounding


class ThreadCount:
    """The number of CPU threads of one context, which is lower while other programs use the CPU.

    Args:
        most: Number of threads on an idle machine.
        cores: Number of logical cores of the machine.
        busy_cores: Returns the number of cores that other programs keep busy.

    Attributes:
        current: The current number of threads, from 1 to `most`.
    """

    def __init__(
        self,
        most: int,
        cores: int | None = None,
        busy_cores: Callable[[], float] = CPU_LOAD.busy_cores,
    ) -> None:
        self.most = self.current = most
        self._cores = cores or psutil.cpu_count() or most
        self._busy_cores = busy_cores

    def update(self) -> int:
        """Adapt the number of threads to the load of the machine, and return it."""
        if self.most > 1:
            busy = self._busy_cores()
            fewer = self._free_cores(busy, _GIVE_UP_SHARE)
            more = self._free_cores(busy, _TAKE_BACK_SHARE)
            self.current = min(max(self.current, more), fewer)
        return self.current

    def _free_cores(self, busy_cores: float, share: float) -> int:
        return max(1, min(self.most, self._cores - max(0, ceil(busy_cores - share))))
