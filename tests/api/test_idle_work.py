"""Drafters run idle work between replies, which never changes the tokens of a reply."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from edgespec import Runtime
from edgespec.decode import idle
from edgespec.decode.session import Session
from edgespec.errors import BackendError, CancelledError
from edgespec.methods.auto.combined_drafter import CombinedDrafter
from tests.tables import PROMPT, Saying, table, with_drafter
from tests.tables import runtime as tabular_runtime

SECONDS = 10.0


class IdleDrafter(Saying):
    """Runs idle work in steps and records them."""

    has_idle_work = True

    def __init__(self, name: str = "saying") -> None:
        super().__init__(lambda tokens, length: [1] * length)
        self.name = name
        self.steps = 0
        self.started, self.finished = threading.Event(), threading.Event()
        self.step: Callable[[], None] = lambda: None
        self.threads: set[int] = set()

    def run_idle_work(self, should_continue: Callable[[], bool]) -> None:
        self.threads.add(threading.get_ident())
        while should_continue():
            self.step()
            self.steps += 1
            time.sleep(0.001)
            self.started.set()
        self.finished.set()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "QUIET_SECONDS", 0.0)


@pytest.fixture
def drafter() -> IdleDrafter:
    return IdleDrafter()


@pytest.fixture
def runtime(drafter: IdleDrafter) -> Iterator[Runtime]:
    with with_drafter(table(1), drafter) as made:
        yield made


@pytest.fixture(autouse=True)
def earlier_threads() -> Iterator[None]:
    """Remember the idle threads of earlier tests, which end some time after their models are closed."""
    EARLIER.update(threading.enumerate())
    yield
    EARLIER.clear()


EARLIER: set[threading.Thread] = set()


def idle_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "edgespec-idle" and each not in EARLIER]


class TestWhenItRuns:
    def test_between_two_replies(self, runtime: Runtime, drafter: IdleDrafter) -> None:
        expected = runtime.generate(PROMPT, method="none", seed=1, max_tokens=20).tokens
        assert not idle_threads()
        assert runtime.generate(PROMPT, seed=1, max_tokens=20).tokens == expected
        assert drafter.started.wait(SECONDS)
        stream = runtime.stream(PROMPT, seed=1, max_tokens=20)
        next(stream)
        assert drafter.finished.wait(SECONDS)
        steps = drafter.steps
        for _ in stream:
            assert drafter.steps == steps
        assert stream.reply.tokens == expected
        assert threading.get_ident() not in drafter.threads

    def test_not_after_a_reply_without_drafts(self, runtime: Runtime, drafter: IdleDrafter) -> None:
        runtime.generate(PROMPT, max_tokens=4)
        assert drafter.started.wait(SECONDS)
        runtime.generate(PROMPT, max_tokens=4, method="none")
        assert drafter.finished.wait(SECONDS)
        steps = drafter.steps
        runtime.run_idle_work(lambda: True)
        assert drafter.steps == steps

    def test_not_while_the_target_is_borrowed_or_afterwards(
        self, runtime: Runtime, drafter: IdleDrafter
    ) -> None:
        runtime.generate(PROMPT, max_tokens=4)
        assert drafter.started.wait(SECONDS)
        with runtime.borrowed_target():
            assert drafter.finished.wait(SECONDS)
            steps = drafter.steps
        runtime.run_idle_work(lambda: True)
        assert drafter.steps == steps

    def test_cancel_ends_it(self, runtime: Runtime, drafter: IdleDrafter) -> None:
        runtime.generate(PROMPT, max_tokens=4)
        assert drafter.started.wait(SECONDS)
        runtime.cancel()
        assert drafter.finished.wait(SECONDS)

    def test_close_ends_it_and_joins_the_thread(self, runtime: Runtime, drafter: IdleDrafter) -> None:
        runtime.generate(PROMPT, max_tokens=4)
        assert drafter.started.wait(SECONDS)
        runtime.close()
        assert drafter.finished.is_set()
        assert not idle_threads()

    def test_the_next_reply_reuses_the_prompt(self, runtime: Runtime, drafter: IdleDrafter) -> None:
        runtime.generate(PROMPT, max_tokens=4)
        assert drafter.started.wait(SECONDS)
        again = runtime.generate(PROMPT, max_tokens=4)
        assert again.stats.cached_prompt_tokens == again.stats.prompt_tokens - 1

    def test_no_thread_without_idle_work(self) -> None:
        with with_drafter(table(1), Saying(lambda tokens, length: [1] * length)) as runtime:
            runtime.generate(PROMPT, max_tokens=4)
            assert not idle_threads()

    def test_not_between_replies_in_quick_succession(
        self, runtime: Runtime, drafter: IdleDrafter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(idle, "QUIET_SECONDS", 60.0)
        for _ in range(3):
            runtime.generate(PROMPT, max_tokens=4)
        runtime.close()
        assert drafter.steps == 0


class TestFailures:
    def test_a_failure_is_reported_and_ends_only_idle_work(
        self, runtime: Runtime, drafter: IdleDrafter
    ) -> None:
        def fail() -> None:
            runtime._session.target.truncate(0)
            raise BackendError("the card has left", "look for it")

        expected = runtime.generate(PROMPT, method="none", seed=1, max_tokens=20).tokens
        drafter.step = fail
        runtime.generate(PROMPT, seed=1, max_tokens=20)
        runtime.run_idle_work(lambda: True)
        assert runtime._session.report().note == "saying stopped learning: the card has left"
        drafter.step = lambda: None
        again = runtime.generate(PROMPT, seed=1, max_tokens=20)
        assert again.tokens == expected
        runtime.run_idle_work(lambda: True)
        assert drafter.steps == 0

    def test_unexpected_errors_are_reported(self, runtime: Runtime, drafter: IdleDrafter) -> None:
        def fail() -> None:
            raise ZeroDivisionError("one\ntwo")

        drafter.step = fail
        runtime.generate(PROMPT, max_tokens=4)
        runtime.run_idle_work(lambda: True)
        assert runtime._session.report().note == "saying stopped learning: ZeroDivisionError: one two"

    def test_a_cancelled_step_is_not_a_failure(self, runtime: Runtime, drafter: IdleDrafter) -> None:
        def cancelled() -> None:
            raise CancelledError("cancelled")

        drafter.step = cancelled
        runtime.generate(PROMPT, max_tokens=4)
        runtime.run_idle_work(lambda: True)
        assert runtime._session.report().note == ""

    def test_one_drafter_fails_and_the_others_continue(self) -> None:
        one, other = IdleDrafter("one"), IdleDrafter("other")

        def fail() -> None:
            raise BackendError("no")

        one.step = fail
        both = CombinedDrafter([one, other, Saying(lambda tokens, length: [2])])
        with with_drafter(table(1), both) as runtime:
            runtime.generate(PROMPT, max_tokens=4)
            assert other.started.wait(SECONDS)
            assert "one stopped learning: no" in runtime._session.report().note

    def test_cache_lost_in_idle_work_is_recomputed(self, runtime: Runtime, drafter: IdleDrafter) -> None:
        def lose() -> None:
            runtime._session.target.truncate(2)

        drafter.step = lose
        expected = runtime.generate(PROMPT, seed=1, max_tokens=20).tokens
        assert drafter.started.wait(SECONDS)
        again = runtime.generate(PROMPT * 3, seed=1, max_tokens=20)
        assert again.stats.cached_prompt_tokens <= 2
        assert runtime.generate(PROMPT, seed=1, max_tokens=20).tokens == expected


def test_no_step_runs_during_a_reply(runtime: Runtime, drafter: IdleDrafter) -> None:
    expected = runtime.generate(PROMPT, method="none", seed=1, max_tokens=12).tokens
    session: Session = runtime._session
    wrong: list[object] = []

    def watch() -> None:
        if session._active_request is not None and not session._compute_lock.locked():
            wrong.append("a step without the lock")

    drafter.step = watch
    for _ in range(60):
        assert runtime.generate(PROMPT, seed=1, max_tokens=12).tokens == expected
    assert not wrong


def test_idle_work_during_a_reply_does_not_forget_its_tokens() -> None:
    with tabular_runtime(table(1, end=-50.0)) as runtime:
        stream = runtime.stream_tokens([0, 1, 2], method="none", seed=1, max_tokens=20)
        next(stream)
        runtime.run_idle_work(lambda: True)
        runtime._session._read_reply(lambda: True)
        text = [0, 1, 2, *stream.wait().tokens]
        again = runtime.stream_tokens([*text, 0], method="none", max_tokens=1).wait()
        assert again.stats.cached_prompt_tokens == len(text) - 1


def test_a_reply_that_is_cancelled_while_its_drafter_is_chosen_ends_as_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object) -> None:
        raise CancelledError("the measurement was cancelled")

    with tabular_runtime(table(1, end=-50.0)) as runtime:
        expected = runtime.stream_tokens([0, 1, 2], method="none", seed=1, max_tokens=8).wait().tokens
        with monkeypatch.context() as patch:
            patch.setattr(runtime._session.drafters, "choose", interrupted)
            reply = runtime.stream_tokens([0, 1, 2], method="none", seed=1, max_tokens=8).wait()
        assert (reply.finish_reason, reply.tokens) == ("cancelled", ())
        assert runtime.stream_tokens([0, 1, 2], method="none", seed=1, max_tokens=8).wait().tokens == expected
