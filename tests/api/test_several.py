"""Several runtimes in threads of one program do not affect each other's replies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import edgespec
from edgespec import Reply, Runtime
from edgespec.errors import ClosedError
from edgespec.methods.auto.controller import ACTIVE_REPLIES
from tests.api.questions import HOWTO, REPEATS, equal
from tests.cases import first

LONG = "What does `ls` do? " * 20
OPTIONS: dict[str, Any] = {"seed": 3, "temperature": 0.8}


@pytest.fixture(scope="module", params=["demo", "demo-mlx-draft"])
def several(request: pytest.FixtureRequest) -> Iterator[list[Runtime]]:
    """Two runtimes of one pair."""
    made = [edgespec.load(request.param) for _ in range(2)]
    yield made
    for runtime in made:
        runtime.close()


@pytest.mark.parametrize("method", first(["auto", "none", "model"]))
def test_concurrent_replies_equal_single_ones(several: list[Runtime], method: str) -> None:
    prompts, options = (HOWTO, REPEATS), {**OPTIONS, "max_tokens": 12}
    alone = [several[0].generate(prompt, method="none", **options) for prompt in prompts]
    begun = threading.Barrier(len(several))

    def ask(runtime: Runtime, prompt: str) -> list[Reply]:
        begun.wait()
        return [runtime.generate(prompt, method=method, **options) for _ in range(2)]

    with ThreadPoolExecutor(len(several)) as pool:
        for got, expected in zip(pool.map(ask, several, prompts), alone, strict=True):
            for reply in got:
                equal(reply, expected)
    assert not ACTIVE_REPLIES


def test_a_cancel_of_one_does_not_touch_another(several: list[Runtime]) -> None:
    expected = several[1].generate(HOWTO, max_tokens=24, method="none", **OPTIONS)
    stream = several[0].stream(LONG, max_tokens=300, **OPTIONS)
    next(stream)
    assert len(ACTIVE_REPLIES) == 1
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(several[1].generate, HOWTO, max_tokens=24, **OPTIONS)
        stream.cancel()
        for _ in stream:
            pass
        equal(other.result(), expected)
    assert stream.reply.finish_reason == "cancelled"
    assert not ACTIVE_REPLIES


def test_auto_reports_concurrent_replies(several: list[Runtime]) -> None:
    with_others = several[0].stream(HOWTO, max_tokens=4, **OPTIONS)
    next(with_others)
    said = several[1].generate(HOWTO, max_tokens=4, method="auto", **OPTIONS).method.reason
    assert said.endswith("(with 2 replies at once)")
    with_others.close()
    assert "at once" not in several[1].generate(HOWTO, max_tokens=4, method="auto", **OPTIONS).method.reason


@pytest.mark.long
@pytest.mark.parametrize("name", ["demo", pytest.param("demo-mlx", marks=pytest.mark.long)])
def test_loading_and_closing_one_while_others_decode(name: str) -> None:
    with edgespec.load(name, method="model") as runtime:
        options: dict[str, Any] = {**OPTIONS, "max_tokens": 8}
        expected = runtime.generate(HOWTO, method="none", **options)
        over = threading.Event()

        def go_on() -> list[Reply]:
            replies = [runtime.generate(HOWTO, **options)]
            while not over.is_set():
                replies.append(runtime.generate(HOWTO, **options))
            return replies

        with ThreadPoolExecutor(1) as pool:
            replies = pool.submit(go_on)
            other = edgespec.load(name, method="model")
            stream = other.stream(LONG, max_tokens=300, **OPTIONS)
            next(stream)
            other.close()
            with pytest.raises(ClosedError):
                list(stream)
            over.set()
            for reply in replies.result():
                equal(reply, expected)
    assert not ACTIVE_REPLIES


@pytest.mark.long
def test_abandoned_reply_is_not_counted() -> None:
    with edgespec.load("demo", "none") as runtime:
        ends: list[Callable[[edgespec.ReplyStream], None]] = [edgespec.ReplyStream.close, _cancel]
        for give_up in ends:
            stream = runtime.stream(HOWTO, max_tokens=40)
            next(stream)
            assert len(ACTIVE_REPLIES) == 1
            give_up(stream)
            assert not ACTIVE_REPLIES


def _cancel(stream: edgespec.ReplyStream) -> None:
    stream.cancel()
    list(stream)
