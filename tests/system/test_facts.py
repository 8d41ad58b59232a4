"""Facts are saved for later runs. Damage, locks and full disks cause neither errors nor wrong facts."""

from __future__ import annotations

import os
import random
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.system import facts
from edgespec.system.facts import Facts

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "facts.sqlite"


def reopened(path: Path) -> Facts:
    """Open a file like a new process, without facts that this process could not save."""
    facts._unsaved.pop(path, None)
    return Facts(path)


@pytest.mark.long
@settings(max_examples=40)
@given(facts=st.dictionaries(st.text(st.characters()), _JSON, max_size=4), kind=st.sampled_from("ab"))
def test_round_trip(facts: dict[str, Any], kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip.sqlite"
    reopened(path).put(kind, facts)
    store = reopened(path)
    assert {key: store.get(kind, key) for key in facts} == facts
    assert store.delete("c") == 0
    assert (store.delete("a", "b") > 0) == bool(facts)
    assert [store.get(kind, key) for key in facts] == [None] * len(facts)
    assert not store.notice


def test_facts_are_private_and_replaced(path: Path) -> None:
    store = Facts(path)
    assert store.get("speed", "one") is None
    assert not path.exists()
    for value in (1, 2):
        store.put("speed", {"one": value, "\udc80": value})
    assert [reopened(path).get("speed", key) for key in ("one", "\udc80", "two")] == [2, 2, None]
    assert reopened(path).get("other", "one") is None
    assert os.listdir(path.parent) == [path.name]
    if sys.platform != "win32":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_the_oldest_facts_of_a_kind_are_deleted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_MAX_FACTS", 3)
    Facts(path).put("few", {"0": 0})
    for number in (0, 1, 2, 0, 3):
        Facts(path).put("many", {str(number): number})
    store = reopened(path)
    assert [store.get("many", str(number)) for number in range(4)] == [0, None, 2, 3]
    assert store.get("few", "0") == 0
    store.put("many", {"large": "x" * facts._MAX_VALUE_BYTES})
    assert store.get("many", "large") is None


def _truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _newer(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 2")


def _other_table(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("DROP TABLE facts")
        database.execute("CREATE TABLE facts (name TEXT)")


def _no_version(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 0")


def _leftover_journal(path: Path) -> None:
    path.with_name(f"{path.name}-journal").write_bytes(bytes(range(256)) * 40)
    path.write_text("not a database")


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(random.Random(1).randbytes(20_000)),
        lambda path: path.write_bytes(b"SQLite format 3\0" + random.Random(1).randbytes(20_000)),
        _truncated,
        _newer,
        _other_table,
        _no_version,
        _leftover_journal,
    ],
)
def test_a_damaged_file_is_replaced(path: Path, damage: Any) -> None:
    Facts(path).put("speed", {"one": 1, **{str(number): "x" * 500 for number in range(50)}})
    damage(path)
    store = reopened(path)
    assert store.get("speed", "one") in (None, 1)
    store.put("speed", {"one": 2})
    assert not store.notice
    assert reopened(path).get("speed", "one") == 2


@pytest.mark.long
@settings(max_examples=50)
@given(seed=st.integers(0, 2**32))
def test_damage_never_changes_a_fact(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path, rng = tmp_path_factory.getbasetemp() / "damaged.sqlite", random.Random(seed)
    path.unlink(missing_ok=True)
    known = {str(number): [number] * 40 for number in range(40)}
    reopened(path).put("speed", known)
    data = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 200)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    path.write_bytes(data)
    store = reopened(path)
    assert all(store.get("speed", key) in (None, value) for key, value in known.items())
    store.put("speed", {"0": "new"})
    assert store.get("speed", "0") == "new"


def test_where_nothing_can_be_saved_facts_stay_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "facts.sqlite"
    store = Facts(path)
    store.put("speed", {"one": 1})
    assert store.notice == f"measurements cannot be saved in {path}: file exists"
    assert Facts(path).get("speed", "one") == 1
    assert Facts(path).delete("speed") == 0
    assert Facts(path).get("speed", "one") is None


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pipes in folders")
@pytest.mark.parametrize("make", [os.mkdir, getattr(os, "mkfifo", None)], ids=["folder", "pipe"])
def test_something_else_in_place_of_the_file(path: Path, make: Any) -> None:
    path.parent.mkdir()
    make(path)
    store = Facts(path)
    store.put("speed", {"one": 1})
    assert store.get("speed", "one") == 1
    assert store.notice.endswith("the path is not a regular file")
    with pytest.raises(OSError, match="not a regular file"):
        store.delete("speed")


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such limit")
def test_a_full_disk_loses_only_new_facts(path: Path) -> None:
    """A limit on the size of files stands in for a full disk."""
    Facts(path).put("speed", {"one": 1})
    code = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, 2**15))
store.put("speed", {str(number): "x" * 5000 for number in range(20)})
assert store.notice
assert store.get("speed", "19") == "x" * 5000
"""
    assert _start(path, code).wait(60) == 0
    store = reopened(path)
    assert (store.get("speed", "one"), store.get("speed", "19")) == (1, None)
    store.put("speed", {"two": 2})
    assert not store.notice


def test_a_locked_file_delays_only_one_call(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_LOCK_SECONDS", 0.1)
    store = Facts(path)
    store.put("speed", {"one": 1})
    with closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert store.get("speed", "one") is None
        monkeypatch.setattr(facts, "_LOCK_SECONDS", 60.0)
        store.put("speed", {"one": 2})
        assert store.notice.endswith("database is locked")
        assert store.get("speed", "one") == 2
        with pytest.raises(OSError, match="database is locked"):
            store.delete("speed")
        store.put("speed", {"one": 3})
    monkeypatch.setattr(facts, "monotonic", lambda: time.monotonic() + facts._PAUSE_SECONDS)
    store.put("other", {"two": 2})  # This also saves what could not be saved before.
    assert [reopened(path).get(*fact) for fact in (("speed", "one"), ("other", "two"))] == [3, 2]


def test_a_file_that_another_process_is_writing_can_be_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "_LOCK_SECONDS", 0.1)
    store = Facts(path)
    store.put("speed", {"one": 1})
    with closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        store.put("speed", {"two": 2})
        assert store.notice
        assert store.get("speed", "one") == 1
    # The lock is free again, and a call notices that without waiting.
    store.put("speed", {"three": 3})
    assert not store.notice
    assert [reopened(path).get("speed", key) for key in ("one", "two", "three")] == [1, 2, 3]


def _start(path: Path, code: str) -> subprocess.Popen[bytes]:
    head = (
        "import sys; from pathlib import Path; from edgespec.system import facts; facts._LOCK_SECONDS = 60\n"
    )
    body = f"store = facts.Facts(Path(sys.argv[1]))\n{code}"
    return subprocess.Popen([sys.executable, "-c", head + body, path])


def test_several_processes_and_threads_write_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_LOCK_SECONDS", 60.0)
    code = "for n in range(20): store.put(f'kind{n % 3}', {f'NAME{n}': n})\nassert not store.notice"
    children = [_start(path, code.replace("NAME", name)) for name in ("one", "two")]

    def write(name: str) -> None:
        for number in range(20):
            Facts(path).put("thread", {f"{name}{number}": number})

    threads = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [child.wait(60) for child in children] == [0, 0]
    store = reopened(path)
    for number in range(20):
        assert [store.get("thread", f"{name}{number}") for name in "ab"] == [number, number]
        assert [store.get(f"kind{number % 3}", f"{name}{number}") for name in ("one", "two")] == [number] * 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_process_can_write(path: Path) -> None:
    store = Facts(path)
    store.put("speed", {"parent": 1})
    child = os.fork()
    if child == 0:
        store.put("speed", {"child": store.get("speed", "parent")})
        os._exit(0)
    os.waitpid(child, 0)
    assert store.get("speed", "child") == 1


def test_a_kill_while_writing_leaves_a_usable_file(path: Path) -> None:
    path.parent.mkdir()
    code = "n = 0\nwhile True: store.put('speed', {'n': n, str(n % 100): ['x' * 3000, n]}); n += 1"
    for seconds in (0.4, 0.43, 0.47, 0.5):
        child = _start(path, code)
        time.sleep(seconds)
        child.kill()
        child.wait()
        store = reopened(path)
        last = store.get("speed", "n")
        store.put("speed", {"after": seconds})
        assert reopened(path).get("speed", "after") == seconds
        if last is not None:
            assert store.get("speed", str(last % 100)) == ["x" * 3000, last]
