"""Determine how many processor cores this process can use."""

from __future__ import annotations

from contextlib import suppress
from math import ceil
from pathlib import Path

import psutil

from edgespec.cgroups import ControlGroup, control_groups

__all__ = ["usable_cores"]


def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of physical cores that this process can use, at least 1.

    The process's CPU affinity and the CPU quotas of its control groups (`docker run --cpus`) limit this
    number.

    Args:
        root: The folder that contains `proc` and `sys`.
    """
    cores = psutil.cpu_count(logical=False) or 1
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
