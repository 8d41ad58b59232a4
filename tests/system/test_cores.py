"""The number of usable cores is limited by CPU affinity and by the CPU quotas of containers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from edgespec.system import cores
from edgespec.system.cores import CpuLoad, usable_cores

V2 = "0::/app.slice/chat\n"
V1 = "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n"


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 16 if logical else 8)
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda _self: list(range(16)), raising=False)


def put(root: Path, groups: str, **files: str) -> Path:
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        (V2, {}, 8),
        (V2, {"app.slice/chat/cpu.max": "max 100000\n"}, 8),
        (V2, {"app.slice/chat/cpu.max": "200000 100000\n"}, 2),
        (V2, {"app.slice/chat/cpu.max": "150000 100000\n"}, 2),
        (V2, {"app.slice/chat/cpu.max": "1000 100000\n"}, 1),
        (V2, {"app.slice/chat/cpu.max": "max 100000", "app.slice/cpu.max": "300000 100000"}, 3),
        (V2, {"app.slice/chat/cpu.max": "9000000 100000"}, 8),
        (V2, {"app.slice/chat/cpu.max": "junk"}, 8),
        (V2, {"app.slice/chat/cpu.max": "5 0"}, 8),
        (V1, {"cpu/docker/abc/cpu.cfs_quota_us": "-1", "cpu/docker/abc/cpu.cfs_period_us": "100000"}, 8),
        (V1, {"cpu/docker/abc/cpu.cfs_quota_us": "400000", "cpu/docker/abc/cpu.cfs_period_us": "100000"}, 4),
        # A container may see only the root group.
        (V1, {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
    ],
)
def test_cpu_quotas_of_control_groups(
    tmp_path: Path, groups: str, files: dict[str, str], expected: int
) -> None:
    root = put(tmp_path, groups, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert usable_cores(root) == expected


def test_cpu_affinity_limits_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda _self: [3, 5, 7])
    assert usable_cores(tmp_path) == 3


def test_platforms_without_cpu_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(psutil.Process, "cpu_affinity")
    assert usable_cores(tmp_path) == 8


def test_this_machine_has_a_core() -> None:
    assert cores.usable_cores() >= 1


def test_only_the_time_of_other_programs_counts_as_load() -> None:
    now = busy = own = 0.0
    load = CpuLoad(lambda: now, lambda: busy, lambda: own)
    assert load.busy_cores() == 0.0
    now, busy, own = 0.5, 1.25, 0.5
    assert load.busy_cores() == pytest.approx(1.5)
    now, busy = 0.6, 9.0  # too early for another reading
    assert load.busy_cores() == pytest.approx(1.5)
    now, busy, own = 9.0, 18.0, 0.6  # this process was idle, so the load may be another one now
    assert load.busy_cores() == pytest.approx(1.5)
    now, busy, own = 10.0, 18.5, 1.6  # the system counts own time later than this process does
    assert load.busy_cores() == 0.0


def test_the_average_load_since_a_reading() -> None:
    now = busy = own = 0.0
    load = CpuLoad(lambda: now, lambda: busy, lambda: own)
    began = load.reading()
    assert load.busy_cores_since(began) == 0.0
    now, busy, own = 10.0, 14.0, 9.0
    assert load.busy_cores_since(began) == pytest.approx(0.5)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no niceness")
@pytest.mark.parametrize("niceness", [0, 5])
def test_the_load_of_this_machine_is_measured(niceness: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of low priority do not yield to a process that has low priority itself."""
    if niceness:
        monkeypatch.setattr(os, "getpriority", lambda *_: niceness)
    now, own = 0.0, 0.0
    load = CpuLoad(lambda: now, own_seconds=lambda: own)
    program = subprocess.Popen(["nice", "-n", str(niceness), sys.executable, "-c", "while True: pass"])
    try:
        while psutil.Process(program.pid).cpu_times().user < 0.3:
            time.sleep(0.01)
    finally:
        program.kill()
        program.wait()
    now, own = 1.0, 0.2
    assert load.busy_cores() > 0.0
