"""Find this machine's GPU and its CUDA compiler."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

from edgespec.system.gpus import installed_gpus

_NVCC = "/usr/local/cuda/bin/nvcc"  # where NVIDIA's installer puts it without adding it to the PATH
_MIB = 2**20


class CheckError(Exception):
    """The checks cannot run on this machine. The message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """The GPU that models run on.

    Attributes:
        kind: The API that llama.cpp uses, which is also part of its build option. `cpu` for no GPU.
        name: The names of the graphics cards and the version of the driver.
    """

    kind: Literal["cuda", "vulkan", "metal", "cpu"]
    name: str


def find_gpu() -> Gpu:
    """Return this machine's GPU. Raises CheckError if there is none, or if its driver does not work."""
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return Gpu("metal", "Apple Silicon")
    if shutil.which("nvidia-smi"):
        return Gpu("cuda", parse_names(_nvidia_smi("name,driver_version")))
    if "GGML_VK_VISIBLE_DEVICES" in os.environ:
        return Gpu("vulkan", f"Vulkan device {os.environ['GGML_VK_VISIBLE_DEVICES']}")
    if gpus := installed_gpus():
        return Gpu("vulkan", " and ".join(gpu.name for gpu in gpus))
    raise CheckError(
        "no GPU was found: nvidia-smi is missing, the kernel lists no GPU, and this is not an Apple Silicon"
        " Mac; install the driver, or add --cpu to run the checks on the CPU"
    )


def find_nvcc() -> str:
    """Return the path of nvcc. Raises CheckError if it is missing, or newer than the driver."""
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc") or _NVCC
    try:
        version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        raise CheckError(
            f"{nvcc} does not run, but is needed to build llama-cpp-python for CUDA; install the CUDA"
            " toolkit, or set CUDACXX to the path of nvcc"
        ) from None
    compiler = re.search(r"release (\d+)\.", version)
    driver = re.search(r"CUDA (?:\w+ )?Version: (\d+)\.", subprocess.getoutput("nvidia-smi"))
    if compiler and driver and int(compiler[1]) > int(driver[1]):
        raise CheckError(
            f"{nvcc} is from CUDA {compiler[1]}, but the driver supports only CUDA {driver[1]}; update the"
            " driver, or set CUDACXX to the nvcc of an older toolkit"
        )
    return nvcc


def used_bytes() -> int:
    """Return the used memory of all NVIDIA cards. Raises CheckError if nvidia-smi does not report it."""
    return parse_memory(_nvidia_smi("memory.used"))


def parse_memory(output: str) -> int:
    """Return the total memory in bytes from nvidia-smi's output, which has one line in MiB per card."""
    lines = output.split("\n")
    if not all(re.fullmatch(r"\d+( MiB)?", line.strip()) for line in lines):
        raise CheckError(f"nvidia-smi does not report the used memory of this card: {output!r}")
    return sum(int(line.split()[0]) for line in lines) * _MIB


def parse_names(output: str) -> str:
    """Describe the cards in nvidia-smi's output, which has a name and a driver version on each line."""
    rows = [line.rpartition(", ") for line in output.split("\n")]
    names = [name for name, _, _ in rows]
    counted = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    return f"{', '.join(counted)}, driver {rows[0][2]}"


def _nvidia_smi(query: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    output = completed.stdout.strip()
    if completed.returncode or not output:
        reason = (output or completed.stderr.strip()).split("\n")[0] or f"exit status {completed.returncode}"
        raise CheckError(f"nvidia-smi failed: {reason}; repair the driver, or add --cpu to use the CPU")
    return output
