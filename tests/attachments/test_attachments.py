"""Attaching files: which files are read, how they appear in the prompt, and which are rejected."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import pytest

import edgespec
from edgespec.attachments import read_files
from edgespec.chat.message import AttachedFile, Message, with_files
from edgespec.errors import AttachmentError
from edgespec.tui.attachments import saved_files
from tests.attachments import pdfs
from tests.raising import raises


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _names(path: str) -> list[str]:
    return [file.name for file in read_files(path).files]


def test_files_come_before_the_prompt_in_code_blocks() -> None:
    Path("a.py").write_text("print(1)\n")
    Path("my notes.md").write_text("See:\n\n````\ncode\n````")
    assert edgespec.attach("Explain.", "a.py", Path("my notes.md")) == (
        "a.py:\n```py\nprint(1)\n```\n\nmy notes.md:\n`````md\nSee:\n\n````\ncode\n````\n`````\n\nExplain."
    )
    assert with_files("Hello", ()) == "Hello"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_encodings(encoding: str) -> None:
    Path("text").write_bytes("Grüße, 日本\r\n".encode(encoding))
    assert read_files("text").files == (AttachedFile("text", "Grüße, 日本\r\n"),)


def test_folders_and_patterns() -> None:
    for name in ("src/a.py", "src/deep/er/b.py", "src/c.txt", "src/[x].py", "src/.hidden/d.py", "top.py"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("x")
    Path("src/data.bin").write_bytes(b"\0\1")
    assert _names("src/*.py") == ["src/[x].py", "src/a.py"]
    assert _names("src/**/*.py") == ["src/[x].py", "src/a.py", "src/deep/er/b.py"]
    assert _names("src/[x].py") == ["src/[x].py"]
    assert _names("**/?.py") == ["src/a.py", "src/deep/er/b.py"]
    assert _names("src/deep") == _names("src/deep/**") == ["src/deep/er/b.py"]
    assert read_files("src/").skipped == 1
    assert len(read_files("src").files) == 4


def test_files_that_git_ignores_are_left_out() -> None:
    for name in ("kept.py", "build/made.py", ".github/ci.yml", "gone.py"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("x")
    Path(".gitignore").write_text("build/\n")
    subprocess.run(["git", "init", "-q", "."], check=True)
    subprocess.run(["git", "add", "gone.py"], check=True)
    Path("gone.py").unlink()
    assert _names("**/*") == [".github/ci.yml", ".gitignore", "kept.py"]
    assert _names("build/made.py") == ["build/made.py"]


def test_many_stars_take_no_exponential_time() -> None:
    deep = Path(*"a" * 25)
    deep.mkdir(parents=True)
    (deep / "b.txt").write_text("x")
    assert _names("**/" * 20 + "b.txt") == [str(deep / "b.txt")]
    with raises(AttachmentError, "no files", code="attachment_not_found"):
        read_files("**/a/" * 12 + "c.txt")


def test_git_starts_no_program_named_in_the_settings_of_a_repository() -> None:
    Path("a.txt").write_text("x")
    subprocess.run(["git", "init", "-q", "."], check=True)
    subprocess.run(["git", "config", "core.fsmonitor", "touch started; false"], check=True)
    assert _names(".") == ["a.txt"]
    assert not Path("started").exists()


def test_git_fetches_no_missing_objects() -> None:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=x", "-c", "user.email=x")
        return subprocess.run(["git", *who, *arguments], check=True, capture_output=True, text=True).stdout

    Path("inside").mkdir()
    for name in ("a.txt", "inside/b.txt"):
        Path(name).write_text("x")
    git("init", "-q", ".")
    git("add", ".")
    git("commit", "-qm", "x")
    git("sparse-checkout", "set", "--cone", "--sparse-index", "nothing")
    for name, value in {
        "core.repositoryFormatVersion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.promisor": "true",
        "remote.origin.url": "ssh://nowhere/x",
        "core.sshCommand": "touch started; false",
    }.items():
        git("config", name, value)
    tree = git("rev-parse", "HEAD:inside").strip()
    Path(".git/objects", tree[:2], tree[2:]).unlink()
    assert _names(".") == ["a.txt"]
    assert not Path("started").exists()


def test_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir("work")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a\nb.txt").write_text("x")
    assert _names("~/a\nb.txt") == ["~/a?b.txt"]


def test_text_of_pdf_files() -> None:
    Path("paper.pdf").write_bytes(pdfs.text_pdf("Speculative decoding"))
    assert read_files("paper.pdf").files == (AttachedFile("paper.pdf", "Speculative decoding"),)


def _sparse() -> None:
    with Path("file").open("wb") as file:
        file.truncate(1 << 30)


def _pdf(data: bytes) -> Callable[[], object]:
    return lambda: Path("file").write_bytes(data)


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: None, "there is no file file; check the path"),
        (lambda: Path("file").write_bytes(os.urandom(100) + b"\0\xff"), "not a UTF-8 or UTF-16 text file"),
        (lambda: Path("file").write_bytes(b"a\xe9b"), "not a UTF-8 or UTF-16 text file"),
        (lambda: Path("file").write_bytes(b"\x89PNG\r\n"), "file is damaged, or is not an image"),
        (lambda: Path("file").write_bytes(b"RIFF1234WEBPVP8 "), "file is damaged, or is not an image"),
        (_sparse, "file is 1.0 GiB in size, which exceeds the limit of 16.0 MiB"),
        (lambda: os.mkfifo("file"), "the path is not a regular file"),
        (lambda: Path("file").symlink_to("file"), "too many levels of symbolic links"),
        (lambda: Path("file").symlink_to("/dev/zero"), "the path is not a regular file"),
        (lambda: Path("file").mkdir(), "file contains no files"),
        (_pdf(b"%PDF-1.7\nrubbish"), "file cannot be attached: the file is damaged"),
        (_pdf(pdfs.text_pdf(" ")), "the file contains no text, perhaps because the pages are scanned images"),
        (_pdf(pdfs.circular_pdf()), "file cannot be attached"),
        (_pdf(pdfs.expanding_pdf()), "file cannot be attached"),
    ],
)
def test_hostile_files_are_refused_in_one_sentence(make: Callable[[], object], reason: str) -> None:
    make()
    with pytest.raises(AttachmentError) as raised:
        read_files("file")
    assert reason in str(raised.value)
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "photo.JPG is empty"), (b"just text", "photo.JPG is damaged, or is not an image")],
)
def test_a_file_named_like_an_image_is_never_attached_as_text(
    content: bytes, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("photo.JPG").write_bytes(content)
    with pytest.raises(AttachmentError) as raised:
        read_files("photo.JPG")
    assert reason in str(raised.value)


def test_a_pdf_file_may_have_the_name_of_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("scan.png").write_bytes(pdfs.text_pdf("a line"))
    assert "a line" in read_files("scan.png").files[0].text


def test_a_pdf_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.attachments.reading._MAX_SECONDS", 0.2)
    Path("file").write_bytes(pdfs.slow_pdf())
    with raises(AttachmentError, "extracting"):
        read_files("file")


def test_a_folder_of_slow_pdfs_takes_no_longer_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.attachments.reading._MAX_SECONDS", 1.0)
    Path("slow").mkdir()
    slow = pdfs.slow_pdf()
    for number in range(20):
        Path("slow", f"{number}.pdf").write_bytes(slow)
    began = monotonic()
    with raises(AttachmentError, "slow", "1 seconds", code="attachment_too_large"):
        read_files("slow")
    assert monotonic() - began < 8


def test_a_folder_without_text_says_why() -> None:
    Path("shots").mkdir()
    for name in ("a.png", "b.png"):
        Path("shots", name).write_bytes(b"\x89PNG")
    with raises(AttachmentError, "2 files", "shots", code="attachment_not_text"):
        read_files("shots")


def test_too_many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("many").mkdir()
    for number in range(501):
        Path("many", f"{number}.txt").touch()
    with raises(AttachmentError, "many", "501", "500", code="attachment_too_large"):
        read_files("many")
    monkeypatch.setattr("edgespec.attachments.finding._MAX_LISTED_FILES", 100)
    with raises(AttachmentError, "many", code="attachment_too_large"):
        read_files("many/7.*")


def test_a_loop_of_links_in_a_folder_ends() -> None:
    Path("loop").mkdir()
    Path("loop/again").symlink_to(".")
    Path("loop/a.txt").write_text("x")
    assert read_files("loop/**/*.txt").files == (AttachedFile("loop/a.txt", "x"),)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="the superuser can read every folder")
def test_a_folder_without_permission() -> None:
    Path("closed").mkdir(mode=0)
    with raises(AttachmentError, "closed", "permission denied", code="attachment_unreadable"):
        read_files("closed")


def test_a_dropped_file_that_was_saved_under_a_shorter_name_is_read_again() -> None:
    files = (AttachedFile("a.py", "x = 1"), AttachedFile("b.py", "y = 2"))
    message = Message("user", "compare @/home/me/a.py and @b.py", files=files)
    assert saved_files(message, ["/home/me/a.py"]) == ((), ["/home/me/a.py"])
    assert saved_files(message, ["b.py"]) == (files[1:], [])
