#!/usr/bin/env python3
"""Measure the time from a key press until the screen of the terminal chat is up to date.

    .venv/bin/python scripts/bench_chat_screen.py
    .venv/bin/python scripts/bench_chat_screen.py --messages 5000

Opens a chat of 1,000 messages without a terminal, presses each key several times, and prints the median and
the 95th percentile of the times until the screen is drawn, and of the processor time that it took. The goal
is a 95th percentile below 50 ms. Run this on an otherwise idle machine. Other programs disturb the processor
time less.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, process_time

from textual import events
from textual.app import App
from textual.pilot import Pilot

import edgespec
from edgespec.catalog import Progress
from edgespec.chat.message import Message
from edgespec.chat.message_tree import MessageTree
from edgespec.chat.saved_chat import SavedChat
from edgespec.chat.store import ChatStore
from edgespec.tui.app import ChatApp
from edgespec.tui.saved_chats import resume

_REPLY = "Use `ls`:\n\n```sh\nls -lS\n```\n\n- `-S` sorts by size\n- `-l` shows details\n\nThis is reply {}."
# Number of other chats in the list. The search reads them too.
_OTHER_CHATS = 100


def main() -> None:
    """Create the chats, measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=1000, help="messages in the chat")
    parser.add_argument("--presses", type=int, default=100, help="presses of each key")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = ChatStore(Path(folder) / "chats")
        _save_chats(store, arguments.messages)
        asyncio.run(_measure(store, arguments.presses))


def _save_chats(store: ChatStore, count: int) -> None:
    now = datetime.now(UTC)
    for number in range(_OTHER_CHATS + 1):
        length = count if number == 0 else 20
        messages = (
            Message("assistant", _REPLY.format(n)) if n % 2 else Message("user", f"Question {n} of {number}?")
            for n in range(length)
        )
        title = "long" if number == 0 else f"chat {number}"
        store.save(SavedChat(store.new_id(), MessageTree.linear(messages), now, now, title=title))


async def _measure(store: ChatStore, presses: int) -> None:
    def load(progress: Progress) -> edgespec.Runtime:
        return edgespec.load("demo", "none", method="none", threads=1, progress=progress)

    app = ChatApp(load, store=store)
    async with app.run_test(size=(120, 40)) as pilot:
        while app.chat is None or not app.chat.idle:
            await pilot.pause(0.1)
        began, cpu = perf_counter(), process_time()
        await resume(app.chat, "long")
        await pilot.pause()
        print(
            f"opening the chat   {1000 * (perf_counter() - began):6.0f} ms,"
            f" processor {1000 * (process_time() - cpu):.0f} ms"
        )
        print("key                  median      p95     processor: median      p95")
        await _row(pilot, "page up", ["pageup"] * presses)
        await _row(pilot, "page down", ["pagedown"] * presses)
        await _row(pilot, "typing", [*"typing", "space"] * (presses // 7 + 1))
        app.chat.prompt.clear()
        await _row(pilot, "select older", ["shift+up", *["up"] * presses])
        await pilot.press("escape", "f2")
        await _row(pilot, "search", [*"question", *["backspace"] * 8] * (presses // 16 + 1))
    app.model_thread.close()
    app.model_thread.join(5)


async def _row(pilot: Pilot[None], name: str, keys: Sequence[str]) -> None:
    """Press keys and print the times until the screen is up to date."""
    times, cpu_times = [], []
    for key in keys:
        began, cpu = perf_counter(), process_time()
        await _press(pilot.app, key)
        times.append(1000 * (perf_counter() - began))
        cpu_times.append(1000 * (process_time() - cpu))
    wall, processor = (
        f"{median(each):6.0f} ms {quantiles(each, n=20)[-1]:6.0f} ms" for each in (times, cpu_times)
    )
    print(f"{name:18} {wall}          {processor}", flush=True)


async def _press(app: App[None], key: str) -> None:
    """Press a key and wait until the screen is drawn. `Pilot.press` would also wait for every widget."""
    printable = key if len(key) == 1 else " " if key == "space" else None
    app.post_message(events.Key(key, printable))
    # The key press passes through the queues of the app, the focused widget and its parents, the screen, and
    # finally the app again.
    focused = app.focused
    parents = [] if focused is None else [node for node in focused.ancestors_with_self if node is not app]
    for node in (app, *parents, app):
        handled = asyncio.Event()
        node.call_later(handled.set)
        await handled.wait()
    drawn = asyncio.Event()
    app.screen.call_after_refresh(drawn.set)
    await drawn.wait()


if __name__ == "__main__":
    main()
