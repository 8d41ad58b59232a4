"""How many cores there are for this process."""

from __future__ import annotations

from contextlib import suppress
from math import ceil
from pathlib import Path

import psutil

from edgespec.cgroups import ControlGroup, control_groups

__all__ = ["usable_cores"]


def usable_cores(root: Path = Path("/")) -> int:
    """Physical cores that this process may run on, or their time in a container; at least one.

    root: the folder under which /proc and /sys are.
    """
    cores = psutil.cpu_count(logical=False) or 1
    with suppress(AttributeError, psutil.Error):  # some systems bind no process to cores
        cores = min(cores, len(psutil.Process().cpu_affinity()))
    quotas = [ceil(quota) for group in control_groups("cpu", root) if (quota := _quota(group))]
    return max(1, min([cores, *quotas]))


def _quota(group: ControlGroup) -> float | None:
    """How many cores' time a group gets (`docker run --cpus`); None where that is not limited."""
    if group.version_1:
        told = [group.read("cpu.cfs_quota_us"), group.read("cpu.cfs_period_us")]
    else:
        told = group.read("cpu.max").split()
    if len(told) == 2 and all(number.isdigit() for number in told) and int(told[1]):
        return int(told[0]) / int(told[1])
    return None
