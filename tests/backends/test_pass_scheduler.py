"""The scheduler that combines the passes of concurrent replies."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from edgespec.backends.llamacpp.pass_scheduler import PassPart, PassScheduler
from edgespec.errors import CancelledError, ClosedError, ContextFullError

SLOTS, MAX_TOKENS, MAX_ROWS = 3, 16, 8
PASS_SECONDS = 0.05


class Passes:
    """Passes that take some time, and record which parts ran together."""

    def __init__(self) -> None:
        self.ran: list[list[int]] = []
        self.sizes: list[int] = []
        self.started_at: list[float] = []
        self.interrupted = threading.Event()
        self.blocked = threading.Event()
        self.blocked.set()
        self.scheduler = PassScheduler(SLOTS, MAX_TOKENS, MAX_ROWS, self.run, self.set_interrupt)

    def set_interrupt(self, requested: bool) -> None:
        if requested:
            self.interrupted.set()
        else:
            self.interrupted.clear()

    def run(self, parts: Sequence[PassPart]) -> None:
        self.started_at.append(time.perf_counter())
        self.ran.append(sorted(part.slot for part in parts))
        self.sizes.append(sum(len(part.tokens) for part in parts))
        assert self.blocked.wait(60)
        self.interrupted.wait(PASS_SECONDS)
        for part in parts:
            if part.tokens[0] < 0:
                part.error = ContextFullError("the context is full")
            part.rows = np.array([part.tokens], np.float32).T

    def submit(self, slot: int, tokens: Sequence[int] = (1,), needs_logits: bool = True) -> PassPart:
        count = len(tokens)
        return self.scheduler.run(PassPart(slot, tokens, range(count), [[slot]] * count, needs_logits))


@pytest.fixture
def passes() -> Iterator[Passes]:
    made = Passes()
    yield made
    made.blocked.set()
    made.scheduler.close()


def test_replies_share_their_passes(passes: Passes) -> None:
    def generate(slot: int) -> list[float]:
        return [float(passes.submit(slot, [10 * slot + i]).rows[0, 0]) for i in range(20)]

    with ThreadPoolExecutor() as pool:
        replies = list(pool.map(generate, range(SLOTS)))
    assert replies == [[10 * slot + i for i in range(20)] for slot in range(SLOTS)]
    # Replies can miss each other's passes at the beginning.
    assert passes.ran.count([0, 1, 2]) >= 15


def test_a_pass_knows_how_many_tokens_it_has(passes: Passes) -> None:
    passes.blocked.clear()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(passes.submit, 2)
        wait_until(lambda: bool(passes.ran))
        others = [pool.submit(passes.submit, slot, [1] * (2 + slot)) for slot in range(2)]
        wait_until(lambda: len(passes.scheduler._waiting) == 2)
        passes.blocked.set()
        assert first.result().pass_tokens == 1
        assert [other.result().pass_tokens for other in others] == [5, 5]


def test_passes_stay_within_their_limits(passes: Passes) -> None:
    passes.blocked.clear()
    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(passes.submit, 0)]
        wait_until(lambda: bool(passes.ran))
        futures.append(pool.submit(passes.submit, 1, [1] * MAX_TOKENS, False))
        wait_until(lambda: len(passes.scheduler._waiting) == 1)
        futures.append(pool.submit(passes.submit, 2, [1] * MAX_ROWS))
        wait_until(lambda: len(passes.scheduler._waiting) == 2)
        passes.blocked.set()
        for future in futures:
            future.result()
    assert passes.sizes == [1, MAX_TOKENS, MAX_ROWS]


def test_a_reply_that_nobody_reads_is_waited_for_once(passes: Passes) -> None:
    with ThreadPoolExecutor() as pool:
        list(pool.map(passes.submit, range(2)))
    requested_at = []
    for _ in range(10):
        requested_at.append(time.perf_counter())
        passes.submit(0)
    assert passes.ran[-10:] == [[0]] * 10
    waits = [start - request for start, request in zip(passes.started_at[-10:], requested_at, strict=True)]
    # A few passes can start late on a busy machine.
    assert statistics.median(waits) < PASS_SECONDS / 2


def test_a_failed_part_raises_its_own_error(passes: Passes) -> None:
    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(passes.submit, slot, [-1 if slot == 1 else 1]) for slot in range(SLOTS)]
        with pytest.raises(ContextFullError):
            futures[1].result()
        assert futures[0].result().rows[0, 0] == futures[2].result().rows[0, 0] == 1


def test_cancelling_a_waiting_reply_returns_at_once(passes: Passes) -> None:
    passes.blocked.clear()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(passes.submit, 0)
        wait_until(lambda: bool(passes.ran))
        second = pool.submit(passes.submit, 1)
        wait_until(lambda: bool(passes.scheduler._waiting))
        passes.scheduler.cancel(1, True)
        with pytest.raises(CancelledError):
            second.result(5)
        passes.blocked.set()
        assert first.result().rows[0, 0] == 1
    with pytest.raises(CancelledError):
        passes.submit(1)
    passes.scheduler.cancel(1, False)
    assert passes.submit(1).rows[0, 0] == 1


def test_a_pass_is_interrupted_when_all_its_replies_are_cancelled(passes: Passes) -> None:
    passes.blocked.clear()
    with ThreadPoolExecutor() as pool:
        blocker = pool.submit(passes.submit, 2)
        wait_until(lambda: bool(passes.ran))
        futures: list[Future[PassPart]] = [pool.submit(passes.submit, slot) for slot in range(2)]
        wait_until(lambda: len(passes.scheduler._waiting) == 2)
        passes.blocked.set()
        blocker.result()
        passes.blocked.clear()
        wait_until(lambda: len(passes.ran) == 2)
        passes.scheduler.cancel(0, True)
        assert not passes.interrupted.is_set()
        passes.scheduler.cancel(1, True)
        assert passes.interrupted.is_set()
        passes.blocked.set()
        for future in futures:
            with pytest.raises(CancelledError):
                future.result()


def test_an_unexpected_error_reaches_every_reply(passes: Passes) -> None:
    def fail(_parts: Sequence[PassPart]) -> None:
        raise ZeroDivisionError

    passes.scheduler._run = fail
    with pytest.raises(Exception, match="forward pass failed"):
        passes.submit(0)


def test_closing_ends_waiting_requests(passes: Passes) -> None:
    passes.blocked.clear()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(passes.submit, 0)
        wait_until(lambda: bool(passes.ran))
        second = pool.submit(passes.submit, 1)
        wait_until(lambda: bool(passes.scheduler._waiting))
        closing = pool.submit(passes.scheduler.close)
        wait_until(lambda: passes.scheduler._closed)
        passes.blocked.set()
        closing.result(5)
        assert first.result().rows[0, 0] == 1
        with pytest.raises(ClosedError):
            second.result()
    with pytest.raises(ClosedError):
        passes.submit(0)


def wait_until(condition: object, seconds: float = 10.0) -> None:
    """Wait until `condition()` returns True."""
    deadline = time.perf_counter() + seconds
    while not condition():  # type: ignore[operator]
        assert time.perf_counter() < deadline
        time.sleep(0.001)
