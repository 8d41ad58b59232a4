"""Find the GPUs of a Linux machine without loading any driver."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

__all__ = ["gpu_vendors"]

# PCI vendor numbers. Other devices, such as the screens of virtual machines, cannot run models.
_VENDORS = {0x1002: "AMD", 0x10DE: "NVIDIA", 0x8086: "Intel"}


def gpu_vendors(root: Path = Path("/")) -> tuple[str, ...]:
    """Return the vendors of the GPUs. `root` contains /proc and /sys."""
    found = set()
    for file in root.glob("sys/class/drm/renderD*/device/vendor"):
        with suppress(OSError, ValueError):
            found.add(_VENDORS.get(int(file.read_text(), 16), ""))
    # NVIDIA's driver for computations does not need the kernel's graphics interface.
    if (root / "proc/driver/nvidia/version").exists():
        found.add("NVIDIA")
    return tuple(sorted(found - {""}))
