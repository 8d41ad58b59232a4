"""Measure the processors' energy use with RAPL counters, if the system allows it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["EnergyMeter"]

_POWERCAP = Path("/sys/class/powercap")
# Matches the energy counters of whole processors but not of their parts, which would be counted twice.
_ZONE = re.compile(r"intel-rapl:\d+")


class EnergyMeter:
    """The processors' RAPL energy counters, read through Linux's powercap interface.

    The counters include the energy used by all processes, not just this one.

    Attributes:
        reason: Why energy cannot be measured. Empty if it can.
    """

    def __init__(self, folder: Path = _POWERCAP) -> None:
        self._ranges: dict[Path, int] = {}
        self.reason = _no_reason(folder)
        if not self.reason:
            try:
                for zone in _zones(folder):
                    self._ranges[zone] = _number(zone / "max_energy_range_uj")
                    _number(zone / "energy_uj")
            except (OSError, ValueError):
                self._ranges = {}
                self.reason = "only administrators can read this system's energy counters"

    def read(self) -> dict[Path, int]:
        """Return the energy counters in microjoules, keyed by sysfs folder. Empty if none can be read."""
        try:
            return {zone: _number(zone / "energy_uj") for zone in self._ranges}
        except (OSError, ValueError):
            return {}

    def joules(self, before: Mapping[Path, int], after: Mapping[Path, int]) -> float | None:
        """Return the energy used between two readings in joules, or None if it is unknown."""
        if not after or before.keys() != after.keys():
            return None
        taken = 0
        for zone, full in self._ranges.items():
            difference = after[zone] - before[zone]
            taken += difference if difference >= 0 else difference + full
        return taken / 1e6


def _no_reason(folder: Path) -> str:
    if _zones(folder):
        return ""
    if sys.platform == "darwin":
        return "macOS reports energy use only to administrators"
    return "this system has no energy counters"


def _zones(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    zones = sorted(zone for zone in folder.iterdir() if _ZONE.fullmatch(zone.name))
    return [zone for zone in zones if (zone / "name").read_text().startswith("package")]


def _number(file: Path) -> int:
    return int(file.read_text())
