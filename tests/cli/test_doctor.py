"""`edgespec doctor`: what this machine is and can do."""

from __future__ import annotations

import errno
import os
import re
import sys
import tempfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

import edgespec
from edgespec.api.machine import Gpu, InstalledGpu, MlxInfo, inspect_machine
from edgespec.backends.llamacpp.build_info import LlamaCppInfo
from edgespec.backends.llamacpp.native import GpuLibrary
from edgespec.cli.doctor import _folder, _hardware, _libraries
from edgespec.errors import BackendError
from edgespec.model.formats.mlx_files import mlx_installed
from edgespec.system.installation import BUILD_FLAGS
from tests.cli.conftest import Run, json_of

NO_MLX = MlxInfo(problem="not installed", is_installed=False)


@pytest.mark.long
def test_json_names_the_facts_and_the_checks(run: Run) -> None:
    report = json_of(run("doctor", "--json"))
    machine = report["machine"]
    assert machine["memory_total_bytes"] > machine["memory_available_bytes"] > 0
    assert machine["llama_cpp"]["version"]
    assert machine["llama_cpp"]["default_threads"] <= machine["logical_cores"]
    assert machine["folders"].keys() == {"models", "chats", "cache", "logs", "aliases"}
    demo = next(check for check in report["checks"] if check["name"] == "demo")
    assert demo["ok"]
    assert "generated 16 tokens" in demo["finding"]


def test_mlx_is_told_with_its_versions_and_its_device() -> None:
    machine = inspect_machine()
    if not mlx_installed():
        pytest.skip("MLX is not installed")
    assert machine.mlx.version == metadata.version("mlx")
    assert machine.mlx.lm_version == metadata.version("mlx-lm")
    assert machine.mlx.device


def test_mlx_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    assert inspect_machine().mlx == NO_MLX


@pytest.mark.parametrize(
    ("accelerator", "mlx", "ok", "says", "next_step"),
    [
        ("", NO_MLX, True, "not installed.*scripts/setup mlx$", ""),
        ("metal", NO_MLX, False, "not installed$", "run scripts/setup mlx"),
        ("", MlxInfo(problem="does not load"), False, "does not load$", "run scripts/setup mlx"),
        ("", MlxInfo("0.32", "0.32", "CPU"), True, "mlx 0.32, mlx-lm 0.32, on CPU$", ""),
        (
            "metal",
            MlxInfo("0.32", "0.32", "GPU (M4)", True, False, 8_000_000_000),
            True,
            "GPU .M4., .* 7.5 GiB of GPU memory",
            "",
        ),
        ("cuda", MlxInfo("0.32", "0.32", "CPU"), True, "without CUDA", "run scripts/setup mlx-cuda"),
        ("cuda", MlxInfo("0.32", "0.32", "GPU", False, True), True, "on GPU$", ""),
    ],
)
def test_what_is_said_of_mlx(accelerator: str, mlx: MlxInfo, ok: bool, says: str, next_step: str) -> None:
    machine = replace(inspect_machine(), accelerator=accelerator, mlx=mlx)
    (check,) = [check for check in _libraries(machine) if check.name == "mlx"]
    assert (check.ok, check.next_step) == (ok, next_step)
    assert re.search(says, check.finding)


def test_each_check_is_a_line(run: Run) -> None:
    result = run("doctor")
    assert result.exit_code == 0
    names = [line.split()[1] for line in result.stdout.splitlines() if not line.startswith(" ")]
    assert names == [
        "edgespec", "system", "processor", "memory", "llama.cpp", "gpu", "mlx", "models", "chats", "cache",
        "logs", "aliases", "settings", "demo",
    ]  # fmt: skip
    assert "\x1b" not in result.stdout


def test_a_demo_that_does_not_run_is_the_exit_status(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: object, **options: object) -> None:
        raise BackendError("it broke", "mend it")

    monkeypatch.setattr(edgespec, "load", load)
    result = run("doctor")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-2:] == ["warn  demo       it broke", "                 next: mend it"]


def test_what_is_amiss_has_a_next_step() -> None:
    machine = inspect_machine()
    without_library = replace(machine, llama_cpp=LlamaCppInfo(problem="it does not load; install it"))
    assert not _libraries(without_library)[0].ok
    memory = next(c for c in _hardware(replace(machine, memory_available_bytes=10**9)) if c.name == "memory")
    assert not memory.ok
    assert memory.next_step


_RADEON = "0000:03:00.0"
_CARD = Gpu("Vulkan0", "Radeon", 3 * 2**30, 8 * 2**30, has_own_memory=True, pci_address=_RADEON)
_SHARED = Gpu("Vulkan1", "Iris", 3 * 2**30, 8 * 2**30, has_own_memory=False)
_CUDA = replace(_CARD, name="CUDA0")
_AMD = InstalledGpu("AMD", "AMD Navi", _RADEON, 8 * 2**30)
_INTEL = InstalledGpu("Intel", "Intel Iris", "0000:00:02.0")
_NVIDIA = InstalledGpu("NVIDIA", "NVIDIA RTX", "0000:01:00.0")


@pytest.mark.parametrize(
    ("llama_cpp", "accelerator", "installed", "ok", "says", "next_step"),
    [
        (LlamaCppInfo("1.0"), "", (), True, "none found", "^$"),
        (LlamaCppInfo("1.0", gpus=(_CARD,)), "vulkan", (_AMD,), True, "^Radeon .*3.0 GiB of 8.0 GiB", "^$"),
        (LlamaCppInfo("1.0", gpus=(_CARD, _SHARED)), "", (), True, "; Iris .Vulkan1., shares", "^$"),
        (LlamaCppInfo("1.0", gpus=(_CARD,)), "vulkan", (_AMD, _INTEL), True, "; not used: Intel Iris$", "^$"),
        (
            LlamaCppInfo("1.0", gpus=(_CARD,)), "cuda", (_AMD, _NVIDIA), True, "; not used: NVIDIA RTX$",
            "nvidia-cuda-toolkit.*setup cuda$",
        ),
        (LlamaCppInfo("1.0", gpus=(_CUDA,)), "cuda", (_AMD, _NVIDIA), True, "; not used: NVIDIA RTX$", "^$"),
        # Without their addresses, it is unknown which of the GPUs are used.
        (LlamaCppInfo("1.0", gpus=(_SHARED,)), "cuda", (_AMD, _NVIDIA), True, "shares main memory$", "^$"),
        (
            LlamaCppInfo("1.0", gpus=(_CARD,)), "cuda", (replace(_NVIDIA, pci_address=""),), True,
            "GiB free$", "^$",
        ),
        (LlamaCppInfo("1.0"), "cuda", (_NVIDIA,), False, "NVIDIA RTX", "nvidia-cuda-toolkit.*setup cuda$"),
        (
            LlamaCppInfo("1.0"), "vulkan", (_AMD, _INTEL), False, "AMD Navi, 8.0 GiB and Intel Iris",
            "glslc.*setup vulkan$",
        ),
        (
            LlamaCppInfo("1.0"), "metal", (), False, "METAL",
            f'run CMAKE_ARGS="{BUILD_FLAGS} -DGGML_METAL=on" .* llama-cpp-python==1.0$',
        ),
        (
            LlamaCppInfo("1.0", gpu_library=GpuLibrary("vulkan", "libvulkan.so.1: not found")), "", (), False,
            "libvulkan.so.1: not found", "mesa-vulkan-drivers",
        ),
        (LlamaCppInfo("1.0", gpu_library=GpuLibrary("cuda")), "cuda", (), False, "CUDA", "nvidia-smi"),
    ],
)  # fmt: skip
def test_gpus_are_named_with_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
    llama_cpp: LlamaCppInfo,
    accelerator: str,
    installed: tuple[InstalledGpu, ...],
    ok: bool,
    says: str,
    next_step: str,
) -> None:
    monkeypatch.setenv("PATH", "")  # without nvidia-smi
    machine = replace(
        inspect_machine(), llama_cpp=llama_cpp, accelerator=accelerator, installed_gpus=installed
    )
    (check,) = [check for check in _libraries(machine) if check.name == "gpu"]
    assert check.ok == ok
    assert re.search(says, check.finding)
    assert re.search(next_step, check.next_step)
    assert ok or check.next_step


def test_amx_that_is_off_is_named_with_its_cause() -> None:
    cause = "it crashed in a test (SIGILL)"
    machine = replace(inspect_machine(), llama_cpp=LlamaCppInfo("1.0", amx_problem=cause))
    check = _libraries(machine)[0]
    assert check.ok
    assert cause in check.finding
    assert re.search(f'CMAKE_ARGS="{BUILD_FLAGS}" .* llama-cpp-python==1.0$', check.next_step)


@pytest.mark.parametrize(
    ("number", "finding", "next_step"),
    [
        (
            errno.ENOSPC,
            "the disk is full; ",
            "free some space on the disk that contains {}, for example with `edgespec",
        ),
        (
            errno.EDQUOT,
            "your disk quota is used up; ",
            "free some space on the disk that contains {}, for example with `edgespec",
        ),
        (errno.EROFS, "read-only file system; ", "set HF_HUB_CACHE to a writable folder"),
        (errno.EACCES, "permission denied; ", "make {} writable for your user, or set HF_HUB_CACHE to"),
    ],
)
def test_a_folder_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, finding: str, next_step: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryFile", fail)
    check = _folder("models", tmp_path / "new", "HF_HUB_CACHE")
    assert not check.ok
    assert check.finding.startswith(f"{tmp_path / 'new'} cannot be written: {finding}")
    assert check.finding.endswith(" free")
    assert check.next_step.startswith(next_step.format(tmp_path / "new"))


def test_a_folder_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    check = _folder("models", tmp_path / "new" / "folder", "HF_HUB_CACHE")
    assert check.ok
    assert "(not created yet); " in check.finding
    assert not (tmp_path / "new").exists()


def test_a_file_in_place_of_a_folder(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path / "file"))
    result = run("doctor")
    assert (
        f"warn  chats      {tmp_path / 'file' / 'chats'} cannot be written: not a directory" in result.stdout
    )
