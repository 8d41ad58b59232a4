"""One reply at a time from any thread, and none after closing."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

import edgespec
from edgespec import Reply, Runtime
from edgespec.errors import BusyError, ClosedError, EdgespecError
from tests.api.questions import HOWTO, REPEATS, equal
from tests.raising import raises


class TestOneAtATime:
    def test_second_reply_raises_busy_and_the_first_continues(
        self, demo: Runtime, plain: Callable[..., Reply]
    ) -> None:
        options: dict[str, Any] = {"seed": 1, "max_tokens": 24}
        first = demo.stream(HOWTO, **options)
        next(first)
        second = demo.stream(REPEATS, **options)
        with pytest.raises(BusyError):
            next(second)
        with raises(EdgespecError, code="reply_unfinished"):
            _ = second.reply
        with pytest.raises(BusyError), demo.borrowed_target():
            pass
        for _ in first:
            pass
        equal(first.reply, plain(HOWTO, **options))

    def test_many_threads(self, demo: Runtime, plain: Callable[..., Reply]) -> None:
        """Each thread gets its own reply or BusyError."""
        options: dict[str, Any] = {"seed": 1, "max_tokens": 16}
        expected = {prompt: plain(prompt, **options).tokens for prompt in (HOWTO, REPEATS)}
        wrong: list[object] = []
        served = threading.Event()

        def ask(prompt: str) -> None:
            for _ in range(6):
                try:
                    if demo.generate(prompt, **options).tokens != expected[prompt]:
                        wrong.append(prompt)
                    served.set()
                except BusyError:
                    pass
                except Exception as error:
                    wrong.append(error)

        threads = [threading.Thread(target=ask, args=[prompt]) for prompt in (HOWTO, REPEATS) * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert served.is_set()

    def test_borrowed_target_leaves_no_state(self, demo: Runtime, plain: Callable[..., Reply]) -> None:
        with demo.borrowed_target() as target:
            target.prefill([5, 6, 7])
            with pytest.raises(BusyError):
                demo.generate(HOWTO)
        equal(demo.generate(HOWTO, seed=1, max_tokens=24), plain(HOWTO, seed=1, max_tokens=24))


class TestClosing:
    def test_use_after_closing_raises(self) -> None:
        runtime = edgespec.load("demo")
        chat = runtime.chat()
        runtime.close()
        runtime.close()
        runtime.cancel()
        for call in (
            lambda: runtime.generate(HOWTO),
            lambda: runtime.stream(HOWTO),
            lambda: runtime.generate(HOWTO, raw=True),
            lambda: runtime.stream_tokens([1, 2]),
            lambda: chat.ask("Hello"),
        ):
            with pytest.raises(ClosedError):
                call()
        assert chat.messages == []
        assert runtime.target.name == "demo"

    def test_closing_during_a_suspended_stream(self) -> None:
        runtime = edgespec.load("demo")
        stream = runtime.stream(HOWTO, max_tokens=64)
        next(stream)
        runtime.close()
        with pytest.raises(ClosedError):
            list(stream)
        stream.close()

    @pytest.mark.long
    def test_closing_while_another_thread_decodes(self) -> None:
        runtime = edgespec.load("demo")
        started = threading.Event()
        ended: list[str] = []

        def work() -> None:
            try:
                for _ in runtime.stream("What does `ls` do? " * 20, max_tokens=600, temperature=1.2):
                    started.set()
                ended.append("done")
            except ClosedError:
                ended.append("closed")

        thread = threading.Thread(target=work)
        thread.start()
        started.wait(60)
        runtime.close()
        thread.join(60)
        assert ended in (["closed"], ["done"])

    @pytest.mark.long
    @pytest.mark.parametrize(
        "delay", [0.03, *(pytest.param(seconds, marks=pytest.mark.long) for seconds in (0.0, 0.06))]
    )
    def test_a_program_may_end_while_a_thread_still_decodes(self, delay: float) -> None:
        code = f"""
import threading, time, edgespec
runtime = edgespec.load("demo")
started = threading.Event()
def work():
    while True:
        stream = runtime.stream("What does `ls` do? " * 40, max_tokens=500, temperature=1.2)
        started.set()
        for _ in stream:
            pass
threading.Thread(target=work, daemon=True).start()
started.wait()
time.sleep({delay})
threading.excepthook = lambda _: None
"""
        done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")

    @pytest.mark.long
    def test_closing_and_loading_repeatedly(self) -> None:
        for _ in range(5):
            with edgespec.load("demo") as runtime:
                assert runtime.generate(HOWTO, max_tokens=2).tokens
