"""The GPU check: its steps on the CPU, its report, and its errors on machines that cannot run it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from edgespec.cli.program import program
from edgespec.system.installation import BUILD_FLAGS
from scripts.gpu_checking.__main__ import _build_environment, main
from scripts.gpu_checking.gpu import CheckError, Gpu, find_nvcc, parse_memory, parse_names
from scripts.gpu_checking.measure_memory import parse_vulkan_log
from scripts.gpu_checking.report import read_report, to_markdown, write_report
from scripts.gpu_checking.steps import (
    Result,
    Step,
    create_steps,
    run_step,
    summarise_classes,
    summarise_plan,
    summarise_tests,
)
from tests.backends.tiny_models import write_llama

ROOT = Path(__file__).parents[2]
MIB = 2**20
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the steps are POSIX process groups")


def check_gpu(*options: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": str(path)} if path else None
    command = [sys.executable, "-m", "scripts.gpu_checking", *options]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment, timeout=600
    )


def write_program(folder: Path, name: str, output: str, status: int = 0) -> None:
    program = folder / name
    program.write_text(f"#!/bin/sh\necho '{output}'\nexit {status}\n")
    program.chmod(0o755)


def run(step: Step, folder: Path, limit_seconds: float = 60.0) -> Result:
    return run_step(step, step.name, sys.executable, folder, os.environ, limit_seconds)


def python(*programs: str) -> Step:
    return Step(
        "step", tuple(("-c", program) for program in programs), lambda outputs: ({"out": outputs[0]}, "")
    )


def test_the_output_of_nvidia_smi_is_parsed() -> None:
    assert parse_memory("1234") == 1234 * MIB
    assert parse_memory("4 MiB\n 16\n0") == 20 * MIB
    assert parse_names("NVIDIA H200, 580.95.05") == "1 x NVIDIA H200, driver 580.95.05"
    assert parse_names("A, B, 1.2\nA, B, 1.2\nC, 1.2") == "2 x A, B, 1 x C, driver 1.2"


@pytest.mark.parametrize("output", ["", "[N/A]", "12\n[Not Supported]", "-3"])
def test_memory_that_nvidia_smi_does_not_report_is_an_error(output: str) -> None:
    with pytest.raises(CheckError, match="does not report the used memory"):
        parse_memory(output)


@pytest.mark.skipif(
    sys.platform == "darwin" and platform.machine() == "arm64", reason="every such Mac has a GPU"
)
def test_a_machine_without_a_working_gpu_is_an_error(tmp_path: Path) -> None:
    missing = check_gpu(path=tmp_path)
    assert missing.returncode == 1
    assert missing.stdout == ""
    assert missing.stderr.startswith("error: no GPU was found: nvidia-smi is missing")
    assert missing.stderr.count("\n") == 1
    write_program(tmp_path, "nvidia-smi", "Failed to initialize NVML: Driver/library version mismatch", 18)
    broken = check_gpu(path=tmp_path)
    assert broken.returncode == 1
    assert broken.stderr.startswith("error: nvidia-smi failed: Failed to initialize NVML")


def test_nvcc_must_run_and_must_not_be_newer_than_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDACXX", str(tmp_path / "nvcc"))
    with pytest.raises(CheckError, match="nvcc does not run"):
        find_nvcc()
    write_program(tmp_path, "nvcc", "Cuda compilation tools, release 13.0, V13.0.88")
    write_program(tmp_path, "nvidia-smi", "| Driver Version: 550.1    CUDA Version: 12.4 |")
    with pytest.raises(CheckError, match=r"from CUDA 13, but the driver supports only CUDA 12"):
        find_nvcc()
    write_program(tmp_path, "nvidia-smi", "| Driver Version: 580.1    CUDA UMD Version: 13.1 |")
    assert find_nvcc() == str(tmp_path / "nvcc")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--draft", "models/demo-draft-q8_0.gguf"), "--draft needs --target"),
        (("--target", "no-such.gguf"), "no-such.gguf does not exist"),
        (("--wheels", "no-such-folder"), "no-such-folder does not exist"),
        (("--only", "speed"), "--only speed is not a step; choose from doctor, classes"),
        (("--fast",), "unrecognized arguments: --fast"),
    ],
)
def test_wrong_options_are_rejected(
    options: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["check_gpu", "--cpu", *options])
    with pytest.raises(SystemExit) as ending:
        main()
    assert ending.value.code == 2
    assert message in capsys.readouterr().err


def test_a_step_passes_or_fails_with_the_end_of_its_output(tmp_path: Path) -> None:
    passed = run(python("print('good')"), tmp_path)
    assert (passed.status, passed.figures, passed.problem, passed.output) == (
        "passed",
        {"out": "good\n"},
        "",
        [],
    )
    program = f"import sys; [print(i) for i in range(50)]; sys.exit({str(ROOT / 'x')!r})"
    failed = run(python(program, "print('never')"), tmp_path)
    assert (failed.status, failed.problem) == ("failed", "exit status 1")
    assert failed.output[-2:] == ["49", "./x"]
    assert len(failed.output) == 20
    unreadable = run(
        Step("step", (("-c", "print('{')"),), lambda outputs: (json.loads(outputs[0]), "")), tmp_path
    )
    assert unreadable.problem.startswith("the output cannot be read: JSONDecodeError")


def is_running(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_step_is_stopped_with_its_child_processes_after_the_time_limit(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys, time\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid, flush=True)\n"
        "time.sleep(60)"
    )
    stopped = run(python(program), tmp_path, limit_seconds=3.0)
    assert stopped.problem == "stopped after the time limit of 0.05 minutes"
    child = int(stopped.figures["out"])
    # The system may need a moment to end the process.
    deadline = time.monotonic() + 10
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


@pytest.mark.parametrize(("measured", "is_near"), [(1000, True), (936, True), (935, False), (1065, False)])
def test_planned_and_measured_memory_of_the_cards_are_compared(measured: int, is_near: bool) -> None:
    items = [
        {"kind": "weights", "bytes": 900 * MIB, "pool": "gpu"},
        {"kind": "cache", "bytes": 100 * MIB, "pool": "gpu"},
        {"kind": "weights", "bytes": 500 * MIB, "pool": "memory"},
        {"kind": "process", "bytes": 80 * MIB, "pool": "memory"},
    ]
    outputs = [json.dumps({"gpu_layers": 6, "measured_bytes": measured * MIB}), json.dumps({"items": items})]
    figures, problem = summarise_plan("cuda", outputs)
    assert figures == {"GPU layers": "6", "planned": "1,000.0 MiB", "measured": f"{measured:,}.0 MiB"}
    assert bool(problem) != is_near


@pytest.mark.parametrize(("layers", "planned"), [(6, "1,010.0"), (0, "1,000.0")])
def test_with_vulkan_main_memory_that_the_gpu_reads_counts_too(layers: int, planned: str) -> None:
    items = [
        {"kind": "weights", "bytes": 1000 * MIB, "pool": "gpu"},
        {"kind": "compute", "bytes": 10 * MIB, "pool": "memory"},
        {"kind": "output", "bytes": 100 * MIB, "pool": "memory"},
    ]
    outputs = [json.dumps({"gpu_layers": layers, "measured_bytes": 1020 * MIB}), json.dumps({"items": items})]
    figures, problem = summarise_plan("vulkan", outputs)
    assert figures["planned"] == f"{planned} MiB"
    assert not problem


def test_the_last_total_of_each_gpu_is_read_from_the_log_of_vulkan() -> None:
    line = "ggml_vulkan memory: Vulkan{}: {} at 0x55. Total device: {}, total host: {}\n"
    log = [
        line.format(0, "+8.00 MiB device", "8.00 MiB", "0 B"),
        line.format(1, "+1.50 GiB device", "1.50 GiB", "512 B"),
        "ggml_vulkan: an error\n",
        line.format(0, "-7.00 MiB device", "1.00 MiB", "2.00 KiB"),
    ]
    assert parse_vulkan_log("".join(log)) == MIB + 2048 + 1536 * MIB + 512
    assert parse_vulkan_log("") == 0


def test_all_classes_are_reported_also_if_single_passes_agree_with_no_other() -> None:
    single = {"widths": "1", "trees": False, "block_tokens": 256, "any_threads": True, "complete": False}
    wide = single | {"widths": "2 to 17", "trees": True, "block_tokens": 1, "any_threads": False}
    configuration = {"options": "exact kernels", "classes": [single, wide], "seconds": 3.0}
    model = {"model": "a.gguf", "chosen": "replies can differ", "configurations": [configuration]}
    figures, problem = summarise_classes([json.dumps({"models": [model]})])
    assert not problem
    assert figures == {
        "a.gguf": "replies can differ",
        "a.gguf, exact kernels": (
            "passes of 1 tokens agree, trees do not, prompts in blocks of 256 tokens; passes of 2 to 17"
            " tokens agree, trees too, prompts may be split anywhere, the number of CPU threads must not"
            " change"
        ),
    }


@pytest.mark.parametrize(
    ("counts", "passed"),
    [
        ("12 passed in 3.00s", True),
        ("==== 1 failed, 2 passed, 3 skipped in 3.00s ====", True),  # the exit status says that one failed
        ("57 skipped in 0.50s", False),
        ("no tests ran in 0.01s", False),
    ],
)
def test_tests_that_were_all_skipped_do_not_pass(counts: str, passed: bool) -> None:
    figures, problem = summarise_tests([f"sss\n{counts}\n"])
    assert figures == {"tests": counts.strip("= ")}
    assert bool(problem) != passed


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("cpu", ""),
        ("metal", " -DGGML_METAL=on"),
        ("vulkan", " -DGGML_VULKAN=on"),
        ("cuda", " -DGGML_CUDA=on"),
    ],
)
def test_packages_are_built_with_the_flags_of_scripts_setup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, flags: str
) -> None:
    for name in ("c++", "nvcc"):
        write_program(tmp_path, name, "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("CUDACXX", str(tmp_path / "nvcc"))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = _build_environment(Gpu(kind, "a card"))["CMAKE_ARGS"]
    assert found.startswith(BUILD_FLAGS + flags)


def test_only_the_cpu_gets_options_that_turn_the_gpu_off() -> None:
    target = ROOT / "models" / "demo-target-q8_0.gguf"
    for kind in ("cuda", "vulkan", "metal", "cpu"):
        steps = {step.name: step for step in create_steps(kind, target, None, quick=False)}
        assert {"classes-given", "verify-given", "bench-given", "plan-half"} < steps.keys()
        assert ("gpu-tests" in steps) == (kind in ("cuda", "vulkan"))
        for name in ("classes", "verify", "bench-given"):
            assert ("--gpu-layers" in steps[name].commands[-1]) == (kind == "cpu")


def test_the_report_shows_passed_and_failed_steps(tmp_path: Path) -> None:
    machine = {"GPU": "1 x NVIDIA H200, driver 580.1"}
    results = {
        "doctor": Result("doctor", "passed", 3.5, {"gpu": "llama.cpp can use the GPU"}),
        "bench": Result("bench", "failed", 60.0, {}, "exit status 1", ["a | b", "error: out of memory"]),
    }
    write_report(tmp_path / "report.md", machine, results)
    text = (tmp_path / "report.md").read_text("utf-8")
    assert "\n1 of 2 steps failed: bench.\n" in text
    assert "| doctor | passed | 3.5 |  |\n| bench | failed | 60 | exit status 1 |\n" in text
    assert "| gpu | llama.cpp can use the GPU |" in text
    assert text.endswith("    a | b\n    error: out of memory\n")
    assert "\nAll 1 steps passed.\n" in to_markdown(machine, {"doctor": results["doctor"]})
    assert read_report(tmp_path / "report.json", machine) == results
    assert read_report(tmp_path / "other.json", machine) == {}
    with pytest.raises(CheckError, match=r"from another run \(different GPU\)"):
        read_report(tmp_path / "report.json", {"GPU": "2 x NVIDIA H200, driver 580.1"})
    (tmp_path / "report.json").write_text("{")
    with pytest.raises(CheckError, match="cannot be read"):
        read_report(tmp_path / "report.json", machine)


def test_the_report_of_doctor_is_summarised() -> None:
    (doctor,) = (step for step in create_steps("cpu", None, None, quick=True) if step.name == "doctor")
    ((_, _, *command),) = doctor.commands
    figures, problem = doctor.summarise([CliRunner().invoke(program, command).stdout])
    assert not problem
    assert {"processor", "memory", "gpu"} <= figures.keys()
    assert "generated 16 tokens" in figures["demo"]


@pytest.mark.long
def test_steps_run_on_the_cpu_one_by_one(tmp_path: Path) -> None:
    target = write_llama(tmp_path / "tiny.gguf", layers=4)
    options = ("--cpu", "--quick", "--results", str(tmp_path), "--target", str(target))
    for name in ("classes-given", "plan-half"):
        done = check_gpu(*options, "--only", name)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"[1/1] {name} passed in " in done.stderr
    steps = {step["name"]: step for step in json.loads((tmp_path / "report.json").read_text())["steps"]}
    assert {name: step["status"] for name, step in steps.items()} == dict.fromkeys(
        ["classes-given", "plan-half"], "passed"
    )
    # What edgespec chooses depends on the machine.
    assert steps["classes-given"]["figures"]["tiny.gguf"]
    assert "agree" in steps["classes-given"]["figures"]["tiny.gguf, exact kernels"]
    assert steps["plan-half"]["figures"]["GPU layers"] == "2"
    assert "All 2 steps passed." in (tmp_path / "report.md").read_text()
    other = check_gpu("--cpu", "--results", str(tmp_path), "--only", "doctor")
    assert other.returncode == 1
    assert "is from another run (different run)" in other.stderr
