"""Snapshots of the whole screen in dark and light colours, some of them from 40 to 200 columns.

To accept a change: EDGESPEC_UPDATE_SNAPSHOTS=1 scripts/test tests/tui/test_snapshots.py, and read the diff.
With EDGESPEC_PICTURES=FOLDER, the tests also save pictures.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path

import pytest

from edgespec.bench.race import Lane, Race, RaceChunk
from edgespec.chat.message import Message
from edgespec.chat.saved_chat import MessageTree, SavedChat
from edgespec.chat.store import ChatStore
from edgespec.decode.reply import Reply
from edgespec.errors import BackendError
from edgespec.tools.tool import Tool
from edgespec.tui.commands.results import RaceProgress, RunningRace
from edgespec.tui.screens.race import RaceScreen
from edgespec.tui.tool_use import ApprovalScreen
from tests.tui.driving import Driver, check_screen, driving
from tests.tui.scripted import LIVE, MARKDOWN, Script, ScriptedRuntime, facts, loading, made_up_stats

NOTICE = "This is the built-in demo model: a tiny terminal helper, often wrong; do not run what it prints."
ASK = "How do I list files by size?"


async def _nothing(d: Driver) -> None:
    """The chat as it opens."""


async def _reply(d: Driver) -> None:
    await d.say(ASK)


async def _details(d: Driver) -> None:
    await d.say(ASK)
    await d.press("f3", "f4")


async def _chats(d: Driver) -> None:
    await d.say(ASK)
    await d.press("f2")
    await d.sees("2 messages")


async def _help(d: Driver) -> None:
    await d.press("f1")


async def _settings(d: Driver) -> None:
    await d.press("f6")
    await d.write("hot")


async def _trouble(d: Driver) -> None:
    await d.say("/regne")
    d.chat.prompt.clear()
    await d.say(ASK)


SCENES: dict[str, Callable[[Driver], Awaitable[None]]] = {
    "welcome": _nothing,
    "reply": _reply,
    "details": _details,
    "chats": _chats,
    "help": _help,
    "settings": _settings,
    "trouble": _trouble,
}


MARCH = datetime(2020, 3, 1, 12, tzinfo=UTC)
CHATS = (
    ("How tall do pines grow in the mountains of northern Norway, and why?", "Up to 20 metres."),
    ("Rename many files", "Use rename, or a loop in the shell with mv."),
    ("Docker port is taken", "Find the process that uses the port: ss -ltnp | grep 8080"),
    ("Grüße auf Japanisch", "こんにちは — good day, こんばんは — good evening"),
    ("Parse JSON in bash", "Use jq. It is one program without dependencies."),
)


def save_chats(folder: Path) -> None:
    store = ChatStore(folder / "chats")
    for number, (question, answer) in enumerate(CHATS):
        tree = MessageTree.linear([Message("user", question), Message("assistant", answer)])
        time = MARCH + timedelta(days=number)
        store.save(SavedChat(f"chat-{number}", tree, time, time, pinned=number == 1))
    (store.folder / "broken.json").write_text("{")


async def _list(d: Driver) -> None:
    await d.press("f2")
    await d.sees("Rename many files")


async def _search(d: Driver) -> None:
    await d.press("f2")
    await d.write("use")
    await d.sees("Chats: use")


async def _rename(d: Driver) -> None:
    await _list(d)
    await d.press("ctrl+r")
    await d.sees("Rename chat")


async def _versions(d: Driver) -> None:
    await d.say(ASK)
    await d.press("ctrl+r")
    await d.settled()
    await d.press("ctrl+r")
    await d.settled()
    await d.press("shift+tab", "left")
    await d.sees("‹ 2/3 ›")


async def _fork(d: Driver) -> None:
    await d.say(ASK)
    await d.press("shift+tab", "f")
    await d.said("This is a new chat with 2 messages")


def _lane(method: str, seconds: float) -> Lane:
    words = MARKDOWN.replace(" ", " \0").split("\0")
    chunks = [
        RaceChunk((place + 1) * seconds / len(words), word, 1, method != "none" and place % 3 != 2)
        for place, word in enumerate(words)
    ]
    stats = made_up_stats(len(words))
    reply = Reply(MARKDOWN, tuple(range(len(words))), "stop", 1234, "demo", "demo-draft", LIVE, stats)
    return Lane(method, tuple(chunks), reply)


async def _race(d: Driver) -> None:
    race: Future[Race] = Future()
    race.set_result(Race(_lane("none", 0.4), _lane("auto", 0.25), 0.0))
    d.app.push_screen(RaceScreen(RunningRace("auto", ASK, race, RaceProgress()), lambda: None))
    await d.sees("1.60x")


async def _approval(d: Driver) -> None:
    tool = Tool("files", "write_file", "Write a file.", {})
    arguments = '{"path": "~/notes/trees.md", "content": "# Trees\\n\\nPines grow up to 20 metres."}'
    d.app.push_screen(ApprovalScreen(tool, arguments))
    await d.pilot.pause(0.7)
    await d.sees("Allow once")


SCENES_WITH_CHATS: dict[str, Callable[[Driver], Awaitable[None]]] = {
    "chat-list": _list,
    "search": _search,
    "rename": _rename,
    "versions": _versions,
    "fork": _fork,
    "race": _race,
    "approval": _approval,
}


# Scenes whose layout depends most on the width: Markdown, a side panel, a table and two columns.
SCALED_SCENES = ("reply", "details", "chat-list", "race")


@pytest.mark.parametrize(
    ("scene", "size"),
    [
        *((scene, (80, 24)) for scene in (*SCENES, *SCENES_WITH_CHATS)),
        *product(SCALED_SCENES, [(40, 20), (200, 60)]),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value[0]}x{value[1]}",
)
async def test_the_screen(tmp_path: Path, scene: str, size: tuple[int, int]) -> None:
    runtime = ScriptedRuntime(target=facts("demo", notice=NOTICE))
    if scene == "trouble":
        error = BackendError("the pass failed with status 1", "use a larger --context")
        runtime = replace(runtime, scripts=[Script(error=error)])
    elif scene in SCENES_WITH_CHATS:
        save_chats(tmp_path)
        texts = (MARKDOWN, "Use `du -a | sort -n`.", "Use `ls -lS`.")
        runtime = ScriptedRuntime([Script(text) for text in texts])
    async with driving(loading(runtime), tmp_path, size=size) as d:
        await (SCENES | SCENES_WITH_CHATS)[scene](d)
        await check_screen(d, scene)
