"""Snapshots of the whole screen at common terminal sizes, in dark and light colours.

To accept a change: EDGESPEC_UPDATE_SNAPSHOTS=1 scripts/test tests/tui/test_snapshots.py, and read the diff.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.errors import BackendError
from tests.cases import first
from tests.tui.driving import Driver, driving
from tests.tui.scripted import Script, ScriptedRuntime, facts, loading
from tests.tui.snapshot_files import check_screen

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


SCENES = {
    "welcome": _nothing,
    "reply": _reply,
    "details": _details,
    "chats": _chats,
    "help": _help,
    "settings": _settings,
    "trouble": _trouble,
}


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize(
    "size",
    first([(80, 24), (40, 20), (200, 60)]),
    ids=lambda s: f"{s[0]}x{s[1]}",
)
async def test_the_screen(tmp_path: Path, scene: str, size: tuple[int, int]) -> None:
    runtime = ScriptedRuntime(target=facts("demo", notice=NOTICE))
    if scene == "trouble":
        runtime.scripts = [
            Script(error=BackendError("the pass failed with status 1", "use a larger --context"))
        ]
    async with driving(loading(runtime), tmp_path, size=size) as d:
        await SCENES[scene](d)
        await check_screen(d, scene)
