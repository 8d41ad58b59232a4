"""Files in the chat: completing and dropping paths, labels, and the messages that are sent."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import threading
from pathlib import Path
from urllib.parse import quote

import pytest
from textual import events

import edgespec
from edgespec.chat.message import AttachedFile, as_message
from edgespec.tui.input_syntax import (
    dropped_paths,
    find_references,
    missing_files,
    open_reference,
    reference,
)
from edgespec.tui.widgets.files import PathSearch
from edgespec.tui.widgets.messages import UserMessage
from edgespec.tui.worker import Load
from tests.backends.tiny_vision import picture, png_bytes, write_vision_model
from tests.tui.driving import Driver, driving, until
from tests.tui.scripted import ScriptedRuntime, loading

CODE = "def area(width, height):\n    return width * height\n"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "project"
    (folder / "src" / "deep").mkdir(parents=True)
    (folder / "src" / "main.py").write_text(CODE)
    (folder / "src" / "deep" / "shapes.py").write_text("PI = 3\n")
    (folder / "my notes.txt").write_text("Remember the milk.\n")
    (folder / "photo.png").write_bytes(b"\x89PNG\r\n")
    (folder / "big.txt").write_text("word " * 20_000)
    monkeypatch.chdir(folder)


def chips(d: Driver) -> str:
    return str(d.chat.chips.visual).replace("\N{NO-BREAK SPACE}", " ") if d.chat.chips.display else ""


async def shows_chip(d: Driver, text: str) -> None:
    await until(d.pilot, lambda: text in chips(d), f"{text!r} in {chips(d)!r}")


class TestReferences:
    def test_in_a_message(self) -> None:
        text = 'See @a.py, @"my notes.txt" and me@example.org\n@src/**/*.py @a.py,'
        assert find_references(text) == ["a.py,", "my notes.txt", "src/**/*.py"]
        assert [reference(path) for path in ("a.py", "my notes.txt")] == ["@a.py", '@"my notes.txt"']

    @pytest.mark.parametrize(
        ("line", "found"),
        [
            ("@", ("", 0)),
            ("see @sr", ("sr", 4)),
            ("@node_modules/@types", ("node_modules/@types", 0)),
            ('@"my no', ("my no", 0)),
            ("me@sr", None),
            ("@a b", None),
            ('@"a b"', None),
        ],
    )
    def test_at_the_cursor(self, line: str, found: tuple[str, int] | None) -> None:
        assert open_reference(line) == found

    def test_that_look_like_files(self) -> None:
        code = ["alice", "property", 'app.get("/")', "pytest.fixture", "cache[str]"]
        assert missing_files(["src/mian.py,", "notes.txt", *code]) == ["src/mian.py", "notes.txt"]

    def test_dropped_files(self) -> None:
        here = os.getcwd()
        for dropped in (
            f"{here}/my notes.txt",
            f"{here}/my\\ notes.txt ",
            f"'{here}/my notes.txt'\n",
            f"file://{here}/my%20notes.txt",
        ):
            assert dropped_paths(dropped) == [f"{here}/my notes.txt"]
        for name in ("my photo (1).png", "Screenshot 9.41\u202fAM.png", "a#b%20.png", "it's é.png"):
            path = f"{here}/{name}"
            Path(path).write_bytes(b"")
            url = quote(path)
            for dropped in (
                shlex.quote(path),
                re.sub(r"([^\w/.-])", r"\\\1", path),
                f"file://{url}",
                f"file://localhost{url}\r\n",
                f"file://{path.replace('%', '%25').replace('#', '%23')}",
            ):
                assert dropped_paths(dropped) == [path], dropped
        assert dropped_paths(f"{here}/src/main.py {here}/big.txt") == [
            f"{here}/src/main.py",
            f"{here}/big.txt",
        ]
        assert dropped_paths("src/main.py") == dropped_paths("it's") == dropped_paths("/missing") == []


class TestPathSearch:
    def test_below_the_working_folder(self) -> None:
        search = PathSearch()
        assert search.find("") == [
            "src/", "big.txt", "photo.png", "my notes.txt", "src/deep/", "src/main.py", "src/deep/shapes.py",
        ]  # fmt: skip
        assert search.find("main")[0] == "src/main.py"
        assert search.find("sdsh")[0] == "src/deep/shapes.py"
        assert search.find("src/")[0] == "src/"
        assert search.find("zzz") == search.find("*.py") == []

    def test_a_name_with_many_equal_letters_takes_no_exponential_time(self) -> None:
        Path("x" * 200).write_text("")
        search = PathSearch()
        assert search.find("x" * 100) == ["x" * 200]
        assert search.find("x" * 100 + "y") == search.find("x" * 3000) == []

    def test_elsewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path / "project"))
        search = PathSearch()
        assert search.find("~/sr") == ["~/src/"]
        assert search.find("~") == ["~/"]
        assert search.find("../pro") == ["../project/"]
        assert search.find(f"{tmp_path}/project/src/ma") == [f"{tmp_path}/project/src/main.py"]
        assert search.find("/missing/") == []


@pytest.mark.long
async def test_the_list_of_paths_in_a_terminal_of_a_few_columns(tmp_path: Path, demo: Load) -> None:
    async with driving(demo, tmp_path) as d:
        await d.write("@s")
        await until(d.pilot, lambda: d.chat.paths.display, "the paths")
        for columns in (10, 7, 6, 5, 4, 3, 2, 1):
            await d.pilot.resize_terminal(columns, 24)
            await d.pilot.pause()
        await d.pilot.resize_terminal(80, 24)
        await d.sees("src/main.py")


@pytest.mark.long
async def test_a_completed_path_is_sent_as_a_file(tmp_path: Path, demo: Load) -> None:
    async with driving(demo, tmp_path) as d:
        await d.write("explain @mainp")
        await until(d.pilot, lambda: d.chat.paths.chosen == "src/main.py", "the path")
        await d.press("enter")
        assert d.chat.prompt.text == "explain @src/main.py "
        await shows_chip(d, "src/main.py")
        await d.press("enter")
        await until(d.pilot, lambda: bool(d.chat.current_chat.entries), "the message")
        await d.settled()
        message = d.chat.current_chat.messages[0]
        assert message.content == "explain @src/main.py"
        assert [(file.name, file.text) for file in message.files] == [("src/main.py", CODE)]
        size = f"{message.files[0].token_count} tokens"
        shown = d.transcript().replace("\N{NO-BREAK SPACE}", " ")
        assert f"src/main.py {size}" in shown
        # The file's text may appear in the reply, but not in the displayed message.
        assert "return width" not in str(d.chat.transcript.query_one(UserMessage).visual)
        # The model has read the file.
        stats = d.chat.stats
        assert stats is not None
        assert stats.prompt_tokens > message.files[0].token_count
        saved = json.loads(d.saved()[0].read_text())
        assert saved["messages"][0]["files"][0]["name"] == "src/main.py"
    async with driving(demo, tmp_path, resume="last") as d:
        await d.sees("explain @src/main.py")
        assert d.chat.current_chat.messages[0] == message
        chip = f"src/main.py {size}"
        await until(d.pilot, lambda: chip in d.transcript().replace("\N{NO-BREAK SPACE}", " "), chip)


async def test_keys_of_the_list_of_paths(tmp_path: Path, demo: Load) -> None:
    async with driving(demo, tmp_path) as d:
        await d.write("@s")
        await until(d.pilot, lambda: d.chat.paths.display, "the list")
        await d.sees("Enter chooses · Esc closes the list")
        await d.press("escape")
        assert not d.chat.paths.display
        await d.sees("Enter sends")
        await d.write("rc/d")
        await until(d.pilot, lambda: d.chat.paths.chosen == "src/deep/", "the folder")
        await d.press("tab")
        assert d.chat.prompt.text == "@src/deep/"
        await until(d.pilot, lambda: d.chat.paths.display, "the files in the folder")
        await d.press("down")
        assert d.chat.paths.chosen == "src/deep/shapes.py"
        await d.press("up", "down", "enter")
        assert d.chat.prompt.text == "@src/deep/shapes.py "
        await d.write("@my")
        await until(d.pilot, lambda: d.chat.paths.chosen == "my notes.txt", "the notes")
        await d.press("tab")
        assert d.chat.prompt.text == '@src/deep/shapes.py @"my notes.txt" '
        await shows_chip(d, "my notes.txt")
        await d.press("backspace")
        assert d.chat.prompt.text == "@src/deep/shapes.py "
        await until(d.pilot, lambda: "my notes" not in chips(d), "the chip to go")
        await shows_chip(d, "src/deep/shapes.py")


async def test_the_path_after_a_command_is_completed(tmp_path: Path, demo: Load) -> None:
    (tmp_path / "project" / "my chats.json").write_text("[]")
    async with driving(demo, tmp_path) as d:
        await d.write("/import ch")
        await until(d.pilot, lambda: d.chat.paths.chosen == "my chats.json", "the path")
        await d.press("tab")
        assert d.chat.prompt.text == "/import my chats.json"
        await until(d.pilot, lambda: not d.chat.paths.display, "the list to go")
        await d.press("enter")
        await d.said("contains no chats in a known format")
        d.chat.prompt.clear()
        for typed in ("/schema none", "/export my", "/import\nmy"):
            d.chat.prompt.replace_text(typed)
            await d.settled()
            assert not d.chat.paths.chosen
            d.chat.prompt.clear()


@pytest.mark.long
async def test_folders_and_patterns(tmp_path: Path, demo: Load) -> None:
    async with driving(demo, tmp_path) as d:
        d.chat.prompt.replace_text("@src/**/*.py compare")
        await shows_chip(d, "src/**/*.py (2 files)")
        await d.press("enter")
        await until(d.pilot, lambda: bool(d.chat.current_chat.entries), "the message")
        await d.settled()
        names = [file.name for file in d.chat.current_chat.messages[0].files]
        assert names == ["src/deep/shapes.py", "src/main.py"]


async def test_an_edited_message_of_a_saved_chat_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.send('compare @src/main.py and @"my notes.txt"')
        await until(d.pilot, lambda: len(d.chat.current_chat.entries) == 2, "the reply")
        files = d.chat.current_chat.messages[0].files
        assert len(files) == 2
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "src").mkdir(parents=True)
    (elsewhere / "src" / "main.py").write_text("another file")
    (elsewhere / "new.txt").write_text("new")
    monkeypatch.chdir(elsewhere)
    async with driving(loading(ScriptedRuntime()), tmp_path, resume="last") as d:
        await until(d.pilot, lambda: len(d.chat.current_chat.entries) == 2, "the chat")

        async def edited(text: str) -> tuple[AttachedFile, ...]:
            await d.press("ctrl+p")
            d.chat.prompt.replace_text(text)
            await d.press("enter")
            await until(d.pilot, lambda: d.chat.current_chat.messages[0].content == text, "the message")
            await d.settled()
            return d.chat.current_chat.messages[0].files

        assert await edited('explain @src/main.py and @"my notes.txt"') == files
        assert "No file matches" not in d.transcript()
        more = await edited('explain @src/main.py, @"my notes.txt" and @new.txt')
        assert [file.text for file in more] == [*(file.text for file in files), "new"]
        assert await edited("explain @src/main.py") == files[:1]


async def test_dropped_files_become_references(tmp_path: Path, demo: Load) -> None:
    async with driving(demo, tmp_path) as d:
        await d.write("see")
        d.app.post_message(events.Paste(f"{os.getcwd()}/my\\ notes.txt"))
        await shows_chip(d, "my notes.txt")
        assert d.chat.prompt.text == f'see @"{os.getcwd()}/my notes.txt" '


@pytest.mark.parametrize("command", ["/import ", "/schema "])
async def test_a_dropped_file_is_the_argument_of_a_command(tmp_path: Path, command: str) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        d.chat.prompt.replace_text(command)
        d.app.post_message(events.Paste(f"{os.getcwd()}/my\\ notes.txt"))
        path = f"{command}{os.getcwd()}/my notes.txt"
        await until(d.pilot, lambda: d.chat.prompt.text == path, "the path", seconds=10)


async def test_what_cannot_be_attached_is_refused(tmp_path: Path, demo: Load) -> None:
    os.mkfifo("pipe")
    Path("picture.png").write_bytes(png_bytes(picture()))
    Path("loop").symlink_to("loop")
    with Path("huge.bin").open("wb") as file:
        file.truncate(1 << 30)
    problems = {
        "photo.png": "photo.png is damaged, or is not an image",
        "picture.png": "picture.png is an image, but demo cannot see images",
        "big.txt": "big.txt has at least ",
        "pipe": "pipe cannot be read: the path is not a regular file",
        "loop": "loop cannot be read: too many levels of symbolic links",
        "huge.bin": "huge.bin is 1.0 GiB in size, which exceeds the limit of 16.0 MiB",
    }
    async with driving(demo, tmp_path) as d:
        for path, problem in problems.items():
            text = f"@{path} what is this?"
            d.chat.prompt.replace_text(text)
            await shows_chip(d, problem)
            await d.press("enter")
            await d.said(f"The message was not sent: {problem}")
            await until(d.pilot, lambda text=text: d.chat.prompt.text == text, "the text")  # type: ignore[misc]
        assert not d.chat.current_chat.entries


@pytest.mark.long
async def test_an_image_is_sent_with_a_message_and_saved_with_the_chat(tmp_path: Path) -> None:
    files = write_vision_model(tmp_path / "models", "llava")
    Path("picture.png").write_bytes(png_bytes(picture()))

    def load(_progress: object) -> edgespec.Runtime:
        return edgespec.load(files.model, "none", threads=1, context=512, measure_costs=False, gpu_layers=0)

    async with driving(load, tmp_path) as d:
        await d.write("@picture.png what is this?")
        await shows_chip(d, "picture.png")
        await d.press("enter")
        await d.settled()
        message = d.chat.current_chat.messages[0]
        assert message.files[0].image == edgespec.Image.read(Path("picture.png").read_bytes(), "picture.png")
        assert message.files[0].token_count == 9
        saved = json.loads(json.dumps([file.to_json() for file in message.files]))
        assert as_message(1, {"role": "user", "content": message.content, "files": saved}) == message


async def test_files_that_do_not_fit_together_are_refused_with_both_sizes(tmp_path: Path, demo: Load) -> None:
    for name in ("a.txt", "b.txt"):
        Path(name).write_text("word " * 700)
    async with driving(demo, tmp_path) as d:
        await d.send("@a.txt @b.txt compare")
        await d.said("the attached files have 1,4")
        await d.said("tokens, but the context holds only 1,024")


@pytest.mark.long
async def test_files_are_found_after_the_working_folder_was_deleted(
    tmp_path: Path, demo: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    (tmp_path / "a.txt").write_text("colour")
    monkeypatch.chdir(tmp_path / "gone")
    async with driving(demo, tmp_path, settings={"max_tokens": 4}) as d:
        (tmp_path / "gone").rmdir()
        await d.write("@a")
        await d.pilot.pause(0.3)
        d.chat.prompt.clear()
        await d.say(f"Read @{tmp_path}/a.txt")
        assert d.chat.current_chat.messages[0].files[0].text == "colour"


async def test_a_file_that_changes_before_it_is_sent(tmp_path: Path, demo: Load) -> None:
    """The message contains the file as it is when sent. A deleted file is not silently left out."""
    Path("notes.txt").write_text("old")
    async with driving(demo, tmp_path, settings={"max_tokens": 4}) as d:
        d.chat.prompt.replace_text("Read @notes.txt now")
        await shows_chip(d, "notes.txt")
        Path("notes.txt").write_text("a new and longer text")
        await d.press("enter")
        await d.settled()
        (file,) = d.chat.current_chat.messages[0].files
        assert file.text == "a new and longer text"
        assert file.token_count > 3
        d.chat.prompt.replace_text("Read @notes.txt again")
        await shows_chip(d, "notes.txt")
        Path("notes.txt").unlink()
        await d.press("enter")
        await d.said("The message was not sent: notes.txt no longer exists")
        assert d.chat.prompt.text == "Read @notes.txt again"
        await d.press("enter")
        await d.said("No file matches @notes.txt, so this was sent as text.")


@pytest.mark.long
async def test_a_slow_disk_does_not_block_typing(
    tmp_path: Path, demo: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr(PathSearch, "find", lambda *_: [str(release.wait(20))])
    async with driving(demo, tmp_path) as d:
        async with asyncio.timeout(3):
            await d.write("hi @sr more text")
        assert d.chat.prompt.text == "hi @sr more text"
        release.set()
