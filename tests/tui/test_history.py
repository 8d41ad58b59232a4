"""The history of prompts, in one run and across runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgespec.chat.prompt_history import PromptHistory
from tests.tui.driving import driving
from tests.tui.scripted import ScriptedRuntime, loading


@pytest.mark.long
async def test_prompts_of_earlier_runs_are_offered(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.say("first\nof two lines")
        await d.say("/show")
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.press("up")
        assert d.chat.prompt.text == "/show"
        await d.press("up", "up")
        assert d.chat.prompt.text == "first\nof two lines"


def test_the_file_is_private_and_limited(tmp_path: Path) -> None:
    history, path = PromptHistory(tmp_path / "data"), tmp_path / "data" / "prompt-history.jsonl"
    assert history.read() == []
    for number in range(600):
        history.add(f"{number} é\n" + "x" * 2_000)
    history.add("y" * 10_001)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size > 1 << 20
    prompts = history.read()
    assert [prompts[0].split()[0], prompts[-1].split()[0], len(prompts)] == ["100", "599", 500]
    assert history.read() == prompts
    assert path.stat().st_size < 1 << 20 or len(path.read_bytes().splitlines()) == 500


@pytest.mark.parametrize("damage", [b'{"a": 1}\n', b"\xff\xfe\n", b"[" * 100_000 + b"\n", b"1\n"])
def test_damaged_lines_are_skipped(tmp_path: Path, damage: bytes) -> None:
    history = PromptHistory(tmp_path)
    history.add("one")
    with (tmp_path / "prompt-history.jsonl").open("ab") as file:
        file.write(damage)
    history.add("two")
    assert history.read() == ["one", "two"]


def test_a_folder_that_cannot_be_written_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    history = PromptHistory(tmp_path / "file")
    history.add("one")
    assert history.read() == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes")
def test_a_named_pipe_in_the_place_of_the_file_blocks_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "prompt-history.jsonl")
    history = PromptHistory(tmp_path)
    history.add("first")
    assert history.read() == []
