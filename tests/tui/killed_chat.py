"""A chat that edits messages or calls tools until it is killed. `test_killed.py` starts it.

Arguments: a folder for the chats and the log, `edits` or `tools`, and the seed of its choices.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from pathlib import Path

from tests.tui.driving import Driver, driving, until
from tests.tui.scripted import Script, ScriptedRuntime, loading

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


if __name__ == "__main__":
    place = Path(sys.argv[1])
    asyncio.run(edit(place, int(sys.argv[3])) if sys.argv[2] == "edits" else call_tools(place))
