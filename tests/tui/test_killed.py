"""Chats that are killed can be reopened, and chats whose worker is killed load the model again.

Run as a program, this module is a chat that edits messages or calls tools until it is killed. Its arguments
are a folder for the chats and the log, `edits` or `tools`, and the seed of its choices.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import edgespec
from edgespec import Runtime
from edgespec.chat.message import Message
from edgespec.chat.store import ChatStore
from edgespec.chat.tool_calls.calls import ToolCall
from edgespec.errors import CancelledError
from edgespec.options.settings_file import quoted
from edgespec.store.download import Progress
from tests.cases import first
from tests.cluster.conftest import Worker, delayed, start_worker
from tests.tui.driving import Driver, driving, save_chat, until
from tests.tui.scripted import Script, ScriptedRuntime, loading

# The fixtures of the tests of the cluster.
__all__ = ["delayed", "start_worker"]

SERVER = Path(__file__).parent.parent / "tools" / "good_server.py"


def kill_after(folder: Path, mode: str, seed: int, seconds: float) -> None:
    """Start a chat, and kill it this long after it is ready."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.tui.test_killed", str(folder), mode, str(seed)],
        stdout=subprocess.PIPE,
        env={**os.environ, "EDGESPEC_CONFIG_DIR": str(folder / "config")},
    ) as chat:
        assert chat.stdout is not None
        assert chat.stdout.readline() == b"ready\n"
        time.sleep(seconds)
        assert chat.poll() is None
        chat.kill()


def test_a_chat_killed_during_edits_keeps_all_versions(tmp_path: Path) -> None:
    choices, store = random.Random(0), ChatStore(tmp_path / "chats")
    for seed in range(2):
        kill_after(tmp_path, "edits", seed, choices.uniform(0.3, 1.5))
        for entry in store.list():
            assert not entry.problem
        saved: dict[str, list[str]] = dict(map(json.loads, (tmp_path / "log").read_text().splitlines()))
        for chat_id, contents in saved.items():
            kept = Counter(message.content for message in store.load(chat_id).tree.messages)
            assert not Counter(contents) - kept


@pytest.mark.parametrize("seconds", first([0.3, 0.05]))
async def test_a_chat_killed_during_tool_calls_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setenv("EDGESPEC_CONFIG_DIR", str(tmp_path / "config"))
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "tools.toml").write_text(
        f"[good]\ncommand = {quoted(sys.executable)}\nargs = [{quoted(str(SERVER))}, 'stdio']\n"
        "allow = ['add']\n"
    )
    calls = tuple(ToolCall(str(n), "good_add", json.dumps({"a": n, "b": 1})) for n in range(12))
    store = save_chat(tmp_path, Message("user", "Add."), Message("assistant", "", tool_calls=calls))
    kill_after(tmp_path, "tools", 0, seconds)
    assert not store.list()[0].problem
    question, asked, *results = store.load("one").messages
    assert (question.content, asked.tool_calls) == ("Add.", calls)
    expected = [str(n + 1) for n in range(12)]
    assert [each.content for each in results if each.role == "tool"] == expected[: len(results)]
    async with driving(loading(ScriptedRuntime()), tmp_path, resume="last") as d:
        await d.say("Go on.")
        messages = list(d.chat.current_chat.messages)
        assert [each.role for each in messages].count("tool") == len(calls)
        assert [each.role for each in messages][-2:] == ["user", "assistant"]


PAUSE_SECONDS = 0.002


def record(folder: Path, driver: Driver) -> None:
    """Append the chat's messages to the log in one write. The chat is idle, so they are saved."""
    chat = driver.chat.current_chat
    line = json.dumps([chat.id, [entry.content for entry in chat.tree.messages]])
    handle = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, f"{line}\n".encode())
    os.close(handle)


def ready() -> None:
    """Tell the test that the chat can be killed now."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()


async def edit(folder: Path, seed: int) -> None:
    choices = random.Random(seed)
    runtime = ScriptedRuntime(
        scripts=[Script(f"Reply {seed} {number} **is** here.", PAUSE_SECONDS) for number in range(1000)]
    )
    resume = "last" if (folder / "log").exists() else None
    async with driving(loading(runtime), folder, resume=resume) as d:
        await d.say(f"question {seed}")
        record(folder, d)
        ready()
        for number in range(1000):
            action = choices.choice(("say", "edit", "rerun", "older version"))
            text = f"{action} {seed} {number}"
            if action == "say":
                await d.say(text)
            elif action == "edit":
                await d.press("shift+up", "up", "e")
                await d.say(text)
            else:
                await d.press("shift+up", "r" if action == "rerun" else "left")
                await d.settled()
                await d.press("escape")
            await d.settled()
            record(folder, d)


async def call_tools(folder: Path) -> None:
    async with driving(loading(ScriptedRuntime()), folder, resume="last") as d:
        await d.say("/tools on")
        await until(d.pilot, lambda: len(d.chat.tool_use.tools) > 0, "the tools", 60)
        ready()
        await d.say("/continue")
        await d.pilot.pause(60)


QUESTION = "How do I list files by size, and how do I count the lines of each?"


@pytest.mark.long
async def test_the_next_message_loads_the_model_again(
    start_worker: Callable[..., Worker], delayed: Callable[[int, float], int], tmp_path: Path
) -> None:
    worker = start_worker()
    port = delayed(worker.port, 0.01)
    hangs = threading.Event()

    def load(progress: Progress) -> Runtime:
        while hangs.is_set():
            time.sleep(0.01)
            if not progress("connecting to the worker", 0.0):
                raise CancelledError("connecting to the worker was cancelled")
        return edgespec.load("demo", None, workers=f"127.0.0.1:{port}", context=1024, progress=progress)

    async with driving(load, tmp_path, settings={"temperature": 0.0}, size=(120, 40)) as d:
        await d.say(QUESTION)
        whole = d.chat.current_chat.entries[-1].content
        await d.send(QUESTION)
        await until(d.pilot, lambda: bool(d.chat.current_chat.turn and d.chat.current_chat.turn.written))
        worker.process.kill()
        await d.settled()
        await d.said("To use a model on this machine instead, type /model.")
        assert d.chat.current_chat.unfinished
        # The worker has not been started again.
        await d.say("Hello")
        await d.said("does not seem to be an edgespec worker")
        assert d.chat.prompt.text == "Hello"
        hangs.set()
        await d.send("Hello")
        await d.said("connecting to the worker")
        await d.pilot.press("escape")
        await d.settled()
        await d.said("Connecting to the worker was cancelled")
        assert d.chat.prompt.text == "Hello"
        hangs.clear()
        start_worker(address=worker.address)
        before = d.chat.runtime
        await d.say("/new")
        await d.say(QUESTION)
        assert d.chat.current_chat.entries[-1].content == whole
        assert d.chat.runtime is not before


if __name__ == "__main__":
    place = Path(sys.argv[1])
    asyncio.run(edit(place, int(sys.argv[3])) if sys.argv[2] == "edits" else call_tools(place))
