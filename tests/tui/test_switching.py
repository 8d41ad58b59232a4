"""Switching models keeps the chat, and the next reply equals that of a new chat with the second model."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.chat.message import Message
from edgespec.chat.saved_chat import MessageTree, ModelReferences, SavedChat, Setting
from edgespec.chat.store import ChatStore
from edgespec.errors import BackendError, CancelledError
from edgespec.store.download import Progress
from edgespec.tui.app import LoadingScreen
from edgespec.tui.saved_chats import open_chat
from edgespec.tui.worker import Load
from tests.backends.mlx.tiny_checkpoints import write_checkpoint
from tests.tui.driving import driving, until
from tests.tui.scripted import LONG_TEXT, Script, ScriptedRuntime, as_runtime, facts, loading

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
ASK = "How do I list files by size?"
SAMPLED: dict[str, Any] = {"seed": 3, "temperature": 0.8, "max_tokens": 40}


def load_here(reference: str) -> Callable[[Progress], edgespec.Runtime]:
    def load(progress: Progress) -> edgespec.Runtime:
        options: dict[str, Any] = {"threads": 1} if reference == "demo" else {}
        return edgespec.load(reference, context=512, measure_costs=False, progress=progress, **options)

    return load


def fresh_reply(name: str, messages: Sequence[edgespec.Message]) -> str:
    with load_here(name)(lambda *_: True) as runtime:
        return runtime.chat(messages=messages).stream("And by date?", **SAMPLED).wait().text


@pytest.mark.long
async def test_the_next_reply_equals_that_of_a_fresh_chat(tmp_path: Path) -> None:
    other = str(write_checkpoint(tmp_path / "tiny", "llama"))
    async with driving(load_here("demo"), tmp_path, settings=SAMPLED, load_other=load_here) as d:
        await d.say(ASK)
        messages = d.chat.current_chat.messages
        await d.send(f"/model {other}")
        await d.said("This chat now uses tiny.")
        await d.settled()
        assert d.chat.current_chat.messages == messages
        await d.sees("edgespec  tiny")
        assert json.loads(d.saved()[0].read_text())["target"] == "tiny"
        assert d.chat.models == ModelReferences(other)
        assert d.app.preferences.target == other
        await d.say("And by date?")
        reply = d.chat.current_chat.entries[-1].content
        await d.send("/model demo")
        await d.said("This chat now uses demo.")
        await d.settled()
        await d.say("/regen")
        regenerated = d.chat.current_chat.entries[-1].content
    # Run both models in another thread. MLX can crash at exit if the main thread has used it.
    assert await asyncio.to_thread(fresh_reply, other, messages) == reply
    assert await asyncio.to_thread(fresh_reply, "demo", messages) == regenerated


@pytest.mark.long
async def test_a_model_that_cannot_be_loaded_leaves_the_chat_as_it_was(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF but no model")
    async with driving(load_here("demo"), tmp_path, settings=SAMPLED, load_other=load_here) as d:
        await d.say(ASK)
        before = d.chat.current_chat.messages
        await d.send(f"/model {broken}")
        await d.said("This chat still uses demo.")
        await d.settled()
        assert "broken.gguf" in d.transcript()
        assert d.chat.current_chat.messages == before
        assert d.chat.models.target == "demo"
        await d.say("/regen")
        assert d.chat.current_chat.messages == before


async def test_a_name_that_is_unknown_or_in_use_unloads_nothing(demo: Load, tmp_path: Path) -> None:
    async with driving(demo, tmp_path) as d:
        runtime = d.chat.runtime
        await d.send("/model dmeo")
        await d.said("Did you mean demo")
        assert d.chat.prompt.text == "/model dmeo"
        await d.send("/model demo")
        await d.said("This chat already uses demo.")
        assert d.chat.runtime is runtime


@pytest.mark.long
async def test_the_running_reply_is_stopped_and_the_old_model_unloaded_first(tmp_path: Path) -> None:
    old = ScriptedRuntime([Script(text=LONG_TEXT, pause_seconds=0.005)])
    new = ScriptedRuntime(target=facts("demo-mlx"))
    closed_before: list[bool] = []

    def load_other(_reference: str) -> Load:
        def load(_progress: Progress) -> edgespec.Runtime:
            closed_before.append(old.closed)
            return as_runtime(new)

        return load

    async with driving(loading(old), tmp_path, load_other=load_other) as d:
        await d.send(ASK)
        await d.said("word word")
        await d.send("/model demo-mlx")
        await d.said("This chat now uses demo-mlx.")
        await d.settled()
        assert closed_before == [True]
        assert d.chat.current_chat.entries[-1].content.startswith("word word")
        await d.say("And by date?")
        assert [asked[1] for asked in new.asked] == ["And by date?"]


async def test_a_cancelled_switch_loads_the_old_model_again(tmp_path: Path) -> None:
    times_loaded = 0
    typed = threading.Event()

    def load(_progress: Progress) -> edgespec.Runtime:
        nonlocal times_loaded
        times_loaded += 1
        return as_runtime(ScriptedRuntime())

    def load_other(_reference: str) -> Load:
        def load_slowly(progress: Progress) -> edgespec.Runtime:
            while progress("loading demo-mlx", 0.5):
                typed.wait(0.01)
            raise CancelledError("loading demo-mlx was cancelled")

        return load_slowly

    async with driving(load, tmp_path, load_other=load_other) as d:
        await d.send("/model demo-mlx")
        await until(d.pilot, lambda: isinstance(d.app.screen, LoadingScreen))
        await d.write("next")
        await d.press("escape")
        await d.said("This chat still uses demo.")
        await d.settled()
        assert times_loaded == 2
        assert d.chat.prompt.text == "next"
        await d.say(ASK)
        assert len(d.chat.current_chat.entries) == 2


async def test_quitting_during_a_switch_keeps_the_chat(tmp_path: Path) -> None:
    def load_other(_reference: str) -> Load:
        def load(progress: Progress) -> edgespec.Runtime:
            while progress("loading demo-mlx", 0.5):
                threading.Event().wait(0.01)
            raise CancelledError("loading demo-mlx was cancelled")

        return load

    async with driving(loading(ScriptedRuntime()), tmp_path, load_other=load_other) as d:
        await d.say(ASK)
        await d.send("/model demo-mlx")
        await until(d.pilot, lambda: isinstance(d.app.screen, LoadingScreen))
        d.app.leave_soon()
        await until(d.pilot, lambda: not d.app.is_running, "the end", seconds=5)
    assert len(json.loads(d.saved()[0].read_text())["messages"]) == 2


async def test_continue_waits_for_the_model_of_the_chat(tmp_path: Path) -> None:
    messages = MessageTree.linear([Message("user", "Tell me."), Message("assistant", "It was")])
    models = ModelReferences("demo-draft", "none")
    ChatStore(tmp_path / "chats").save(
        SavedChat("one", messages, NOON, NOON, target="demo-draft", unfinished=True, models=models)
    )
    old = ScriptedRuntime([Script(text=LONG_TEXT, pause_seconds=0.005)])
    new = ScriptedRuntime([Script(text=" the end.")], facts("demo-draft"))
    async with driving(loading(old), tmp_path, load_other=lambda *_: loading(new)) as d:
        await d.send("/continue")
        await until(d.pilot, lambda: bool(new.asked), "the reply")
        await d.settled()
        assert not old.asked
        assert d.chat.current_chat.entries[-1].content == "It was the end."
        assert d.chat.models == models


async def test_the_chat_chosen_last_keeps_its_model(tmp_path: Path) -> None:
    store = ChatStore(tmp_path / "chats")
    messages = MessageTree.linear([Message("user", "Hello"), Message("assistant", "Hi")])
    for name in ("demo-draft", "demo"):
        models = ModelReferences(name)
        store.save(SavedChat(name, messages, NOON, NOON, target=name, title=name, models=models))
    stored = {chat.id: chat for chat in store.list()}
    old = ScriptedRuntime([Script(text=LONG_TEXT, pause_seconds=0.005)])
    new = ScriptedRuntime(target=facts("demo-draft"))
    async with driving(loading(old), tmp_path, load_other=lambda *_: loading(new)) as d:
        await d.send("a question")
        await until(d.pilot, lambda: d.chat.writing, "the reply")
        await open_chat(d.chat, stored["demo-draft"])
        await open_chat(d.chat, stored["demo"])
        await until(d.pilot, lambda: d.chat.current_chat.id == "demo", "the second chat")
        await d.settled()
        assert not d.chat.holds_waiting
        assert d.chat.runtime.target.name == old.target.name
    assert store.load("demo").models == ModelReferences("demo")


async def test_what_is_sent_before_the_loading_screen_waits_for_the_model(tmp_path: Path) -> None:
    old, new = ScriptedRuntime(), ScriptedRuntime(target=facts("other"))
    async with driving(loading(old), tmp_path, load_other=lambda *_: loading(new)) as d:
        await d.say("first")
        d.chat.load_model("other")
        await d.chat.send_text("second")
        await d.chat.action_command("regen")
        await until(d.pilot, lambda: len(new.asked) == 2, "both replies")
        await d.settled()
        assert [text for _, text, _ in old.asked] == ["first"]
        assert [text for _, text, _ in new.asked] == ["second", "second"]
        d.chat.load_model("other")
        d.chat.begin_edit(0)
        d.chat.prompt.clear()
        await d.chat.send_text("first, edited")
        assert d.chat.prompt.text == "first, edited"
        assert d.chat.editing == 0
        await until(d.pilot, lambda: not d.chat.holds_waiting, "the model")
        await d.settled()
        assert len(new.asked) == 2


async def test_a_command_that_is_sent_before_the_loading_screen_waits_for_the_model(tmp_path: Path) -> None:
    loaded: list[str] = []

    def load_other(reference: str) -> Load:
        loaded.append(reference)
        return loading(ScriptedRuntime(target=facts(reference)))

    async with driving(loading(ScriptedRuntime()), tmp_path, load_other=load_other) as d:
        d.chat.load_model("demo-mlx")
        await d.chat.send_text("/set seed 7")
        await d.chat.send_text("/model demo-draft")
        assert d.chat.waiting.texts == ["/set seed 7", "/model demo-draft"]
        assert d.chat.current_chat.settings == {}
        await until(d.pilot, lambda: d.chat.runtime.target.name == "demo-draft", "the second model")
        await d.settled()
        assert loaded == ["demo-mlx", "demo-draft"]
        assert d.chat.current_chat.settings == {"seed": 7}
        assert not d.chat.waiting.texts


async def test_files_that_are_read_during_a_switch_are_sent_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("notes")
    old, new = ScriptedRuntime(), ScriptedRuntime(target=facts("other"))
    gate = asyncio.Event()
    async with driving(loading(old), tmp_path, load_other=lambda *_: loading(new)) as d:
        read = d.chat.chips.attachments

        async def slowly(references: list[str]) -> Any:
            await gate.wait()
            return await read(references)

        monkeypatch.setattr(d.chat.chips, "attachments", slowly)
        await d.send("see @notes.txt")
        d.chat.load_model("other")
        gate.set()
        await until(d.pilot, lambda: not d.chat.holds_waiting, "the model")
        await d.settled()
        assert not old.asked
        assert d.chat.prompt.text == "see @notes.txt"
        await d.press("enter")
        await until(d.pilot, lambda: bool(new.asked), "the reply")
        await d.settled()


async def test_messages_that_wait_for_a_model_that_is_not_loaded_are_not_sent(tmp_path: Path) -> None:
    def load_other(_reference: str) -> Load:
        def fail(_progress: Progress) -> edgespec.Runtime:
            raise BackendError("other is damaged", "choose another one")

        return fail

    old = ScriptedRuntime()
    async with driving(loading(old), tmp_path, load_other=load_other) as d:
        await d.say("first")
        d.chat.load_model("other")
        await d.chat.send_text("second")
        await d.said("This chat still uses demo.")
        await d.settled()
        assert len(old.asked) == 1
        assert d.chat.prompt.text.strip() == "second"
        assert not d.chat.waiting.texts


async def test_a_relative_path_is_saved_so_that_it_is_valid_in_other_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.gguf").write_bytes(b"GGUF")
    (tmp_path / "demo-draft").mkdir()
    new = ScriptedRuntime(target=facts("other"))
    async with driving(loading(ScriptedRuntime()), tmp_path, load_other=lambda *_: loading(new)) as d:
        d.chat.load_model("./own.gguf")
        await until(d.pilot, lambda: d.chat.models.target == str(tmp_path / "own.gguf"))
        await d.settled()
        d.chat.load_model("demo-draft")
        await until(d.pilot, lambda: d.chat.models.target == "demo-draft")
        await d.settled()


async def test_a_chosen_model_is_saved_with_the_chat(tmp_path: Path) -> None:
    new = ScriptedRuntime(target=facts("other"))
    async with driving(loading(ScriptedRuntime()), tmp_path, load_other=lambda *_: loading(new)) as d:
        await d.say("first")
        await d.send("/model demo-draft")
        await d.said("This chat now uses other.")
        await d.settled()
        chat = d.app.store.load(d.chat.current_chat.id)
        assert (chat.target, chat.models.target) == ("other", "demo-draft")


@pytest.mark.long
async def test_a_setting_that_the_new_model_lacks_is_removed(tmp_path: Path) -> None:
    new = ScriptedRuntime(target=facts("demo-mlx"))
    old = ScriptedRuntime()
    settings: dict[str, Setting] = {"method": "lowbit", "seed": 1}
    async with driving(loading(old), tmp_path, settings=settings, load_other=lambda _: loading(new)) as d:
        await d.send("/model demo-mlx")
        await d.said("The setting method was removed.")
        assert d.chat.current_chat.settings == {"seed": 1}
        await d.press("ctrl+n")
        assert d.chat.current_chat.settings == {"seed": 1}


@pytest.mark.long
async def test_a_model_that_can_be_loaded_no_more_ends_the_chat_with_its_error(tmp_path: Path) -> None:
    times_loaded = 0

    def load(_progress: Progress) -> edgespec.Runtime:
        nonlocal times_loaded
        times_loaded += 1
        if times_loaded > 1:
            raise BackendError("demo was deleted", "choose another one")
        return as_runtime(ScriptedRuntime())

    def load_other(_reference: str) -> Load:
        def fail(_progress: Progress) -> edgespec.Runtime:
            raise BackendError("demo-mlx is damaged", "choose another one")

        return fail

    async with driving(load, tmp_path, load_other=load_other) as d:
        await d.send("/model demo-mlx")
        await until(d.pilot, lambda: not d.app.is_running, "the end", seconds=5)
    assert str(d.app.load_error) == "demo was deleted; choose another one"
