"""Resuming saved chats, and reuse of their prefix cache."""

from __future__ import annotations

from pathlib import Path

import pytest

import edgespec
from edgespec.system.files import data_folder
from tests.tui.driving import driving
from tests.tui.scripted import Script, ScriptedRuntime, loading


async def two_chats(folder: Path) -> list[str]:
    """Their ids, the newest first."""
    runtime = ScriptedRuntime(scripts=[Script(text="One."), Script(text="Two.")])
    async with driving(loading(runtime), folder) as d:
        await d.say("About apples")
        await d.press("ctrl+n")
        await d.say("About pears")
        return [path.stem for path in sorted(d.saved(), key=lambda path: -path.stat().st_mtime_ns)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("wanted", "shown"), [("last", "About pears"), ("apples", "About apples"), ("ID", "About apples")]
)
async def test_resume_opens_the_chosen_chat(wanted: str, shown: str, tmp_path: Path) -> None:
    _, oldest = await two_chats(tmp_path)
    resume = oldest if wanted == "ID" else wanted
    runtime = ScriptedRuntime(scripts=[Script(text="More.")])
    async with driving(loading(runtime), tmp_path, resume=resume) as d:
        await d.said(shown)
        await d.say("Go on")
        assert len(d.saved()) == 2
        assert len(d.chat.current_chat.entries) == 4


@pytest.mark.long
@pytest.mark.parametrize(
    ("wanted", "says"), [("last", "There are no saved chats yet"), ("plums", "no saved chat 'plums'")]
)
async def test_resume_without_a_match_starts_a_new_chat(wanted: str, says: str, tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path, resume=wanted) as d:
        await d.said(says)
        assert d.chat.current_chat.entries == []


async def test_memory_command_shows_the_reused_tokens(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.send("/memory")
        await d.said("(12,345 tokens reused)")
        assert "3 prompts" in d.transcript()


@pytest.mark.long
async def test_resumed_chat_reuses_its_cache_until_it_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use the demo model. Deleting the chat also deletes its cached prefix."""
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path))

    def load(progress: object) -> edgespec.Runtime:
        assert progress
        return edgespec.load("demo", "none", method="none", prefix_cache="disk", threads=1, context=512)

    settings: dict[str, str | int | float | bool | list[str]] = {"max_tokens": 24, "seed": 1}
    async with driving(load, tmp_path, settings=settings, system="Be brief.") as d:
        await d.say("How do I list files by size?")
        first = d.chat.stats
    assert list(data_folder().rglob("*.kept"))
    async with driving(load, tmp_path, settings=settings, resume="last") as d:
        await d.said("How do I list files by size?")
        await d.say("And by name?")
        again = d.chat.stats
        assert first
        assert again
        assert again.cached_prompt_tokens >= first.prompt_tokens
        chat_id = d.chat.current_chat.id
        d.chat.archive.hide(chat_id)
        d.chat.archive.finish_deletion(chat_id)
    assert not list(data_folder().rglob("*.kept"))
