"""Chats killed while the user edits messages or the model calls tools can be reopened."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest

from edgespec.chat.message import Message
from edgespec.chat.saved_chat import MessageTree, SavedChat
from edgespec.chat.store import ChatStore
from edgespec.chat.tool_calls.calls import ToolCall
from edgespec.options.settings_file import quoted
from tests.cases import first
from tests.tui import killed_chat
from tests.tui.driving import driving
from tests.tui.scripted import ScriptedRuntime, loading

SERVER = Path(__file__).parent.parent / "tools" / "good_server.py"


def kill_after(folder: Path, mode: str, seed: int, seconds: float) -> None:
    """Start a chat, and kill it this long after it is ready."""
    with subprocess.Popen(
        [sys.executable, "-m", killed_chat.__name__, str(folder), mode, str(seed)],
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
    messages = [Message("user", "Add."), Message("assistant", "", tool_calls=calls)]
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    store = ChatStore(tmp_path / "chats")
    store.save(SavedChat("one", MessageTree.linear(messages), noon, noon))
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
