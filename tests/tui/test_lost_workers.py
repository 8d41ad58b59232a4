"""The chat after losing a worker: it keeps the text, says what to do, and reloads the model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import edgespec
from edgespec import Runtime
from edgespec.errors import CancelledError
from edgespec.store.download import Progress
from tests.cluster.conftest import Worker, delayed, start_worker
from tests.tui.driving import driving, until

__all__ = ["delayed", "start_worker"]

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
