"""What limits this process, read from folders that stand for those of other machines."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from edgespec.files import format_bytes
from edgespec.memory import find_budget, limits, resident_bytes, within_limits
from edgespec.memory.limits import Limit, address_limit, apple_limit, cgroup_limits, process_limits

GIB = 2**30
HELD = 100


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def _found(root: Path) -> dict[str, int]:
    return {limit.what.rpartition(" ")[2]: limit.bytes for limit in cgroup_limits(HELD, root)}


class TestControlGroups:
    def test_every_group_around_this_process_counts(self, tmp_path: Path) -> None:
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
        # 1000 of what the group holds are other processes'.
        assert _found(root) == {"/user.slice": 4000}

    def test_files_that_nobody_needs_are_room(self, tmp_path: Path) -> None:
        root = _write(
            tmp_path,
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "5000",
                "sys/fs/cgroup/memory.current": "2100",
                "sys/fs/cgroup/memory.stat": "anon 100\ninactive_file 1500\nactive_file 7\n",
            },
        )
        assert _found(root) == {"/": 4500}

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
        assert _found(root) == {"/docker/abc": 2700, "/docker": 8000}

    def test_the_path_may_be_one_outside_of_the_container(self, tmp_path: Path) -> None:
        files = {"proc/self/cgroup": "0::/../../outside\n", "sys/fs/cgroup/memory.max": "7000"}
        assert _found(_write(tmp_path, files)) == {"/": 7000}

    def test_a_machine_without_any(self, tmp_path: Path) -> None:
        assert _found(tmp_path) == {}
        junk = _write(tmp_path, {"proc/self/cgroup": "junk", "sys/fs/cgroup/memory.max": "junk"})
        assert _found(junk) == {}

    def test_it_is_one_of_all_limits(self, tmp_path: Path) -> None:
        files = {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "1000"}
        found = process_limits(_write(tmp_path, files))
        assert min(found, key=lambda limit: limit.bytes) == Limit(
            1000, "the memory limit of the control group /a", hard=True
        )
        assert found[0].what == "the available memory of this machine"


def test_the_address_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (5000, 9000))
    found = address_limit(held_bytes=100, mapped_bytes=1500)
    assert found is not None
    assert found.bytes == 3600
    # One thread at least computes, and others may begin beside it.
    assert found.hard
    assert found.stack_bytes is not None
    assert found.stack_bytes >= 2 * 5000
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, -1))
    assert address_limit(100, 1500) is None


class TestMac:
    @pytest.fixture(autouse=True)
    def asked_anew(self) -> Iterator[None]:
        limits._wired_bytes.cache_clear()
        yield
        limits._wired_bytes.cache_clear()

    def _says(self, monkeypatch: pytest.MonkeyPatch, text: str, total: int) -> Limit:
        done = subprocess.CompletedProcess([], 0, stdout=text)
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
        monkeypatch.setattr("psutil.virtual_memory", lambda: type("M", (), {"total": total}))
        limits._wired_bytes.cache_clear()
        found = apple_limit()
        assert found is not None
        return found

    def test_it_is_asked_for_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        first = self._says(monkeypatch, "57344\n", 64 * GIB)
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("asked again"))
        assert apple_limit() == first

    def test_a_wired_limit_that_was_set(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = self._says(monkeypatch, "57344\n", 64 * GIB)
        assert found.bytes == 56 * GIB
        assert "iogpu.wired_limit_mb" in found.what

    @pytest.mark.parametrize(("total", "share"), [(24 * GIB, 16 * GIB), (64 * GIB, 48 * GIB)])
    def test_apples_share(self, monkeypatch: pytest.MonkeyPatch, total: int, share: int) -> None:
        for text in ("0\n", "junk"):
            assert self._says(monkeypatch, text, total).bytes == share


class TestBudget:
    @pytest.fixture(autouse=True)
    def held(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("edgespec.memory.budget.resident_bytes", lambda: HELD)

    def test_what_was_given_is_taken_whole(self) -> None:
        budget = find_budget(8 * GIB)
        assert (budget.bytes, budget.gpu_bytes, budget.source) == (8 * GIB, 0, "--memory")

    def test_what_no_machine_has_is_named(self) -> None:
        there = psutil.virtual_memory().total
        budget = find_budget(there + 1)
        assert budget.bytes == there + 1
        assert budget.source == f"--memory, more than the {format_bytes(there)} of this machine"

    def test_what_was_found_leaves_a_reserve_and_says_where_it_is_from(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = (Limit(8000, "the machine"), Limit(2000, "the group /a"))
        monkeypatch.setattr("edgespec.memory.budget.process_limits", lambda: found)
        budget = find_budget()
        assert budget.bytes == 1900
        assert budget.source == "the group /a, less 100 B for other programs"
        assert budget.limits == found

    def test_what_this_process_holds_beside_python_is_no_models(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = (Limit(2000 << 20, "the group"),)
        monkeypatch.setattr("edgespec.memory.budget.process_limits", lambda: found)
        monkeypatch.setattr("edgespec.memory.budget.process_bytes", lambda: 80 << 20)
        alone = find_budget().bytes
        monkeypatch.setattr("edgespec.memory.budget.resident_bytes", lambda: 500 << 20)
        budget = find_budget()
        assert budget.bytes == alone - (420 << 20)
        assert budget.source.endswith(" and 420 MiB that this process holds already")

    def test_addresses_are_shared_with_nobody_but_threads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        limit = Limit((2000 << 20) + HELD, "addresses", hard=True, stack_bytes=40 << 20)
        monkeypatch.setattr("edgespec.memory.budget.process_limits", lambda: (limit,))
        budget = find_budget()
        assert budget.bytes == 1960 << 20
        assert budget.source == "addresses, less 40.0 MiB for stacks of threads"

    def test_of_addresses_as_much_is_left_however_much_of_the_libraries_is_in_memory(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = set()
        for held in (50 << 20, (51 << 20) + 12345):
            limit = Limit((1000 << 20) + held, "addresses", hard=True, stack_bytes=40 << 20)
            monkeypatch.setattr("edgespec.memory.budget.resident_bytes", lambda held=held: held)
            monkeypatch.setattr("edgespec.memory.budget.process_limits", lambda limit=limit: (limit,))
            found.add(find_budget().bytes)
        assert found == {(1000 - 40 + 48) << 20}

    def test_what_was_given_is_no_more_than_a_hard_limit_leaves(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = (Limit(1 << 20, "free now"), Limit(2000 << 20, "the group", hard=True))
        monkeypatch.setattr("edgespec.memory.budget.process_limits", lambda: found)
        assert within_limits(find_budget(100 << 20)) == find_budget(100 << 20)
        bounded = within_limits(find_budget(8 * GIB))
        assert bounded.bytes == 1900 << 20
        assert bounded.source.endswith(": that is less than --memory")

    def test_a_given_reserve_replaces_the_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = (Limit(8000, "the machine"), Limit(2000, "the group /a", hard=True))
        monkeypatch.setattr("edgespec.memory.budget.process_limits", lambda: found)
        budget = find_budget(reserve_bytes=700)
        assert (budget.bytes, budget.reserve_bytes) == (1300, 700)
        assert find_budget().reserve_bytes == 100
        assert within_limits(find_budget(1500, reserve_bytes=700), 700).bytes == 1300

    def test_cards_with_memory_of_their_own_are_a_second_pool(self) -> None:
        budget = find_budget(8 * GIB, [("CUDA0", 40 * GIB), ("CUDA1", 10 * GIB)])
        assert budget.bytes == 8 * GIB
        assert budget.gpu_bytes == 49 * GIB
        assert "free on CUDA1" in budget.source


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such limit")
def test_a_real_limit_of_the_address_space() -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30));"
        "from edgespec.memory import find_budget; found = find_budget();"
        "print(found.bytes, found.source)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    size, source = done.stdout.split(maxsplit=1)
    assert "address space" in source
    assert int(size) < 3 << 30


def test_this_process() -> None:
    assert min(limit.bytes for limit in process_limits()) > resident_bytes()
