"""The GPUs that Linux lists, read from files like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.api.machine import gpu_vendors


@pytest.mark.parametrize(
    ("numbers", "nvidia_driver", "vendors"),
    [
        ((), False, ()),
        (("0x1002", "0x8086", "0x1002"), False, ("AMD", "Intel")),
        (("0x1af4", "garbage"), False, ()),  # the screen of a virtual machine
        (("0x8086",), True, ("Intel", "NVIDIA")),
        (("0x10de",), True, ("NVIDIA",)),
    ],
)
def test_vendors_are_named_once(
    tmp_path: Path, numbers: tuple[str, ...], nvidia_driver: bool, vendors: tuple[str, ...]
) -> None:
    for place, number in enumerate(numbers):
        folder = tmp_path / f"sys/class/drm/renderD{128 + place}/device"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{number}\n")
    if nvidia_driver:
        (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
        (tmp_path / "proc/driver/nvidia/version").touch()
    assert gpu_vendors(tmp_path) == vendors
