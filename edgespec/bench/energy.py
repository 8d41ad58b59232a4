"""The energy a machine has taken, where it tells."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["EnergyMeter"]

_POWERCAP = Path("/sys/class/powercap")
# A whole processor; what is inside it is counted in it, and psys counts the processors once more.
_ZONE = re.compile(r"intel-rapl:\d+")


class EnergyMeter:
    """Reads the processors' energy counters (RAPL, as Linux's powercap shows them).

    They count everything that runs on the processors, not this process alone. `reason`: why there is
    nothing to read; empty where there is.
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
                self.reason = "the system lets only administrators read its energy counters"

    def read(self) -> dict[Path, int]:
        """Where the counters stand now, in microjoules; empty where there are none."""
        try:
            return {zone: _number(zone / "energy_uj") for zone in self._ranges}
        except (OSError, ValueError):
            return {}

    def joules(self, before: Mapping[Path, int], after: Mapping[Path, int]) -> float | None:
        """What was taken between two readings; None where it was not told. Counters begin anew when full."""
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
        return "macOS tells the energy taken to administrators only"
    return "the system tells no energy"


def _zones(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    zones = sorted(zone for zone in folder.iterdir() if _ZONE.fullmatch(zone.name))
    return [zone for zone in zones if (zone / "name").read_text().startswith("package")]


def _number(file: Path) -> int:
    return int(file.read_text())
