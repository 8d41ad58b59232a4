"""Memory figures and limits, from this system and from copies of other machines' /proc and /sys."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from edgespec.memory import budget
from edgespec.memory.budget import (
    Limit,
    address_limit,
    apple_limit,
    available_bytes,
    cgroup_limits,
    find_budget,
    peak_bytes,
    process_limits,
    resident_bytes,
)
from edgespec.system.files import format_bytes

GIB = 2**30
HELD = 100


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def _found(root: Path) -> dict[str, int]:
    return {limit.what.rpartition(" ")[2]: limit.free_bytes for limit in cgroup_limits(root)}


class TestControlGroups:
    def test_limits_of_all_parent_groups_count(self, tmp_path: Path) -> None:
        root = _write(
            tmp_path,
            {
                "proc/self/cgroup": "0::/user.slice/chat.scope\n",
                "sys/fs/cgroup/user.slice/memory.max": "5000\n",
                "sys/fs/cgroup/user.slice/memory.current": "1100",
                "sys/fs/cgroup/user.slice/chat.scope/memory.max": "max\n",
                "sys/fs/cgroup/user.slice/chat.scope/memory.current": "600",
            },
        )
        assert _found(root) == {"/user.slice": 3900}

    def test_the_page_cache_counts_as_free(self, tmp_path: Path) -> None:
        root = _write(
            tmp_path,
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "5000",
                "sys/fs/cgroup/memory.current": "2100",
                "sys/fs/cgroup/memory.stat": "anon 100\ninactive_file 1400\nactive_file 100\nunevictable 9\n",
            },
        )
        assert _found(root) == {"/": 4400}

    def test_version_1(self, tmp_path: Path) -> None:
        root = _write(
            tmp_path,
            {
                "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/ignored\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
                "sys/fs/cgroup/memory/docker/memory.limit_in_bytes": "8000",
                "sys/fs/cgroup/memory/docker/memory.usage_in_bytes": "50",
                "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": "3000",
                "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": "400",
            },
        )
        assert _found(root) == {"/docker/abc": 2600, "/docker": 7950}

    def test_a_group_path_outside_the_container_means_its_root(self, tmp_path: Path) -> None:
        files = {"proc/self/cgroup": "0::/../../outside\n", "sys/fs/cgroup/memory.max": "7000"}
        assert _found(_write(tmp_path, files)) == {"/": 7000}

    def test_a_machine_without_control_groups(self, tmp_path: Path) -> None:
        assert _found(tmp_path) == {}
        junk = _write(tmp_path, {"proc/self/cgroup": "junk", "sys/fs/cgroup/memory.max": "junk"})
        assert _found(junk) == {}

    def test_process_limits_include_the_group_limit(self, tmp_path: Path) -> None:
        files = {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "1000"}
        found = process_limits(_write(tmp_path, files))
        assert min(found, key=lambda limit: limit.free_bytes) == Limit(
            1000, "the memory limit of the control group /a", hard=True
        )
        assert found[0].what == "the memory available on this machine"


def test_the_address_space_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    used = psutil.Process().memory_info().vms
    monkeypatch.setattr(resource, "getrlimit", lambda _: (used + 3 * GIB, used + 4 * GIB))
    found = address_limit()
    assert found is not None
    assert found.hard
    assert abs(found.free_bytes - 3 * GIB) < 16 << 20
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, -1))
    assert address_limit() is None


class TestMac:
    @pytest.fixture(autouse=True)
    def asked_anew(self) -> Iterator[None]:
        budget._wired_bytes.cache_clear()
        yield
        budget._wired_bytes.cache_clear()

    def _says(self, monkeypatch: pytest.MonkeyPatch, text: str, total: int) -> Limit:
        done = subprocess.CompletedProcess([], 0, stdout=text)
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
        monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=total))
        process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=HELD))
        monkeypatch.setattr("psutil.Process", lambda: process)
        budget._wired_bytes.cache_clear()
        return apple_limit()

    def test_sysctl_runs_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        first = self._says(monkeypatch, "57344\n", 64 * GIB)
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("asked again"))
        assert apple_limit() == first

    def test_a_wired_limit_that_the_user_set(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = self._says(monkeypatch, "57344\n", 64 * GIB)
        assert found.free_bytes == 56 * GIB - HELD
        assert "iogpu.wired_limit_mb" in found.what

    @pytest.mark.parametrize(("total", "share"), [(24 * GIB, 16 * GIB), (64 * GIB, 48 * GIB)])
    def test_the_default_wired_limit_is_a_share_of_the_memory(
        self, monkeypatch: pytest.MonkeyPatch, total: int, share: int
    ) -> None:
        for text in ("0\n", "junk"):
            assert self._says(monkeypatch, text, total).free_bytes == share - HELD


class TestBudget:
    @pytest.fixture(autouse=True)
    def library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("edgespec.memory.budget.process_bytes", lambda: HELD)

    def test_a_given_budget_has_no_reserve(self) -> None:
        budget = find_budget(8 * GIB)
        assert (budget.bytes, budget.gpu_bytes, budget.source) == (8 * GIB, None, "--memory")

    def test_a_budget_beyond_the_memory_says_so_in_its_source(self) -> None:
        there = psutil.virtual_memory().total
        budget = find_budget(there + 1)
        assert budget.bytes == there + 1
        assert budget.source == f"--memory, more than this machine's {format_bytes(there)}"

    def test_a_detected_budget_leaves_a_reserve_and_names_its_source(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = (Limit(8000, "the machine"), Limit(2000, "the group /a"))
        monkeypatch.setattr("edgespec.memory.budget.process_limits", lambda: found)
        budget = find_budget()
        assert budget.bytes == 1900 + HELD
        assert budget.source == "the group /a, minus 100 B for other programs"

    def test_a_hard_limit_caps_a_given_budget(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = (Limit(1 << 20, "free now"), Limit(2000 << 20, "the group", hard=True))
        monkeypatch.setattr("edgespec.memory.budget.process_limits", lambda: found)
        assert find_budget(100 << 20).source == "--memory"
        bounded = find_budget(8 * GIB)
        assert bounded.bytes == (1900 << 20) + HELD
        assert bounded.source.endswith(", which is below --memory")

    def test_a_given_reserve_replaces_the_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = (Limit(8000, "the machine"), Limit(2000, "the group /a", hard=True))
        monkeypatch.setattr("edgespec.memory.budget.process_limits", lambda: found)
        budget = find_budget(reserve_bytes=700)
        assert (budget.bytes, budget.reserve_bytes) == (1300 + HELD, 700)
        assert find_budget().reserve_bytes == 100
        assert find_budget(1500, reserve_bytes=700).bytes == 1300 + HELD

    def test_cards_with_their_own_memory_are_a_second_pool(self) -> None:
        budget = find_budget(8 * GIB, [("CUDA0", 40 * GIB), ("CUDA1", 10 * GIB)])
        assert budget.bytes == 8 * GIB
        assert budget.gpu_bytes == 49 * GIB
        assert "free on CUDA1" in budget.source

    def test_a_full_card_is_still_a_pool(self) -> None:
        budget = find_budget(8 * GIB, [("CUDA0", 0)])
        assert (budget.gpu_bytes, budget.total_bytes) == (0, 8 * GIB)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such limit")
def test_a_real_address_space_limit() -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30));"
        "from edgespec.memory.budget import find_budget; found = find_budget();"
        "print(found.bytes, found.source)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    size, source = done.stdout.split(maxsplit=1)
    assert "address space" in source
    assert int(size) < 3 << 30


def test_limits_of_this_process() -> None:
    assert min(limit.free_bytes for limit in process_limits()) > 0


def test_memory_of_this_process() -> None:
    assert 0 < resident_bytes() <= peak_bytes() * 1.1
    assert available_bytes() > 0
