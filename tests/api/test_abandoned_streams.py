"""Streams that are never read to the end must not block the runtime, wherever they are dropped."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import edgespec
from edgespec import Reply, ReplyStream, Runtime
from edgespec.errors import BusyError
from tests.api.questions import HOWTO, REPEATS, equal
from tests.raising import raises

OPTIONS: dict[str, Any] = {"seed": 4, "max_tokens": 32, "temperature": 0.8}


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "opened"),
    [
        pytest.param("demo", "rt.chat().stream('hi')", marks=pytest.mark.long),
        ("demo", "rt.stream('hi')"),
        pytest.param("demo", "chat.stream('hi')", marks=pytest.mark.long),
        ("demo-mlx-draft", "rt.stream('hi')"),
        pytest.param("demo-mlx-draft", "rt.chat().stream('hi')", marks=pytest.mark.long),
        pytest.param("demo-mlx-draft", "chat.stream('hi')", marks=pytest.mark.long),
    ],
)
def test_the_with_block_ends(name: str, opened: str) -> None:
    program = (
        "import edgespec\n"
        f"with edgespec.load({name!r}, context=512, exactness='off', measure_costs=False) as rt:\n"
        "    chat = rt.chat()\n"
        f"    next(iter({opened}))\n"
        "print('left', flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")


@pytest.mark.usefixtures("no_garbage_collection")
class TestWithoutGarbageCollection:
    """A stream has no reference cycles, so it ends when its last reference is dropped."""

    def test_next_reply_starts_at_once(self, demo: Runtime, plain: Callable[..., Reply]) -> None:
        for _ in range(3):
            next(demo.stream(HOWTO, **OPTIONS))
        equal(demo.generate(REPEATS, **OPTIONS), plain(REPEATS, **OPTIONS))

    def test_a_stream_in_a_reference_cycle(self, demo: Runtime, plain: Callable[..., Reply]) -> None:
        stream = demo.stream(HOWTO, **OPTIONS)
        next(stream)
        cycle: list[Any] = [stream]
        cycle.append(cycle)
        del stream, cycle
        equal(demo.generate(REPEATS, **OPTIONS), plain(REPEATS, **OPTIONS))

    def test_chat_keeps_the_text_so_far(self, demo: Runtime) -> None:
        chat = demo.chat()
        text = next(chat.stream(HOWTO, **OPTIONS)).text
        assert [message.role for message in chat.messages] == ["user", "assistant"]
        assert chat.messages[-1].content.startswith(text)
        before = list(chat.messages)
        chat.stream("Never read")
        assert chat.messages == before
        assert chat.ask("And now?", **OPTIONS).tokens

    def test_dropped_in_another_thread(self, demo: Runtime, plain: Callable[..., Reply]) -> None:
        streams = [demo.stream(HOWTO, **OPTIONS)]
        next(streams[0])
        thread = threading.Thread(target=streams.clear)
        thread.start()
        thread.join()
        equal(demo.generate(REPEATS, **OPTIONS), plain(REPEATS, **OPTIONS))


@pytest.mark.parametrize("lock", ["_state_lock", "_compute_lock"])
def test_collection_while_the_session_is_locked(
    demo: Runtime, plain: Callable[..., Reply], lock: str
) -> None:
    """Garbage collection can interrupt any code, including code that holds the session's locks."""
    ended: list[Reply | None] = []
    stream = demo.stream(HOWTO, on_end=ended.append, **OPTIONS)
    next(stream)
    cycle: list[object] = [stream]
    cycle.append(cycle)
    del stream, cycle
    with getattr(demo._session, lock):
        gc.collect()
    equal(demo.generate(REPEATS, **OPTIONS), plain(REPEATS, **OPTIONS))
    assert len(ended) == 1
    assert ended[0] is not None
    assert ended[0].finish_reason == "cancelled"


def test_chat_stream_closed_after_the_runtime() -> None:
    with edgespec.load("demo", "none") as runtime:
        chat = runtime.chat()
        stream = chat.stream(HOWTO, **OPTIONS)
        text = next(stream).text
    stream.close()
    assert chat.messages[-1].content.startswith(text)


def test_close_in_another_thread_cancels_the_reply(demo: Runtime, plain: Callable[..., Reply]) -> None:
    stream = demo.stream("What does `ls` do? " * 20, max_tokens=500, temperature=1.2, seed=1)
    started, errors = threading.Event(), []

    def read() -> None:
        try:
            for _ in stream:
                started.set()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert started.wait(60)
    stream.close()
    thread.join(60)
    assert not errors
    assert stream.reply.finish_reason == "cancelled"
    equal(demo.generate(REPEATS, **OPTIONS), plain(REPEATS, **OPTIONS))


def test_two_threads_cannot_read_one_reply(demo: Runtime) -> None:
    inside, leave = threading.Event(), threading.Event()

    def wait(description: str, _fraction: float) -> bool:
        # The prompt is prepared in this thread, before there is a stream to read.
        if description == "preparing the prompt":
            return True
        inside.set()
        return leave.wait(60)

    demo.clear_cache()
    stream: ReplyStream = demo.stream("What does `ls` do? " * 20, progress=wait, **OPTIONS)
    thread = threading.Thread(target=stream.wait)
    thread.start()
    assert inside.wait(60)
    with raises(BusyError, "another thread"):
        next(stream)
    leave.set()
    thread.join(60)
    assert len(stream.reply.tokens) > 0


@pytest.mark.long
def test_streams_abandoned_by_many_threads(plain: Callable[..., Reply]) -> None:
    with edgespec.load("demo", method="model+ngram") as runtime:

        def abandon() -> None:
            for i in range(8):
                try:
                    stream = runtime.stream(HOWTO, **OPTIONS)
                    for _ in range(i % 3):
                        next(stream)
                except BusyError:
                    pass

        threads = [threading.Thread(target=abandon) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        equal(runtime.generate(REPEATS, **OPTIONS), plain(REPEATS, **OPTIONS))
