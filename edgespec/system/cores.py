"""Determine how many cores this process can use, and how many of them other programs keep busy.

This module also finds the Linux control groups that limit this process's CPU time and memory.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import TypeAlias

import psutil

# Speed measurements count as disturbed if other programs use more than this number of cores.
MAX_BUSY_CORES = 0.3

_READ_INTERVAL_SECONDS = 0.25
# The load from other programs is measured only while this process uses at least this fraction of a core.
_MIN_OWN_SHARE = 0.2


def usable_cores(root: Path = Path("/"), *, logical: bool = False) -> int:
    """Return the number of cores that this process can use, at least 1.

    The number is limited by the process's CPU affinity and the CPU quotas of its control groups (`docker run
    --cpus`).

    Args:
        root: The folder that contains `proc` and `sys`.
        logical: Whether to count the hyper-threads of a core separately.
    """
    cores = psutil.cpu_count(logical=logical) or 1
    with suppress(AttributeError, psutil.Error):  # psutil does not support cpu_affinity on macOS.
        cores = min(cores, len(psutil.Process().cpu_affinity()))
    quotas = [ceil(quota) for group in control_groups("cpu", root) if (quota := _cpu_quota(group))]
    return max(1, min([cores, *quotas]))


def _cpu_quota(group: ControlGroup) -> float | None:
    """Return the CPU quota of a control group in cores, or None if it has no quota."""
    if group.version_1:
        fields = [group.read("cpu.cfs_quota_us"), group.read("cpu.cfs_period_us")]
    else:
        fields = group.read("cpu.max").split()
    if len(fields) == 2 and all(field.isdigit() for field in fields) and int(fields[1]):
        return int(fields[0]) / int(fields[1])
    return None


def _busy_seconds() -> float:
    """Return the CPU time that all programs have used since the system started, in seconds.

    Low-priority programs (`nice`) are excluded, because they yield to edgespec, unless edgespec itself runs
    at low priority.
    """
    times = psutil.cpu_times()
    names = ["user", "system", "irq", "softirq", "steal"]
    if sys.platform != "win32" and os.getpriority(os.PRIO_PROCESS, 0) > 0:
        names.append("nice")
    return sum(getattr(times, name, 0.0) for name in names)


CpuReading: TypeAlias = tuple[float, float, float]
"""The time, the CPU time of all programs and that of this process, in seconds."""


class CpuLoad:
    """Measures how many processor cores other programs keep busy. Thread-safe.

    Args:
        clock: Returns the time in seconds.
        busy_seconds: Returns the CPU time used by all programs in seconds.
        own_seconds: Returns the CPU time used by this process in seconds.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        busy_seconds: Callable[[], float] = _busy_seconds,
        own_seconds: Callable[[], float] = time.process_time,
    ) -> None:
        self._clock, self._busy_seconds, self._own_seconds = clock, busy_seconds, own_seconds
        self._lock = Lock()
        self._reading = self.reading()
        self._busy_cores = 0.0
        # Number of active `ignored` blocks.
        self._ignored = 0

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Ignore the load of other programs inside the `with` block.

        This keeps the number of CPU threads the same for every pass. Bit-for-bit comparisons of logits
        require this, because the rounding of some kernels depends on the number of threads.
        """
        with self._lock:
            self._ignored += 1
        try:
            yield
        finally:
            with self._lock:
                self._ignored -= 1

    def reading(self) -> CpuReading:
        """Return the current time and the CPU times until now."""
        return self._clock(), self._busy_seconds(), self._own_seconds()

    def busy_cores_since(self, reading: CpuReading) -> float:
        """Return how many cores other programs have used on average since a reading."""
        return _busy_cores(reading, self.reading())

    def busy_cores(self) -> float:
        """Return how many cores other programs used recently on average, or 0 in an `ignored` block."""
        with self._lock:
            if self._clock() - self._reading[0] >= _READ_INTERVAL_SECONDS:
                before, self._reading = self._reading, self.reading()
                if self._reading[2] - before[2] >= _MIN_OWN_SHARE * (self._reading[0] - before[0]):
                    self._busy_cores = _busy_cores(before, self._reading)
            return 0.0 if self._ignored else self._busy_cores


def _busy_cores(before: CpuReading, after: CpuReading) -> float:
    seconds, busy, own = (now - then for now, then in zip(after, before, strict=True))
    return max(0.0, busy - own) / seconds if seconds > 0 else 0.0


CPU_LOAD = CpuLoad()
"""This machine's CPU load, shared by all models."""


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A Linux control group.

    Attributes:
        folder: Folder of the group below /sys/fs/cgroup.
        name: Path of the group as seen by this process, such as `/app.slice/chat`.
        version_1: Whether the group belongs to a cgroup v1 hierarchy.
    """

    folder: Path
    name: str
    version_1: bool

    def read(self, file: str) -> str:
        """Return the contents of a file in the control group's folder, or "" if it cannot be read."""
        try:
            return (self.folder / file).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return ""


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[ControlGroup]:
    """Yield the control groups whose limits for `controller` apply to this process, innermost first.

    Args:
        controller: `memory` or `cpu`.
        root: The folder that contains `proc` and `sys`.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        lines = []
    for line in lines or ["0::/"]:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        folder = root / "sys/fs/cgroup"
        if controllers:
            folder /= controller
        innermost = PurePosixPath(path.lstrip("/"))
        for group in (innermost, *innermost.parents):
            if ".." not in group.parts:
                name = "" if str(group) == "." else str(group)
                yield ControlGroup(folder / group, f"/{name}", bool(controllers))
