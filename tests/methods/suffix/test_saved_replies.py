"""Saved replies are loaded again, stay private and limited in size, and survive damaged files.

Only new parts of prompts are saved, before their replies.
"""

from __future__ import annotations

import errno
import os
import random
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.methods.suffix import saved_replies
from edgespec.methods.suffix.saved_replies import SavedReplies, delete_saved_replies
from tests.methods.suffix.conftest import MARK, OTHER, SIZE, fill, kept, store


def test_saved_replies_are_loaded_in_order(folder: Path) -> None:
    assert kept(folder) == []
    fill(folder)
    assert kept(folder) == [[1, 2, 3], [4, 5], [6]]
    store(folder).add([7, 8])
    store(folder).add([])
    assert kept(folder) == [[1, 2, 3], [4, 5], [6], [7, 8]]


def test_loading_creates_no_file(folder: Path) -> None:
    assert kept(folder) == []
    assert not folder.parent.exists()


@pytest.mark.skipif(os.name == "nt", reason="modes are POSIX's")
def test_files_are_private(folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o755)
    before = os.umask(0)
    try:
        fill(folder)
        store(folder, max_tokens=2).add([1, 2])
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path.name


def test_each_vocabulary_has_its_own_file(folder: Path) -> None:
    fill(folder)
    store(folder, OTHER).add([9])
    assert kept(folder) == [[1, 2, 3], [4, 5], [6]]
    assert [reply.tolist() for reply in store(folder, OTHER).load()] == [[9]]


def test_the_oldest_replies_are_dropped_first(folder: Path) -> None:
    for number in range(200):
        store(folder, max_tokens=100).add([number % SIZE] * 10)
        assert store(folder).path.stat().st_size < 4 * 100 * 2 + 200
    found = kept(folder, max_tokens=100)
    assert found[-1] == [199 % SIZE] * 10
    assert 3 <= len(found) <= 10
    assert found == [[number % SIZE] * 10 for number in range(200 - len(found), 200)]


def test_many_tiny_replies_are_bounded(folder: Path) -> None:
    one = store(folder, max_tokens=100)
    for _ in range(150):
        one.add([1])
    assert one.path.stat().st_size < 1000


def test_a_reply_beyond_the_limit_leaves_the_others(folder: Path) -> None:
    fill(folder)
    store(folder, max_tokens=50).add([1] * 500)
    assert [1, 2, 3] in kept(folder)


BROKEN = {
    "empty": lambda data: b"",
    "noise": lambda data: os.urandom(500),
    "another version": lambda data: data.replace(b"replies 1", b"replies 9"),
    "another vocabulary": lambda data: data.replace(b"ab" * 32, b"cd" * 32),
    "another size": lambda data: data.replace(b" 100\n", b" 101\n"),
    "no header": lambda data: data[data.index(b"\n") + 1 :],
}


@pytest.mark.parametrize("breaking", BROKEN.values(), ids=BROKEN.keys())
def test_a_file_of_another_kind_is_reported_and_rewritten(folder: Path, breaking: object) -> None:
    assert callable(breaking)
    path = fill(folder)
    path.write_bytes(breaking(path.read_bytes()))
    again = store(folder)
    assert again.load() == []
    if path.stat().st_size:
        assert "are damaged" in again.notice
        assert str(path) in again.notice
    again.add([7])
    assert kept(folder) == [[7]]
    healthy = store(folder)
    healthy.load()
    assert healthy.notice == ""


@pytest.mark.long
@settings(max_examples=40)
@given(st.data())
def test_damage_loses_only_the_damaged_replies(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    texts = [[n, n + 1, n + 2] for n in range(8)]
    path = fill(folder, texts)
    content = bytearray(path.read_bytes())
    start = content.index(b"\n") + 1
    at = data.draw(st.integers(start, len(content) - 1))
    count = data.draw(st.integers(1, 30))
    end = min(len(content), at + count)
    how = data.draw(st.sampled_from(["overwritten", "lost", "cut"]))
    if how == "overwritten":
        content[at:end] = bytes(byte ^ 0xFF for byte in content[at:end])
    elif how == "lost":
        del content[at:end]
    else:
        del content[at:]
        end = len(path.read_bytes())
    path.write_bytes(content)
    size = (len(fill(tmp_path_factory.mktemp("whole"), texts).read_bytes()) - start) // len(texts)
    hit = set(range((at - start) // size, (end - 1 - start) // size + 1))
    again = store(folder)
    found = [reply.tolist() for reply in again.load()]
    # Zeros may have been overwritten with zeros, so a record may be intact despite being in a damaged range.
    assert [text for number, text in enumerate(texts) if number not in hit or text in found] == found
    again.add([50])
    assert kept(folder) == [*found, [50]]


def test_tokens_outside_the_vocabulary_count_as_damage(folder: Path) -> None:
    path = fill(folder, [[5], [99], [7]])
    path.write_bytes(path.read_bytes().replace(b" 100\n", b" 50\n"))
    assert kept(folder, size=50) == [[5], [7]]


def test_an_unwritable_folder_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    lost = store(tmp_path / "file" / "replies")
    assert lost.load() == []
    lost.add([1, 2])
    lost.add([3])
    assert "cannot be saved" in lost.notice
    assert "not a directory" in lost.notice


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_loaded(folder: Path) -> None:
    path = fill(folder)
    (folder / f"{path.name}.lock").unlink()
    folder.chmod(0o500)
    try:
        again = store(folder)
        assert len(again.load()) == 3
    finally:
        folder.chmod(0o700)


def test_an_unreadable_file_is_reported(folder: Path) -> None:
    path = store(folder).path
    path.mkdir(parents=True)
    again = store(folder)
    assert again.load() == []
    assert "cannot be read" in again.notice
    again.add([1])
    assert "cannot be saved" in again.notice


def test_a_full_disk_loses_only_the_current_reply(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(folder)
    real = os.write

    def write_part(handle: int, data: bytes) -> int:
        if len(data) > 7:
            return real(handle, data[:7])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "write", write_part)
        lost = store(folder)
        lost.add([8, 9])
        assert "the disk is full" in lost.notice
    assert kept(folder) == [[1, 2, 3], [4, 5], [6]]
    again = store(folder)
    again.load()
    again.add([10])
    assert kept(folder) == [[1, 2, 3], [4, 5], [6], [10]]


def test_replies_wait_while_another_process_holds_the_lock(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_replies, "_LOCK_SECONDS", 0.01)
    path = fill(folder)
    waiting = store(folder)
    with FileLock(f"{path}.lock"):
        assert len(store(folder).load()) == 3
        waiting.add([7])
        waiting.add([8])
    assert len(kept(folder)) == 3
    waiting.add([9])
    assert kept(folder)[3:] == [[7], [8], [9]]


def test_concurrent_writers_lose_nothing(folder: Path) -> None:
    def write(writer: int) -> None:
        mine = store(folder)
        for number in range(20):
            mine.add([writer, number])

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = kept(folder)
    for writer in range(6):
        assert [number for who, number in found if who == writer] == list(range(20))


def test_a_file_system_without_locks_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    fill(folder)
    monkeypatch.setattr(FileLock, "acquire", refuse)
    unlocked = store(folder)
    assert len(unlocked.load()) == 3
    unlocked.add([7])
    assert "cannot be saved" in unlocked.notice
    assert "does not appear to support" in unlocked.notice


@pytest.mark.long
def test_two_concurrent_processes(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from edgespec.methods.suffix.saved_replies import SavedReplies\n"
        "store = SavedReplies('ab' * 32, 100, Path(sys.argv[1]), 1000)\n"
        "for number in range(30): store.add([int(sys.argv[2]), number])\n"
        "assert not store.notice"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, str(folder), str(who)]) for who in (1, 2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    found = kept(folder)
    for writer in (1, 2):
        assert [number for who, number in found if who == writer] == list(range(30))


def test_deletion_removes_all_files(folder: Path) -> None:
    fill(folder)
    store(folder, OTHER).add([9])
    delete_saved_replies(folder)
    assert kept(folder) == []
    assert {path.suffix for path in folder.iterdir()} == {".lock", ""}
    assert (folder / "forgotten").read_bytes() == b""
    delete_saved_replies(folder / "nowhere")


def test_a_running_reply_is_not_saved_after_deletion(folder: Path) -> None:
    running, other = store(folder), store(folder, OTHER)
    fill(folder)
    delete_saved_replies(folder)
    running.add([1, 2])
    other.add([3])
    assert kept(folder) == []
    running.add([4, 5])
    assert kept(folder) == [[4, 5]]
    assert kept(folder, mark=OTHER) == []


def test_waiting_replies_are_not_saved_after_deletion(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_replies, "_LOCK_SECONDS", 0.01)
    path = fill(folder)
    running = store(folder)
    with FileLock(f"{path}.lock"):
        running.add([1, 2])
    delete_saved_replies(folder)
    running.add([3])
    running.add([4])
    assert kept(folder) == [[4]]


def test_replies_are_saved_in_the_users_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path / "mine"))
    SavedReplies(MARK, SIZE).add([1])
    assert list((tmp_path / "mine" / "replies").glob("*.replies"))
    delete_saved_replies()
    assert not list((tmp_path / "mine" / "replies").glob("*.replies"))


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such files")
@pytest.mark.parametrize("kind", ["device", "pipe", "link to a pipe", "folder"])
def test_only_regular_files_are_read(folder: Path, tmp_path: Path, kind: str) -> None:
    folder.mkdir(parents=True)
    first = store(folder)
    if kind == "device":
        first.path.symlink_to("/dev/null")
    elif kind == "folder":
        first.path.mkdir()
    else:
        pipe = first.path if kind == "pipe" else tmp_path / "pipe"
        os.mkfifo(pipe)
        if pipe != first.path:
            first.path.symlink_to(pipe)
    assert first.load() == []
    assert first.notice == f"saved replies cannot be read from {first.path}: the path is not a regular file"
    first.add([1, 2])
    assert first.notice == f"replies cannot be saved in {first.path}: the path is not a regular file"
    assert not stat.S_ISREG(first.path.stat().st_mode)


def words(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(SIZE), k=count)


def test_a_chat_is_saved_turn_by_turn(folder: Path) -> None:
    chat: list[int] = []
    first = store(folder)
    for turn in range(5):
        chat += words(turn, 30)
        reply = words(100 + turn, 5)
        assert first.add(reply, chat) == [[*chat[-30:], *reply]]
        chat += reply
    assert [token for text in kept(folder) for token in text] == chat


def test_a_resumed_chat_is_not_saved_again(folder: Path) -> None:
    chat = []
    first = store(folder)
    for turn in range(6):
        chat += words(turn, 12)
        reply = words(100 + turn, 9)
        first.add(reply, chat)
        chat += reply
    again = store(folder)
    again.load()
    (text,) = again.add([1, 2], [*chat, 3, 4, 5])
    assert text[-5:] == [3, 4, 5, 1, 2]
    assert len(text) < 5 + 8


def test_a_common_beginning_of_chats_is_saved_once(folder: Path) -> None:
    system = words(0, 200)
    for number in range(1, 5):
        one = store(folder)
        one.load()
        for turn in range(3):
            one.add(words(200 + number, 10), [*system, *words(10 * number + turn, 10)])
    assert len(kept(folder)) == 12
    assert sum(map(len, kept(folder))) < 200 + 12 * (20 + 8)


def test_new_text_before_known_text_is_saved_separately(folder: Path) -> None:
    one = store(folder)
    document = words(1, 200)
    one.add([1], document)
    before, reply = one.add([2, 3], [*words(2, 50), *document])
    assert before[:50] == words(2, 50)
    assert reply[-2:] == [2, 3]
    assert len(reply) < 2 + 8
    assert kept(folder)[1:] == [before, reply]


def test_a_very_long_prompt_is_saved_in_part(folder: Path) -> None:
    one = store(folder)
    fill(folder)
    one.add([1, 2], words(1, 2000))
    assert kept(folder)[:3] == [[1, 2, 3], [4, 5], [6]]
    assert kept(folder)[3] == [*words(1, 2000)[-250:], 1, 2]


@pytest.mark.parametrize("size", [3, 40])
def test_after_deletion_earlier_turns_are_not_saved_again(folder: Path, size: int) -> None:
    running = store(folder)
    chat = words(1, size)
    running.add([1], chat)
    delete_saved_replies(folder)
    chat += [1, *words(2, size)]
    assert running.add([2], chat) == []
    chat += [2, *words(3, size)]
    assert running.add([3], chat) == [[*words(3, size), 3]]
    assert kept(folder) == [[*words(3, size), 3]]
