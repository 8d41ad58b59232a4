"""How much memory there is, how much was given, how much is taken."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import psutil

from edgespec.errors import OptionError

if sys.platform != "win32":
    import resource  # here: a reply may end while the interpreter does, when nothing can be imported

__all__ = ["available_bytes", "parse_size", "peak_bytes", "resident_bytes"]

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY_UNITS = {"k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}


def parse_size(text: str | int) -> int:
    """Bytes from `8GiB`, `8GB`, `800M` or a plain number. Raises OptionError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", str(text), re.IGNORECASE)
    if not match or (match[3] and not match[2]):
        raise OptionError(f"memory is {text!r}", "write it like 8GiB, 8GB or 800MiB")
    unit = match[2].lower()
    return int(float(match[1]) * (_BINARY_UNITS[unit] if match[3] else _UNITS[unit]))


def available_bytes() -> int:
    """What a new program may take now: the system's available memory, or the cgroup's if that is less."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return available
    return min(available, int(limit) - used) if limit.isdigit() else available


def resident_bytes() -> int:
    """The memory this process holds now."""
    return int(psutil.Process().memory_info().rss)


def peak_bytes() -> int:
    """The most memory this process has held."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
