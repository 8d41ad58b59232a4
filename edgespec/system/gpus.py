"""Find the GPUs that Linux lists, whether or not a backend can use them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

# PCI vendor IDs of GPUs that can run models. Other vendors' devices, such as virtual displays, are ignored.
_VENDORS = {0x1002: "AMD", 0x10DE: "NVIDIA", 0x8086: "Intel"}
_ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
# Possible paths of the PCI ID database, which is an optional package.
_PRODUCTS = ("usr/share/misc/pci.ids", "usr/share/hwdata/pci.ids")
# Seconds to wait for nvidia-smi, which can take several to start the driver.
_NVIDIA_SMI_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class InstalledGpu:
    """A GPU in this machine.

    Attributes:
        vendor: `AMD`, `Intel` or `NVIDIA`.
        name: The vendor and the product name, as far as they are known.
        pci_address: The PCI address, such as `0000:01:00.0`. Empty if it is unknown.
        memory_bytes: Size of the GPU's own memory. 0 if it is unknown, or if the GPU shares main memory.
    """

    vendor: str
    name: str
    pci_address: str = ""
    memory_bytes: int = 0


def installed_gpus(root: Path = Path("/")) -> tuple[InstalledGpu, ...]:
    """Return the GPUs in this machine. `root` is the folder that contains /proc, /sys and /usr."""
    nvidia = list(_nvidia_gpus(root))
    addresses = [gpu.pci_address for gpu in nvidia]
    others = [gpu for gpu in _drm_gpus(root) if not gpu.pci_address or gpu.pci_address not in addresses]
    # The driver does not always list the GPUs in /proc.
    if (root / "proc/driver/nvidia/version").exists() and not any(
        gpu.vendor == "NVIDIA" for gpu in (*nvidia, *others)
    ):
        nvidia.append(InstalledGpu("NVIDIA", "NVIDIA GPU"))
    return (*nvidia, *others)


def with_nvidia_memory(gpus: Sequence[InstalledGpu]) -> list[InstalledGpu]:
    """Return the GPUs with the memory sizes that nvidia-smi reports, which can take seconds."""
    sizes: dict[str, int] = {}
    if any(gpu.vendor == "NVIDIA" for gpu in gpus) and (program := shutil.which("nvidia-smi")):
        query = ["--query-gpu=pci.bus_id,memory.total", "--format=csv,noheader,nounits"]
        with suppress(OSError, ValueError, subprocess.SubprocessError):
            output = subprocess.run(
                [program, *query], capture_output=True, text=True, check=True, timeout=_NVIDIA_SMI_SECONDS
            ).stdout
            for address, mib in (line.split(", ") for line in output.splitlines()):
                # nvidia-smi writes eight digits for the domain, where Linux writes four.
                sizes[address[-12:].lower()] = int(mib) * 2**20
    return [replace(gpu, memory_bytes=sizes.get(gpu.pci_address, gpu.memory_bytes)) for gpu in gpus]


def _nvidia_gpus(root: Path) -> Iterator[InstalledGpu]:
    """Yield the GPUs that NVIDIA's driver lists. They can run models without a DRM device."""
    for file in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        with suppress(OSError):
            model = re.search(r"^Model:\s*(.+?)\s*$", file.read_text("utf-8", "replace"), re.MULTILINE)
            yield InstalledGpu("NVIDIA", model[1] if model else "NVIDIA GPU", file.parent.name.lower())


def _drm_gpus(root: Path) -> Iterator[InstalledGpu]:
    """Yield the GPUs that have a render node."""
    for folder in sorted(root.glob("sys/class/drm/renderD*/device")):
        number = _read_number(folder / "vendor")
        if vendor := _VENDORS.get(number):
            address = folder.resolve().name
            yield InstalledGpu(
                vendor,
                f"{vendor} {_product(root, number, _read_number(folder / 'device'))}",
                address if _ADDRESS.fullmatch(address) else "",
                _read_number(folder / "mem_info_vram_total"),  # of AMD's driver
            )


def _read_number(file: Path) -> int:
    """Return the number in one of the kernel's files, or 0 if there is none."""
    with suppress(OSError, ValueError):
        return int(file.read_text(), 0)
    return 0


def _product(root: Path, vendor: int, device: int) -> str:
    """Return the name of a PCI product, or `GPU` and its number if the name is unknown."""
    for file in _PRODUCTS:
        with suppress(OSError):
            text = (root / file).read_text("utf-8", "replace")
            # The products of a vendor are listed after the vendor's line, each indented by a tab.
            products = re.search(rf"^{vendor:04x}  .*\n((?:[\t#].*\n)*)", text, re.MULTILINE)
            name = re.search(rf"^\t{device:04x}  (.+)", products[1], re.MULTILINE) if products else None
            if name:
                return name[1].strip()
    return f"GPU {device:04x}" if device else "GPU"
