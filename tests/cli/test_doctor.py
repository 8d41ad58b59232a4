"""`edgespec doctor`: what this machine is and can do."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from importlib import metadata

import pytest

import edgespec
from edgespec.backends.llamacpp.build_info import LlamaCppInfo
from edgespec.catalog import mlx_installed
from edgespec.cli.doctor import _hardware, _libraries
from edgespec.errors import BackendError
from edgespec.machine import MlxInfo, inspect_machine
from tests.cli.conftest import Run, json_of


def test_json_names_the_facts_and_the_checks(run: Run) -> None:
    report = json_of(run("doctor", "--json"))
    machine = report["machine"]
    assert machine["memory_total_bytes"] > machine["memory_available_bytes"] > 0
    assert machine["llama_cpp"]["version"]
    assert machine["llama_cpp"]["default_threads"] <= machine["logical_cores"]
    assert machine["folders"].keys() == {"models", "chats", "logs", "aliases"}
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
    assert inspect_machine().mlx == MlxInfo(problem="not installed")


@pytest.mark.parametrize(
    ("accelerator", "mlx", "ok", "says", "next_step"),
    [
        ("", MlxInfo(problem="not installed"), True, 'not installed.*pip install "edgespec.mlx."', ""),
        ("metal", MlxInfo(problem="not installed"), False, "not installed$", 'pip install "edgespec[mlx]"'),
        ("", MlxInfo(problem="does not load"), False, "does not load$", 'pip install "edgespec[mlx]"'),
        ("", MlxInfo("0.32", "0.32", "CPU"), True, "mlx 0.32, mlx-lm 0.32, on CPU$", ""),
        (
            "metal",
            MlxInfo("0.32", "0.32", "GPU (M4)", True, False, 8_000_000_000),
            True,
            "GPU .M4., .* 7.5 GiB of GPU memory",
            "",
        ),
        ("cuda", MlxInfo("0.32", "0.32", "CPU"), True, "without it", 'pip install "edgespec[mlx-cuda]"'),
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
        "edgespec", "system", "processor", "memory", "llama.cpp", "gpu", "mlx", "models", "chats", "logs",
        "aliases", "settings", "demo",
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
    with_gpu = replace(machine, accelerator="cuda", llama_cpp=replace(machine.llama_cpp, gpu_offload=False))
    gpu = next(check for check in _libraries(with_gpu) if check.name == "gpu")
    assert not gpu.ok
    assert "-DGGML_CUDA=on" in gpu.next_step
    memory = next(c for c in _hardware(replace(machine, memory_available_bytes=10**9)) if c.name == "memory")
    assert not memory.ok
    assert memory.next_step
