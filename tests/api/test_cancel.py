"""Cancelling a reply at any time does not change the next one."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import islice
from typing import Any, ClassVar

import pytest

import edgespec
from edgespec import Reply, Runtime
from tests.api.questions import HOWTO, REPEATS, equal
from tests.cases import covering


def take(stream: edgespec.ReplyStream, count: int) -> None:
    """Take this many chunks, or all if there are fewer."""
    for _ in islice(stream, count):
        pass


class TestCancel:
    """The reply after a cancel equals that of a fresh runtime."""

    OPTIONS: ClassVar[dict[str, Any]] = {
        "seed": 4,
        "max_tokens": 48,
        "temperature": 0.8,
        "method": "model+ngram",
    }

    def after(self, demo: Runtime, plain: Callable[..., Reply], prompt: str = REPEATS) -> None:
        options = {name: value for name, value in self.OPTIONS.items() if name != "method"}
        expected = plain(prompt, **options)
        equal(demo.generate(prompt, **self.OPTIONS), expected)

    @pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
    def test_cancel_between_rounds(self, demo: Runtime, plain: Callable[..., Reply], count: int) -> None:
        stream = demo.stream(REPEATS, **self.OPTIONS)
        take(stream, count)
        stream.cancel()
        assert sum(piece.token_count for piece in stream) <= 6
        assert stream.reply.finish_reason == "cancelled"
        whole = plain(REPEATS, **{n: v for n, v in self.OPTIONS.items() if n != "method"})
        assert stream.reply.tokens == whole.tokens[: len(stream.reply.tokens)]
        self.after(demo, plain)

    def test_cancel_before_the_start(self, demo: Runtime, plain: Callable[..., Reply]) -> None:
        stream = demo.stream(REPEATS, **self.OPTIONS)
        stream.cancel()
        assert list(stream) == []
        assert stream.reply.finish_reason == "cancelled"
        assert stream.reply.tokens == ()
        self.after(demo, plain)

    def test_cancel_after_the_end(self, demo: Runtime, plain: Callable[..., Reply]) -> None:
        stream = demo.stream(REPEATS, **self.OPTIONS)
        for _ in stream:
            pass
        reason = stream.reply.finish_reason
        stream.cancel()
        demo.cancel()
        assert stream.reply.finish_reason == reason
        self.after(demo, plain)

    @pytest.mark.parametrize(
        ("delay", "through"), covering((0.0, 0.001, 0.003, 0.006, 0.01, 0.02, 0.04), ("stream", "runtime"))
    )
    def test_cancel_from_another_thread(
        self, demo: Runtime, plain: Callable[..., Reply], delay: float, through: str
    ) -> None:
        long_prompt = "What does `ls` do? " * 40
        stream = demo.stream(long_prompt, **self.OPTIONS)
        timer = threading.Timer(delay, stream.cancel if through == "stream" else demo.cancel)
        timer.start()
        for _ in stream:
            pass
        timer.join()
        whole = plain(long_prompt, **{n: v for n, v in self.OPTIONS.items() if n != "method"})
        if stream.reply.finish_reason != "cancelled":
            assert stream.reply.tokens == whole.tokens
        assert stream.reply.tokens == whole.tokens[: len(stream.reply.tokens)]
        self.after(demo, plain)
        self.after(demo, plain, long_prompt)

    def test_cancel_does_not_affect_the_next_reply(self, demo: Runtime, plain: Callable[..., Reply]) -> None:
        first = demo.stream(HOWTO, **self.OPTIONS)
        next(first)
        first.close()
        first.cancel()
        self.after(demo, plain)

    def test_stream_that_is_garbage_collected(self, demo: Runtime, plain: Callable[..., Reply]) -> None:
        stream = demo.stream(HOWTO, **self.OPTIONS)
        next(stream)
        del stream
        gc.collect()
        self.after(demo, plain)

    @pytest.mark.parametrize("count", [0, 1, 4])
    def test_closing_a_stream(self, demo: Runtime, plain: Callable[..., Reply], count: int) -> None:
        stream = demo.stream(HOWTO, **self.OPTIONS)
        take(stream, count)
        stream.close()
        stream.close()
        assert list(stream) == []
        assert stream.reply.finish_reason == "cancelled"
        self.after(demo, plain)

    @pytest.mark.long
    def test_cancel_at_many_random_times(self, demo: Runtime, plain: Callable[..., Reply]) -> None:
        for i in range(300):
            stream = demo.stream(REPEATS if i % 2 else "What does `ls` do? " * 30, **self.OPTIONS)
            timer = threading.Timer(0.0004 * (i % 150), stream.cancel)
            timer.start()
            for _ in stream:
                pass
            timer.join()
            self.after(demo, plain)


def test_abandoned_reply_at_exit_prints_nothing() -> None:
    program = (
        "import edgespec\n"
        "runtime = edgespec.load('demo', 'none', context=256, measure_costs=False)\n"
        "stream = runtime.stream('Hello', max_tokens=50)\n"
        "next(stream)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
