"""The user's files as a corpus: text files, newest first, within limits, and tokenized once."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.engine.acceptance import Invariant
from edgespec.engine.sampling import Sampler
from edgespec.engine.sampling_params import SamplingParams
from edgespec.errors import CancelledError, OptionError
from edgespec.methods.suffix.corpus import UserFiles, read_user_files, suffix_drafter, vocabulary_fingerprint
from edgespec.methods.suffix.drafter import SuffixDrafter
from tests.raising import raises
from tests.tabular import LetterVocabulary


class Counting(LetterVocabulary):
    """Counts the texts it tokenizes."""

    def __init__(self, size: int = 26) -> None:
        super().__init__(size)
        self.tokenized: list[str] = []

    def tokenize(self, text: str, *, special: bool, start: bool) -> list[int]:
        assert not special, "text of files must not be parsed as control tokens"
        self.tokenized.append(text)
        return super().tokenize(text, special=special, start=start)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "inner").mkdir(parents=True)
    for age, (name, text) in enumerate([("b.txt", "bbb"), ("inner/a.py", "aa"), ("c.md", "c")]):
        (root / name).write_text(text)
        os.utime(root / name, (1000 - age, 1000 - age))
    return root


Read = Callable[..., UserFiles]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def reading(path: Path, vocabulary: LetterVocabulary | None = None, **options: object) -> UserFiles:
        used = vocabulary or LetterVocabulary(26)
        return read_user_files(path, used, vocabulary_fingerprint(used), cache=tmp_path / "cache", **options)  # type: ignore[arg-type]

    return reading


def words(corpus: UserFiles) -> list[str]:
    return ["".join(chr(ord("a") + token) for token in text.tolist()) for text in corpus.texts]


def test_all_text_files_latest_first(folder: Path, read: Read) -> None:
    corpus = read(folder)
    assert words(corpus) == ["bbb", "aa", "c"]
    assert corpus.notice == f"corpus {folder}: 3 files, 6 tokens"


def test_singular_and_plural_in_the_notice(folder: Path, read: Read) -> None:
    folder = folder / "alone"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    assert read(folder).notice == f"corpus {folder}: 1 file, 1 token"


def test_one_file(folder: Path, read: Read) -> None:
    assert words(read(folder / "b.txt")) == ["bbb"]


def test_relative_and_home_paths(folder: Path, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HOME", str(folder.parent))
    assert words(read("project")) == words(read("~/project")) == ["bbb", "aa", "c"]


def test_other_files_are_skipped_and_counted(folder: Path, read: Read) -> None:
    (folder / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    (folder / "zeros.txt").write_bytes(b"ab\0ab")
    (folder / "large.txt").write_bytes(b"a" * (2 * 1024 * 1024 + 1))
    (folder / ".secret").write_text("zzz")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("zzz")
    (folder / "loop").symlink_to(folder)
    (folder / "dangling").symlink_to(folder / "nowhere")
    (folder / "empty.txt").write_text("")
    os.mkfifo(folder / "pipe")
    corpus = read(folder)
    assert words(corpus) == ["bbb", "aa", "c"]
    assert corpus.notice.endswith("skipped: 1 too large, 2 not readable as text")


def test_max_tokens(folder: Path, read: Read) -> None:
    corpus = read(folder, max_tokens=4)
    assert words(corpus) == ["bbb", "a"]
    assert corpus.notice.endswith("2 files, 4 tokens; skipped: 1 beyond the limit of 4 tokens")


def test_only_changed_files_are_tokenized_again(folder: Path, read: Read) -> None:
    vocabulary = Counting()
    first = read(folder, vocabulary)
    assert len(vocabulary.tokenized) == 3
    assert words(read(folder, vocabulary)) == words(first)
    assert len(vocabulary.tokenized) == 3
    (folder / "c.md").write_text("cc")
    (folder / "b.txt").unlink()
    assert sorted(words(read(folder, vocabulary))) == ["aa", "cc"]
    assert vocabulary.tokenized[3:] == ["cc"]


def test_each_vocabulary_has_its_own_cache(folder: Path, read: Read) -> None:
    read(folder)
    other = Counting(20)
    assert words(read(folder, other)) == ["bbb", "aa", "c"]
    assert len(other.tokenized) == 3


@pytest.mark.parametrize(
    "breaking",
    [
        lambda data: b"",
        lambda data: data[:-2],
        lambda data: data[:10],
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: data.replace(b'"version": 1', b'"version": 2'),
        lambda data: data.replace(b'", 3]', b'", -3]'),
        lambda data: b"[" * 100_000 + b"\n",
        lambda data: b"[]\n",
        lambda data: b'{"version": 1}\n',
    ],
)
def test_a_damaged_cache_is_replaced(
    folder: Path, read: Read, tmp_path: Path, breaking: Callable[[bytes], bytes]
) -> None:
    read(folder)
    (cache,) = (tmp_path / "cache").iterdir()
    cache.write_bytes(breaking(cache.read_bytes()))
    vocabulary = Counting()
    assert words(read(folder, vocabulary)) == ["bbb", "aa", "c"]
    assert words(read(folder)) == ["bbb", "aa", "c"]


def test_the_oldest_caches_are_deleted(tmp_path: Path, read: Read) -> None:
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text("abc")
        read(tmp_path / f"{number}.txt")
    assert len(list((tmp_path / "cache").iterdir())) == 16
    again = Counting()
    read(tmp_path / "19.txt", again)
    assert again.tokenized == []


def test_the_cache_is_private(folder: Path, read: Read, tmp_path: Path) -> None:
    read(folder)
    (cache,) = (tmp_path / "cache").iterdir()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.parent.stat().st_mode) == 0o700


def test_an_unwritable_cache_is_ignored(folder: Path, tmp_path: Path) -> None:
    vocabulary = LetterVocabulary(26)
    nowhere = folder / "b.txt" / "cache"
    assert words(read_user_files(folder, vocabulary, vocabulary_fingerprint(vocabulary), cache=nowhere)) == [
        "bbb",
        "aa",
        "c",
    ]


def test_a_missing_or_unreadable_corpus_is_an_error(folder: Path, read: Read) -> None:
    with raises(OptionError, "nowhere", code="file_not_read", option="corpus"):
        read(folder / "nowhere")
    with raises(OptionError, "not a directory", code="file_not_read", option="corpus"):
        read(folder / "b.txt" / "inner")
    with raises(OptionError, "embedded null", code="file_not_read", option="corpus"):
        read(folder / "b\0")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
def test_a_pipe_does_not_block(folder: Path, read: Read) -> None:
    before = read(folder).texts
    os.mkfifo(folder / "pipe")
    with raises(OptionError, code="file_not_read", option="corpus"):
        read(folder / "pipe")
    assert len(read(folder).texts) == len(before)


def test_the_notice_of_an_empty_folder(tmp_path: Path, read: Read) -> None:
    (tmp_path / "empty").mkdir()
    assert read(tmp_path / "empty") == UserFiles((), f"corpus {tmp_path / 'empty'}: 0 files, 0 tokens")


def test_reading_reports_progress_and_can_be_cancelled(folder: Path, read: Read) -> None:
    seen: list[float] = []

    def until(limit: int) -> Callable[[str, float], bool]:
        def progress(what: str, fraction: float) -> bool:
            assert what == "reading project"
            seen.append(fraction)
            return len(seen) < limit

        return progress

    with raises(CancelledError, "reading"):
        read(folder, progress=until(2))
    seen.clear()
    read(folder, progress=until(99))
    assert seen == [0.0, 1 / 3, 2 / 3]


def test_vocabularies_have_their_own_fingerprints() -> None:
    marks = {vocabulary_fingerprint(LetterVocabulary(size)) for size in (5, 6, 26)}
    assert len(marks) == 3
    assert vocabulary_fingerprint(LetterVocabulary(5)) == vocabulary_fingerprint(LetterVocabulary(5))


def guessed(drafter: SuffixDrafter) -> tuple[int, ...]:
    """Return the last token and the draft after it."""
    return drafter.propose(Sampler(SamplingParams(), 0, [0]), Invariant(), 4).tokens


class TestSuffixDrafterOptions:
    @pytest.fixture(autouse=True)
    def elsewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path / "data"))
        monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "cached"))
        return tmp_path

    def test_without_options_no_file_is_opened(self, tmp_path: Path) -> None:
        drafter, notice = suffix_drafter(LetterVocabulary(8))
        drafter.begin([1, 2])
        drafter.commit((3, 4))
        drafter.begin([1])
        drafter.close()
        assert notice == ""
        assert list(tmp_path.iterdir()) == []

    def test_replies_are_drafted_from_in_the_next_process(self) -> None:
        first, _ = suffix_drafter(LetterVocabulary(8), remember=True)
        first.begin([0])
        first.commit((1, 2, 3, 4, 5, 6))
        first.close()
        second, notice = suffix_drafter(LetterVocabulary(8), remember=True)
        second.begin([2, 3])
        assert guessed(second) == (3, 4, 5)
        assert notice == ""
        other, _ = suffix_drafter(LetterVocabulary(9), remember=True)
        other.begin([2, 3])
        assert guessed(other) == (3,)

    def test_prompts_are_drafted_from_in_the_next_process(self) -> None:
        first, _ = suffix_drafter(LetterVocabulary(8), remember=True)
        first.begin([1, 2, 3, 4, 5, 6])
        first.commit((7,))
        first.close()
        second, _ = suffix_drafter(LetterVocabulary(8), remember=True)
        second.begin([2, 3])
        assert guessed(second) == (3, 4, 5)
        second.begin([7, 6])
        assert guessed(second) == (6, 7)

    def test_saved_replies_are_loaded_when_a_reply_begins(self, tmp_path: Path) -> None:
        first, _ = suffix_drafter(LetterVocabulary(8), remember=True)
        first.begin([0])
        first.commit((1, 2, 3, 4, 5, 6))
        second, _ = suffix_drafter(LetterVocabulary(8), remember=True)
        first.close()
        second.begin([2, 3])
        assert guessed(second) == (3, 4, 5)
        (stored,) = (tmp_path / "data").rglob("*.replies")
        stored.write_bytes(stored.read_bytes()[:-1])
        third, notice = suffix_drafter(LetterVocabulary(8), remember=True)
        assert (notice, third.note()) == ("", "")
        third.begin([2, 3])
        assert guessed(third) == (3,)
        assert "bytes of saved replies" in third.note()

    def test_a_missing_corpus_is_an_error(self, tmp_path: Path) -> None:
        with raises(OptionError, "exist", code="file_not_read", option="corpus"):
            suffix_drafter(LetterVocabulary(8), corpus=tmp_path / "nowhere", remember=True)
        assert not (tmp_path / "data").exists()

    def test_a_corpus_is_drafted_from_and_reported(self, folder: Path) -> None:
        (folder / "d.txt").write_text("abcdefg")
        drafter, notice = suffix_drafter(LetterVocabulary(8), corpus=folder)
        drafter.begin([0, 1, 2])
        assert guessed(drafter) == (2, 3, 4, 5)
        assert notice.startswith(f"corpus {folder}: 4 files")
        assert not (folder.parent / "data").exists()
