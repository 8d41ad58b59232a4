"""Several callers share one runtime through a queue."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from edgespec import QueuedReply, RequestQueue, Runtime
from edgespec.errors import BusyError, CancelledError, ClosedError, EdgespecError, OptionError, TemplateError
from tests.api.questions import HOWTO, REPEATS
from tests.raising import raises

OPTIONS: dict[str, Any] = {"seed": 1, "max_tokens": 24}


@pytest.fixture
def queue(demo: Runtime) -> Iterator[RequestQueue]:
    with RequestQueue(demo, max_waiting=2) as queue:
        yield queue


@pytest.fixture
def hold(demo: Runtime) -> Iterator[threading.Event]:
    """Keep the first request of a test running until the event is set."""
    released = threading.Event()
    yield released
    released.set()


def blocked(queue: RequestQueue, hold: threading.Event) -> QueuedReply:
    """Return a request whose prefill waits for `hold`, once it has started."""
    started = threading.Event()

    def progress(_what: str, _fraction: float) -> bool:
        started.set()
        return hold.wait(60)

    queue._runtime.clear_cache()
    running = queue.stream(HOWTO, progress=progress, **OPTIONS)
    assert started.wait(60)
    return running


def test_replies_equal_those_of_the_runtime(demo: Runtime, queue: RequestQueue) -> None:
    expected = demo.generate(HOWTO, **OPTIONS)
    queued = queue.stream(HOWTO, **OPTIONS)
    assert "".join(chunk.text for chunk in queued) == expected.text
    assert queued.reply.tokens == expected.tokens
    messages = [{"role": "user", "content": HOWTO}]
    assert queue.stream_messages(messages, **OPTIONS).wait().tokens == expected.tokens


def test_requests_run_in_the_order_of_submission(queue: RequestQueue, hold: threading.Event) -> None:
    order: list[int] = []
    first = blocked(queue, hold)

    def note(i: int, _reply: object) -> None:
        order.append(i)

    others = [queue.stream(HOWTO, on_end=partial(note, i), **OPTIONS) for i in range(2)]
    assert queue.waiting == 2
    with raises(EdgespecError, code="reply_unfinished"):
        _ = others[0].reply
    hold.set()
    for queued in (first, *reversed(others)):
        assert queued.wait().tokens
    assert order == [0, 1]
    assert queue.waiting == 0


def test_too_many_requests_raise_busy(queue: RequestQueue, hold: threading.Event) -> None:
    first = blocked(queue, hold)
    second, third = queue.stream(HOWTO, **OPTIONS), queue.stream(REPEATS, **OPTIONS)
    with raises(BusyError, "2 requests", code="queue_full"):
        queue.stream(HOWTO, **OPTIONS)
    hold.set()
    assert all(queued.wait().tokens for queued in (first, second, third))
    assert queue.stream(HOWTO, **OPTIONS).wait().tokens


def test_without_waiting_one_request_runs_at_a_time(demo: Runtime) -> None:
    with RequestQueue(demo, max_waiting=0) as queue:
        for _ in range(5):
            assert queue.stream(HOWTO, **OPTIONS).wait().tokens


def test_a_waiting_request_can_be_cancelled(queue: RequestQueue, hold: threading.Event) -> None:
    first = blocked(queue, hold)
    second, third = queue.stream(HOWTO, **OPTIONS), queue.stream(REPEATS, **OPTIONS)
    second.cancel()
    second.cancel()
    for _ in range(2):
        with raises(CancelledError):
            second.wait()
    assert queue.waiting == 1
    hold.set()
    assert first.wait().tokens
    assert third.wait().tokens


def test_the_running_request_can_be_cancelled(queue: RequestQueue) -> None:
    queued = queue.stream(HOWTO, seed=1, max_tokens=600, temperature=1.2)
    text = next(queued).text
    queued.cancel()
    text += "".join(chunk.text for chunk in queued)
    assert queued.reply.text == text
    assert queued.reply.finish_reason in ("cancelled", "stop")
    assert queue.stream(HOWTO, **OPTIONS).wait().finish_reason != "cancelled"


def test_a_failing_request_does_not_stop_the_next(queue: RequestQueue) -> None:
    failing = queue.stream(HOWTO, system="Be brief.", raw=True)
    following = queue.stream(HOWTO, **OPTIONS)
    with pytest.raises(TemplateError):
        failing.wait()
    assert following.wait().tokens


@pytest.mark.parametrize(
    ("options", "code", "match"),
    [
        ({"temprature": 1}, "option_unknown", "temprature"),
        ({"temperature": -1}, "option_invalid", "temperature"),
        ({"stop": 3}, "option_invalid", "stop"),
        ({"method": "modle"}, "option_invalid", "modle"),
        ({"method": "layerskip"}, "method_unavailable", "layerskip"),
        ({"logit_bias": {1 << 30: 1.0}}, "token_unknown", "vocabulary"),
    ],
)
def test_wrong_options_are_refused_at_once(
    demo: Runtime, queue: RequestQueue, options: dict[str, Any], code: str, match: str
) -> None:
    messages = [{"role": "user", "content": HOWTO}]
    with raises(OptionError, match, code=code):
        demo.stream(HOWTO, **options)
    with raises(OptionError, match, code=code):
        queue.stream(HOWTO, **options)
    with raises(OptionError, match, code=code):
        queue.stream_messages(messages, **options)
    assert queue.waiting == 0


def test_a_direct_reply_makes_a_queued_one_fail(demo: Runtime, queue: RequestQueue) -> None:
    stream = demo.stream(HOWTO, **OPTIONS)
    next(stream)
    with pytest.raises(BusyError):
        queue.stream(HOWTO, **OPTIONS).wait()
    stream.wait()
    assert queue.stream(HOWTO, **OPTIONS).wait().tokens


@pytest.mark.long
def test_callers_in_many_threads_each_get_their_own_reply(demo: Runtime) -> None:
    expected = {prompt: demo.generate(prompt, **OPTIONS).tokens for prompt in (HOWTO, REPEATS)}
    wrong: list[object] = []

    def ask(queue: RequestQueue, prompt: str) -> None:
        for _ in range(4):
            try:
                if queue.stream(prompt, **OPTIONS).wait().tokens != expected[prompt]:
                    wrong.append(prompt)
            except Exception as error:
                wrong.append(error)

    with RequestQueue(demo, max_waiting=4) as queue:
        threads = [threading.Thread(target=ask, args=(queue, prompt)) for prompt in (HOWTO, REPEATS) * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


class TestClosing:
    def test_waiting_requests_end_with_closed_error(self, demo: Runtime, hold: threading.Event) -> None:
        queue = RequestQueue(demo)
        first = blocked(queue, hold)
        second = queue.stream(HOWTO, **OPTIONS)
        closing = threading.Thread(target=queue.close)
        closing.start()
        with raises(ClosedError, "started"):
            second.wait()
        hold.set()
        closing.join(60)
        assert first.wait().finish_reason == "cancelled"
        queue.close()
        with raises(ClosedError, "queue is"):
            queue.stream(HOWTO)
        assert demo.generate(HOWTO, **OPTIONS).tokens

    def test_a_closed_runtime_ends_requests(self, demo: Runtime) -> None:
        import edgespec

        runtime = edgespec.load("demo")
        with RequestQueue(runtime) as queue:
            runtime.close()
            with pytest.raises(ClosedError):
                queue.stream(HOWTO, **OPTIONS).wait()


def test_a_callback_that_exits_does_not_end_the_queue(queue: RequestQueue) -> None:
    def leave(_reply: object) -> None:
        raise SystemExit

    with raises(EdgespecError, "SystemExit"):
        queue.stream(HOWTO, on_end=leave, **OPTIONS).wait()
    assert queue.stream(HOWTO, **OPTIONS).wait().tokens


def test_several_threads_may_wait_for_one_reply(queue: RequestQueue) -> None:
    queued = queue.stream(HOWTO, **OPTIONS)
    threads = [threading.Thread(target=queued.wait, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_later_changes_of_the_list_do_not_reach_a_queued_request(
    demo: Runtime, queue: RequestQueue, hold: threading.Event
) -> None:
    blocked(queue, hold)
    messages = [{"role": "user", "content": HOWTO}]
    queued = queue.stream_messages(messages, **OPTIONS)
    messages.append({"role": "assistant", "content": "later"})
    hold.set()
    assert queued.wait().tokens == demo.generate(HOWTO, **OPTIONS).tokens


@pytest.mark.parametrize("messages", ["hi", None, [None], {"role": "user", "content": "x"}])
def test_messages_that_are_no_list_are_refused(queue: RequestQueue, messages: Any) -> None:
    with pytest.raises(OptionError):
        queue.stream_messages(messages)


@pytest.mark.parametrize("context_full", ["drop", None])
def test_a_wrong_context_full_is_refused(queue: RequestQueue, context_full: Any) -> None:
    with raises(OptionError, "context_full"):
        queue.stream_messages([{"role": "user", "content": HOWTO}], context_full=context_full)


@pytest.mark.parametrize("max_waiting", [-1, None, 1.5])
def test_a_wrong_limit_is_refused(demo: Runtime, max_waiting: Any) -> None:
    with raises(OptionError, "max_waiting"):
        RequestQueue(demo, max_waiting=max_waiting)
