"""The GPUs that Linux lists, read from files like the kernel's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgespec.system.gpus import InstalledGpu, installed_gpus, with_nvidia_memory

_PCI_IDS = """\
1002  Advanced Micro Devices, Inc. [AMD/ATI]
\t744c  Navi 31 [Radeon RX 7900 XT]
\t\t1002 0e3b  a subsystem
# a comment
\t7480  Navi 33
8086  Intel Corporation
\t7480  another device
"""


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def add_device(root: Path, address: str, **files: str) -> None:
    """Add a device with a render node, as the kernel lists it."""
    folder = root / "sys/devices/pci0000:00" / address
    for name, text in files.items():
        write(folder / name, f"{text}\n")
    node = root / "sys/class/drm" / f"renderD{128 + len(list(root.glob('sys/class/drm/*')))}"
    node.mkdir(parents=True)
    (node / "device").symlink_to(folder)


def test_a_machine_without_gpus(tmp_path: Path) -> None:
    assert installed_gpus(tmp_path) == ()
    add_device(tmp_path, "0000:00:01.0", vendor="0x1af4")  # the screen of a virtual machine
    add_device(tmp_path, "0000:00:02.0", vendor="garbage")
    add_device(tmp_path, "0000:00:03.0")
    assert installed_gpus(tmp_path) == ()


def test_products_and_memory_are_named(tmp_path: Path) -> None:
    write(tmp_path / "usr/share/misc/pci.ids", _PCI_IDS)
    add_device(
        tmp_path, "0000:03:00.0", vendor="0x1002", device="0x744c", mem_info_vram_total=str(20 * 2**30)
    )
    add_device(tmp_path, "0000:04:00.0", vendor="0x1002", device="0x7480")
    add_device(tmp_path, "0000:00:02.0", vendor="0x8086", device="0x46a6")
    assert installed_gpus(tmp_path) == (
        InstalledGpu("AMD", "AMD Navi 31 [Radeon RX 7900 XT]", "0000:03:00.0", 20 * 2**30),
        InstalledGpu("AMD", "AMD Navi 33", "0000:04:00.0"),
        InstalledGpu("Intel", "Intel GPU 46a6", "0000:00:02.0"),
    )


def test_a_gpu_of_nvidia_is_listed_once(tmp_path: Path) -> None:
    add_device(tmp_path, "0000:01:00.0", vendor="0x10de", device="0x2204")
    assert installed_gpus(tmp_path) == (InstalledGpu("NVIDIA", "NVIDIA GPU 2204", "0000:01:00.0"),)
    folder = tmp_path / "proc/driver/nvidia"
    write(folder / "version", "NVRM version: 580.1\n")
    assert len(installed_gpus(tmp_path)) == 1
    write(folder / "gpus/0000:01:00.0/information", "Model: \t\t NVIDIA RTX 3090\nIRQ:   \t\t 132\n")
    assert installed_gpus(tmp_path) == (InstalledGpu("NVIDIA", "NVIDIA RTX 3090", "0000:01:00.0"),)


def test_a_gpu_of_nvidia_that_only_its_driver_knows(tmp_path: Path) -> None:
    write(tmp_path / "proc/driver/nvidia/version", "NVRM version: 580.1\n")
    assert installed_gpus(tmp_path) == (InstalledGpu("NVIDIA", "NVIDIA GPU"),)


@pytest.mark.parametrize(
    ("output", "status", "gib"),
    [("00000000:01:00.0, 24576", 0, 24), ("[N/A]", 0, 0), ("No devices were found", 6, 0)],
)
def test_nvidia_smi_tells_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, status: int, gib: int
) -> None:
    write(tmp_path / "nvidia-smi", f"#!/bin/sh\necho '{output}'\nexit {status}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    gpus = [InstalledGpu("NVIDIA", "RTX", "0000:01:00.0"), InstalledGpu("AMD", "Navi", "0000:03:00.0", 7)]
    assert [gpu.memory_bytes for gpu in with_nvidia_memory(gpus)] == [gib * 2**30, 7]
