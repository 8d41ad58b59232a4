"""A KeyboardInterrupt between any two calls does not change later replies."""

from __future__ import annotations

import itertools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest

import edgespec
from tests import tables
from tests.backends.mlx.tiny_checkpoints import write_checkpoint

_Result = TypeVar("_Result")


@pytest.fixture(scope="module", params=["MLX", "llama.cpp"])
def runtimes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[edgespec.Runtime, edgespec.Runtime]]:
    """A runtime to interrupt, and one that is not interrupted."""
    if request.param == "MLX":
        folder = tmp_path_factory.mktemp("pair")
        target = str(write_checkpoint(folder / "target", "llama"))
        draft = str(write_checkpoint(folder / "draft", "llama", quantisation=("affine", 4, 32)))
    else:
        target, draft = "demo", "demo-draft"
    with (
        edgespec.load(target, draft, context=400, measure_costs=False) as pair,
        edgespec.load(target, "none", context=400, measure_costs=False) as alone,
    ):
        yield pair, alone


class Interrupted:
    """Raises KeyboardInterrupt at one of the calls that a model or a drafter makes in the `with` block.

    Calls that acquire or release locks are excluded, because Python itself makes interrupts harmless there.
    """

    def __init__(self, countdown: int) -> None:
        self.left = countdown

    def __enter__(self) -> Interrupted:
        sys.setprofile(self._at_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _at_call(self, frame: FrameType, event: str, _argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event not in ("call", "c_call") or path.name == "vocabulary.py":
            return
        if not {"backends", "drafters"} & set(path.parts):
            return
        self.left -= 1
        if self.left == 0:
            sys.setprofile(None)
            raise KeyboardInterrupt


def test_reply_after_an_interrupt_equals_a_fresh_one(
    runtimes: tuple[edgespec.Runtime, edgespec.Runtime],
) -> None:
    pair, alone = runtimes
    chance = random.Random(0)
    history = [chance.randrange(3, 200) for _ in range(40)]
    interrupted = 0
    for attempt in range(10):
        options: dict[str, Any] = {
            "max_tokens": 12,
            "temperature": chance.choice([0.0, 0.8]),
            "seed": attempt,
        }
        stream = pair.stream_tokens(
            history, method=chance.choice(["none", "model", "model+ngram"]), **options
        )
        try:
            with Interrupted(int(2 ** chance.uniform(0, 12))):
                for _ in stream:
                    pass
        except KeyboardInterrupt:
            interrupted += 1
            stream.close()
        history = [*history[: chance.randint(20, 200)], *(chance.randrange(3, 200) for _ in range(20))]
        said = pair.stream_tokens(history, method=chance.choice(["none", "model"]), **options)
        with alone.borrowed_target():
            pass  # it forgets what it has cached
        fresh = alone.stream_tokens(history, method="none", **options)
        assert list(said)
        assert list(fresh)
        assert said.reply.tokens == fresh.reply.tokens
    assert interrupted > 5


class InterruptedEnd(Interrupted):
    """Raises KeyboardInterrupt at one of the calls that begin or end a stream, or right after it.

    Python checks for interrupts when a Python function begins and when a C function returns.
    """

    def _at_call(self, frame: FrameType, event: str, _argument: object) -> None:
        if event not in ("call", "c_return") or not {"api", "decode"} & set(
            Path(frame.f_code.co_filename).parts
        ):
            return
        self.left -= 1
        if self.left == 0:
            sys.setprofile(None)
            raise KeyboardInterrupt


@pytest.mark.parametrize(("step", "parallel"), [("next", 1), ("next", 2), ("close", 1)])
def test_a_stream_can_be_closed_after_an_interrupt(step: str, parallel: int) -> None:
    options: dict[str, Any] = {"method": "suffix", "context": 256, "measure_costs": False, "threads": 1}
    with edgespec.load("demo", "none", parallel=parallel, **options) as runtime:
        for countdown in itertools.count(1):
            stream = runtime.stream_tokens([5, 6, 7], max_tokens=20)
            if step == "close":
                next(stream)
            with suppress(KeyboardInterrupt), InterruptedEnd(countdown) as interrupted:
                if step == "close":
                    stream.close()
                else:
                    next(stream)
            # Close the stream in another thread, so that the test fails rather than hangs if a lock is still
            # held.
            closing = threading.Thread(target=stream.close, daemon=True)
            closing.start()
            closing.join(20)
            assert not closing.is_alive()
            others = [runtime.stream_tokens([5, 6, 7], max_tokens=1) for _ in range(parallel)]
            for each in others:
                next(each)
            for each in others:
                each.close()
            if interrupted.left > 0:
                break
        assert countdown > 10


def test_an_interrupt_while_a_stream_is_garbage_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    # Python reports the interrupt here instead of raising it.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)

    class InterruptedCollection(InterruptedEnd):
        def _at_call(self, frame: FrameType, event: str, argument: object) -> None:
            # If `__del__` is interrupted before its first line, nothing can end the stream.
            if (event, frame.f_code.co_name) != ("call", "__del__"):
                super()._at_call(frame, event, argument)

    with tables.runtime(tables.table(1, end=-50.0)) as runtime:
        for countdown in itertools.count(1):
            stream = runtime.stream_tokens([1, 2, 3], max_tokens=20)
            next(stream)
            with suppress(KeyboardInterrupt), InterruptedCollection(countdown) as interrupted:
                del stream
            assert _next_reply(runtime).finish_reason == "length"
            if interrupted.left > 0:
                break
        assert countdown > 10


class CancelledEnd(InterruptedEnd):
    """Cancels a stream at one of the calls that begin or end it, as a signal handler can."""

    def __init__(self, countdown: int, stream: edgespec.ReplyStream) -> None:
        super().__init__(countdown)
        self._stream = stream

    def _at_call(self, frame: FrameType, event: str, argument: object) -> None:
        try:
            super()._at_call(frame, event, argument)
        except KeyboardInterrupt:
            self._stream.cancel()


@pytest.mark.parametrize("step", ["wait", "close"])
def test_a_signal_handler_cancels_the_stream_that_its_thread_reads(step: str) -> None:
    def read(stream: edgespec.ReplyStream, countdown: int) -> int:
        with CancelledEnd(countdown, stream) as cancelled:
            getattr(stream, step)()
        return cancelled.left

    with tables.runtime(tables.table(1, end=-50.0)) as runtime:
        for countdown in itertools.count(1):
            stream = runtime.stream_tokens([1, 2, 3], max_tokens=3)
            if step == "close":
                next(stream)
            left = _in_thread(partial(read, stream, countdown))
            assert _next_reply(runtime).finish_reason == "length"
            if left > 0:
                break
        assert countdown > 10


def _next_reply(runtime: edgespec.Runtime) -> edgespec.Reply:
    return _in_thread(lambda: runtime.stream_tokens([1, 2, 3], max_tokens=3).wait())


def _in_thread(work: Callable[[], _Result]) -> _Result:
    """Return the result of `work`, or fail if it hangs, for example because a lock is still held."""
    results: list[_Result] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(20)
    assert results
    return results[0]
