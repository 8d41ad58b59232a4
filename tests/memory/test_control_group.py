"""Plans in a real control group: one that fits runs, one that does not is rejected, and nothing is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")

LOOK = """
from edgespec.memory.budget import process_limits
limit = min(process_limits(), key=lambda limit: limit.free_bytes)
print(limit.free_bytes, limit.what)
"""
# Fills the demo pair's context with a prompt, and generates a reply.
FILL = """
import edgespec
from edgespec.errors import MemoryBudgetError
try:
    with edgespec.load("demo", "auto", context=2048, reserve_full_context=True) as runtime:
        prompt = [500 + i * i % 3000 for i in range(2048 - 60)]
        stream = runtime.stream_tokens(prompt, max_tokens=16)
        list(stream)
        gave_up = [decision.what for decision in runtime.plan.decisions]
        print("ran", stream.reply.stats.generated_tokens, gave_up)
except MemoryBudgetError as error:
    print("refused", error)
"""


class Group:
    """A control group below this process's own, and its event counters."""

    def __init__(self, folder: Path, limit: str, most: str) -> None:
        self.folder = folder
        self._limit, self._most = folder / limit, folder / most

    def run(self, code: str, limit_bytes: int) -> str:
        """Run Python code in the group under a memory limit, and return its output."""
        self._limit.write_text(str(limit_bytes))
        command = f'echo $$ > {self.folder}/cgroup.procs && exec "$@"'
        done = subprocess.run(
            ["sh", "-c", command, "sh", sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, (done.returncode, done.stderr)
        assert int(self._most.read_text()) <= limit_bytes
        return done.stdout


def _own_folder() -> tuple[Path, str, str] | None:
    """Return this process's group, and the file names of a group's limit and of its peak."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            folder = Path("/sys/fs/cgroup/memory") / path.lstrip("/")
            return folder, "memory.limit_in_bytes", "memory.max_usage_in_bytes"
        if not controllers and (Path("/sys/fs/cgroup") / "cgroup.controllers").exists():
            return Path("/sys/fs/cgroup") / path.lstrip("/"), "memory.max", "memory.peak"
    return None


@pytest.fixture
def group() -> Iterator[Group]:
    own = _own_folder()
    if own is None:
        pytest.skip("this machine has no control groups for memory")
    around, limit, most = own
    folder = around / f"edgespec-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        if not os.access(folder / limit, os.W_OK) or not (folder / most).exists():
            pytest.skip("a control group below this one does not limit memory")
        yield Group(folder, limit, most)
    finally:
        folder.rmdir()


def test_the_group_limit_is_detected(group: Group) -> None:
    seen, _, what = group.run(LOOK, 200 * 2**20).partition(" ")
    assert 150 * 2**20 < int(seen) <= 200 * 2**20
    assert group.folder.name in what


Check = Callable[[str], bool]


@pytest.mark.parametrize(
    ("limit_mib", "expected"),
    [
        (100, lambda said: said.startswith("refused")),
        pytest.param(140, lambda said: said.startswith("ran") and "[]" not in said, marks=pytest.mark.long),
        (300, lambda said: said.startswith("ran") and said.endswith("[]\n")),
    ],
)
def test_plans_run_or_are_rejected_without_an_oom_kill(group: Group, limit_mib: int, expected: Check) -> None:
    said = group.run(FILL, limit_mib * 2**20)
    assert expected(said), said
