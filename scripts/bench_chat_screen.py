#!/usr/bin/env python3
"""Measure the time from a key press until the terminal chat shows its result.

    .venv/bin/python scripts/bench_chat_screen.py
    .venv/bin/python scripts/bench_chat_screen.py --messages 5000 --json

Opens a chat of 1,000 messages without a terminal and presses each key several times. Prints how long it takes
until the screen is drawn for the first time, which usually shows the result. The goal is a 95th percentile
below 50 ms. The time until the chat is at rest includes later work, such as preparing the messages above and
below the screen. It shows how often a key can be repeated. Run this on an otherwise idle machine. The
processor time is less sensitive to other programs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, process_time

from rich.console import RenderableType
from textual import events
from textual.screen import Screen

import edgespec
from edgespec.chat.message import Message
from edgespec.chat.saved_chat import MessageTree, SavedChat
from edgespec.chat.store import ChatStore
from edgespec.store.download import Progress
from edgespec.tui.app import ChatApp, quick_screen
from edgespec.tui.saved_chats import resume

# Typical replies, used one after the other: with a command, with code, with a table, and long prose.
_PROSE = (
    "The option `-S` sorts by **size**, and the largest file comes first. Add `-r` to reverse the order,"
    " which is useful in a small terminal, because the largest files are then next to the prompt. "
)
_CODE = """
```python
from pathlib import Path


def by_size(folder: Path) -> list[Path]:
    \"\"\"Return the files of a folder, largest first.\"\"\"
    files = (path for path in folder.iterdir() if path.is_file())
    return sorted(files, key=lambda path: -path.stat().st_size)
```
"""
_TABLE = "| option | meaning |\n|---|---|\n| `-S` | by size |\n| `-t` | by time |"
_REPLIES = (
    "Use `ls`:\n\n```sh\nls -lS\n```\n\n- `-S` sorts by size\n- `-l` shows details\n\nThis is reply {}.",
    f"{_PROSE}\n{_CODE}\nThis is reply {{}}.",
    f"## Options\n\n{_TABLE}\n\n{_PROSE}\n\n1. Open a terminal\n2. Press Enter\n\nThis is reply {{}}.",
    f"{_PROSE * 2}\n\n{_PROSE * 3}\n\n> {_PROSE}\n\nThis is reply {{}}.",
)
# Time between two key presses. Keyboards repeat a key that is held down about 30 times per second.
_PAUSE_SECONDS = 1 / 30
# Number of other chats in the list, which searches also read.
_OTHER_CHATS = 100


def main() -> None:
    """Create the chats, measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=1000, help="messages in the chat")
    parser.add_argument("--presses", type=int, default=100, help="presses of each key")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = ChatStore(Path(folder) / "chats")
        _save_chats(store, arguments.messages)
        rows = asyncio.run(_measure(store, arguments.presses))
    if arguments.json:
        print(json.dumps(rows))
        return
    print(f"{'':18}{'screen drawn':^33}{'at rest':^22}{'processor':^22}")
    print(f"{'action':18}{'median':>11}{'p95':>11}{'maximum':>11}" + f"{'median':>11}{'p95':>11}" * 2)
    for name, row in rows.items():
        print(f"{name:18}" + "".join(f"{value:8.0f} ms" for value in row.values()))


def _save_chats(store: ChatStore, count: int) -> None:
    now = datetime.now(UTC)
    for number in range(_OTHER_CHATS + 1):
        length = count if number == 0 else 20
        messages = (
            Message("assistant", _REPLIES[n // 2 % len(_REPLIES)].format(n))
            if n % 2
            else Message("user", f"Question {n} of {number}?")
            for n in range(length)
        )
        title = "long" if number == 0 else f"chat {number}"
        store.save(SavedChat(store.new_id(), MessageTree.linear(messages), now, now, title=title))


class _TimedApp(ChatApp):
    """The chat, which notes when it draws.

    Attributes:
        frames: The times at which the screen was drawn.
    """

    # Textual would look for the file beside this script.
    CSS_PATH = str(Path(edgespec.__file__).parent / "tui" / ChatApp.CSS_PATH)
    frames: Sequence[float] = ()

    def _display(self, screen: Screen[object], renderable: RenderableType | None) -> None:
        super()._display(screen, renderable)
        if renderable is not None and not self._batch_count:
            self.frames = [*self.frames, perf_counter()]


async def _measure(store: ChatStore, presses: int) -> dict[str, dict[str, float]]:
    """Return the times of each action in milliseconds."""

    def load(progress: Progress) -> edgespec.Runtime:
        return edgespec.load("demo", "none", method="none", threads=1, progress=progress)

    app = _TimedApp(load, store=store)
    rows: dict[str, dict[str, float]] = {}
    with quick_screen():
        async with app.run_test(size=(120, 40)) as pilot:
            while app.chat is None or not app.chat.idle:
                await pilot.pause(0.1)
            chat = app.chat

            async def press(name: str, keys: Sequence[str]) -> None:
                rows[name] = await _row(app, lambda key: _press(app, key), keys)

            async def open_chat(title: str) -> None:
                await resume(chat, title)
                await _drawn(app)

            rows["open the chat"] = await _row(app, open_chat, ["long", "chat 1"] * 5)
            await open_chat("long")
            await press("page up", ["pageup"] * presses)
            await press("page down", ["pagedown"] * presses)
            await press("home and end", ["ctrl+home", "ctrl+end"] * (presses // 2))
            await press("typing", [*"typing", "space"] * (presses // 7 + 1))
            chat.prompt.clear()
            await press("select older", ["shift+up", *["up"] * presses])
            await press("select newer", ["down"] * presses)
            await pilot.press("escape")
            await press("list of chats", ["f2"] * 21)
            await press("search", [*"question", *["backspace"] * 8] * (presses // 16 + 1))
    app.model_thread.close()
    app.model_thread.join(5)
    return rows


async def _row(
    app: _TimedApp, act: Callable[[str], Awaitable[None]], arguments: Sequence[str]
) -> dict[str, float]:
    """Act once for each argument, and return the times in milliseconds."""
    times, rest_times, cpu_times = [], [], []
    for argument in arguments:
        app.frames = []
        began, cpu = perf_counter(), process_time()
        await act(argument)
        rest_times.append(1000 * (perf_counter() - began))
        cpu_times.append(1000 * (process_time() - cpu))
        times.append(1000 * (app.frames[0] - began) if app.frames else rest_times[-1])
        await asyncio.sleep(_PAUSE_SECONDS)
    return {
        "median_ms": median(times),
        "p95_ms": quantiles(times, n=20)[-1],
        "max_ms": max(times),
        "rest_median_ms": median(rest_times),
        "rest_p95_ms": quantiles(rest_times, n=20)[-1],
        "processor_median_ms": median(cpu_times),
        "processor_p95_ms": quantiles(cpu_times, n=20)[-1],
    }


async def _press(app: _TimedApp, key: str) -> None:
    """Press a key and wait until the chat is at rest. `Pilot.press` would also wait for every widget."""
    printable = key if len(key) == 1 else " " if key == "space" else None
    app.post_message(events.Key(key, printable))
    # A key press passes through the queues of the app, the focused widget and its parents, the screen, and
    # then the app again.
    focused = app.focused
    parents = [] if focused is None else [node for node in focused.ancestors_with_self if node is not app]
    for node in (app, *parents, app):
        handled = asyncio.Event()
        node.call_later(handled.set)
        await handled.wait()
    await _drawn(app)


async def _drawn(app: _TimedApp) -> None:
    """Wait until nothing is left to draw."""
    drawn = asyncio.Event()
    app.screen.call_after_refresh(drawn.set)
    await drawn.wait()


if __name__ == "__main__":
    main()
