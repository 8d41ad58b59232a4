"""Collect information about this machine and its backends for `edgespec doctor`."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

import edgespec
from edgespec.backends.llamacpp.build_info import LlamaCppInfo, build_info
from edgespec.backends.llamacpp.devices import Gpu
from edgespec.chat.store import ChatStore
from edgespec.errors import BackendMissingError
from edgespec.memory.budget import available_bytes
from edgespec.model.formats.mlx_files import mlx_installed
from edgespec.store.catalogue import user_aliases_path
from edgespec.system.files import cache_folder, log_folder
from edgespec.system.gpus import InstalledGpu, installed_gpus

__all__ = ["Gpu", "InstalledGpu", "MachineInfo", "MlxInfo", "inspect_machine"]


@dataclass(frozen=True, slots=True)
class MlxInfo:
    """Information about the installed mlx and mlx-lm packages.

    Attributes:
        version: Version of mlx.
        lm_version: Version of mlx-lm.
        device: Device that models run on.
        metal: Whether MLX can use Metal on this machine.
        cuda: Whether MLX can use CUDA on this machine.
        working_set_bytes: GPU memory limit recommended by Metal. 0 without Metal.
        problem: Why MLX is missing or cannot be loaded, in which case the other attributes are empty.
            Empty if MLX works.
        is_installed: Whether both packages are installed, even if they cannot be loaded.
    """

    version: str = ""
    lm_version: str = ""
    device: str = ""
    metal: bool = False
    cuda: bool = False
    working_set_bytes: int = 0
    problem: str = ""
    is_installed: bool = True


@dataclass(frozen=True, slots=True)
class Folders:
    """Paths of the folders and files that edgespec uses, which may not exist yet."""

    models: Path
    chats: Path
    cache: Path
    logs: Path
    aliases: Path


@dataclass(frozen=True, slots=True)
class MachineInfo:
    """Information about a machine: its system, processor, memory and installed backends.

    Attributes:
        accelerator: The GPU API that can run model layers: `metal`, `cuda` or `vulkan`. Empty if there is no
            GPU.
        gpu_vendors: Vendors of the GPUs. Detected only on Linux.
        installed_gpus: All GPUs in this machine, including those that no backend uses. Detected only on
            Linux.
        memory_available_bytes: Memory available to new programs, within the limits of this process's control
            groups.
    """

    edgespec_version: str
    python_version: str
    system: str
    cpu: str
    physical_cores: int
    logical_cores: int
    memory_total_bytes: int
    memory_available_bytes: int
    accelerator: str
    gpu_vendors: tuple[str, ...]
    installed_gpus: tuple[InstalledGpu, ...]
    llama_cpp: LlamaCppInfo
    mlx: MlxInfo
    folders: Folders

    def to_json(self) -> dict[str, object]:
        """Return the attributes as JSON-compatible values, with paths as strings."""
        folders = {name: str(path) for name, path in asdict(self.folders).items()}
        return asdict(self) | {"folders": folders}


def inspect_machine() -> MachineInfo:
    """Collect information about this machine. This loads llama.cpp and MLX if installed, but no model."""
    from huggingface_hub import constants

    installed = installed_gpus()
    vendors = tuple(sorted({gpu.vendor for gpu in installed}))
    return MachineInfo(
        edgespec_version=edgespec.__version__,
        python_version=platform.python_version(),
        system=f"{platform.system()} {platform.release()} ({platform.machine()})",
        cpu=_cpu_name(),
        physical_cores=psutil.cpu_count(logical=False) or 1,
        logical_cores=psutil.cpu_count() or 1,
        memory_total_bytes=int(psutil.virtual_memory().total),
        memory_available_bytes=available_bytes(),
        accelerator=_accelerator(vendors),
        gpu_vendors=vendors,
        installed_gpus=installed,
        llama_cpp=build_info(),
        mlx=_mlx(),
        folders=Folders(
            models=Path(constants.HF_HUB_CACHE),
            chats=ChatStore().folder,
            cache=cache_folder(),
            logs=log_folder(),
            aliases=user_aliases_path(),
        ),
    )


def _cpu_name() -> str:
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _accelerator(vendors: Sequence[str]) -> str:
    if sys.platform == "darwin":
        return "metal" if platform.machine() == "arm64" else ""
    if shutil.which("nvidia-smi") or "NVIDIA" in vendors:
        return "cuda"
    return "vulkan" if vendors else ""


def _mlx() -> MlxInfo:
    if not mlx_installed():
        return MlxInfo(problem="not installed", is_installed=False)
    try:
        from edgespec.backends.mlx.build_info import build_info as mlx_build_info

        return MlxInfo(*mlx_build_info())
    except BackendMissingError as error:
        return MlxInfo(problem=str(error))
