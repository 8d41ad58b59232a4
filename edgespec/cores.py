"""How many cores there are for this process."""

from __future__ import annotations

import psutil

__all__ = ["usable_cores"]


def usable_cores() -> int:
    """Physical cores that this process may run on; at least one."""
    physical = psutil.cpu_count(logical=False) or 1
    try:
        return max(1, min(physical, len(psutil.Process().cpu_affinity())))
    except (AttributeError, psutil.Error):  # some systems bind no process to cores
        return physical
