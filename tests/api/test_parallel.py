"""A runtime that generates several replies at once (`parallel`)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

import edgespec
from edgespec import Reply, RequestQueue, Runtime
from edgespec.api.loading import always_draft
from edgespec.engine.processors import Candidates, LogitsProcessor
from edgespec.engine.sampling_params import SamplingParams
from edgespec.errors import BusyError, ClosedError, ContextFullError, OptionError
from edgespec.losslessness.replay import logit_rows
from edgespec.methods.auto.controller import ACTIVE_REPLIES
from tests.api.questions import HOWTO, REPEATS
from tests.cases import covering
from tests.near_ties import score_gap
from tests.raising import raises

PLACES = 3
METHODS = ("none", "model", "suffix", "ngram", "model+suffix", "lookahead", "eagle", "eagle+suffix", "auto")
PROMPTS = (HOWTO, REPEATS, "Count to ten, then count to ten again.", "Write a poem about `tar`.")
LONG = "What does `ls` do? " * 40
# Attention adds up a text's cells in memory order, which depends on the other replies. This changes the demo
# model's logits by up to 0.12.
ROUNDING = 0.25


@pytest.fixture(scope="module")
def alone() -> Iterator[Runtime]:
    with edgespec.load("demo", context=1024) as runtime:
        yield runtime


@pytest.fixture(scope="module", params=[(), (3, 2)], ids=["chains", "trees"])
def many(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    methods = [method for method in METHODS if method != "lookahead" or not request.param]
    with (
        always_draft(),
        edgespec.load(
            "demo",
            context=1024,
            parallel=PLACES,
            methods=methods,
            draft_branches=request.param,
            head="demo-head",
        ) as runtime,
    ):
        yield runtime


@pytest.fixture(scope="module")
def pair() -> Iterator[Runtime]:
    with edgespec.load("demo", context=1024, parallel=2) as runtime:
        yield runtime


def tokens_of(runtime: Runtime, text: str) -> list[int]:
    return runtime.vocabulary.tokenize(text, special=False, start=True)


def check_equal(
    alone: Runtime, prompt: Sequence[int], got: Reply, expected: Reply, temperature: float
) -> None:
    """Assert equal tokens up to a near-tie."""
    different = (i for i, (a, b) in enumerate(zip(got.tokens, expected.tokens, strict=False)) if a != b)
    first = next(different, None)
    if first is None:
        assert got.tokens == expected.tokens
        return
    common = expected.tokens[:first]
    with alone.borrowed_target() as target:
        row = logit_rows(target, prompt, common)[-1]
    params, history = SamplingParams(temperature=temperature), [*prompt, *common]
    gap = score_gap(row, params, got.seed, history, expected.tokens[first], got.tokens[first])
    assert gap <= 2 * ROUNDING, f"the replies differ at token {first}"


@pytest.mark.parametrize(("method", "temperature"), covering(METHODS, (0.0, 0.8)))
def test_concurrent_replies_equal_single_ones(
    alone: Runtime, many: Runtime, method: str, temperature: float
) -> None:
    if method == "lookahead" and "lookahead" not in many.drafters:
        pytest.skip("lookahead chooses its own branches")
    options: dict[str, Any] = {"seed": 1, "max_tokens": 20, "temperature": temperature}
    prompts = [tokens_of(alone, text) for text in PROMPTS]
    expected = [alone.stream_tokens(prompt, method="none", **options).wait() for prompt in prompts]
    many.clear_cache()

    def ask(prompt: Sequence[int]) -> Reply:
        return many.stream_tokens(prompt, method=method, **options).wait()

    with ThreadPoolExecutor(PLACES) as pool:
        replies = list(pool.map(ask, prompts))
    for prompt, reply, plain in zip(prompts, replies, expected, strict=True):
        check_equal(alone, prompt, reply, plain, temperature)
    drafted = sum(reply.stats.drafted_tokens for reply in replies)
    assert bool(drafted) == (method != "none")
    assert not ACTIVE_REPLIES


def test_a_further_reply_raises_busy(pair: Runtime) -> None:
    assert pair.parallel == 2
    first, second = pair.stream(HOWTO, max_tokens=8), pair.stream(REPEATS, max_tokens=8)
    next(first), next(second)
    with raises(BusyError, "2 other"):
        pair.generate(HOWTO, max_tokens=2)
    with pytest.raises(BusyError):
        pair.clear_cache()
    first.wait()
    assert pair.generate(HOWTO, max_tokens=2).tokens
    second.wait()


def test_a_caller_that_pauses_does_not_delay_the_others(pair: Runtime) -> None:
    paused = pair.stream(HOWTO, max_tokens=8, seed=1)
    next(paused)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(pair.generate, REPEATS, max_tokens=40).result(30).tokens
    assert paused.wait().tokens


@pytest.mark.long
def test_a_reply_continues_in_the_place_with_its_prefix(pair: Runtime) -> None:
    pair.clear_cache()
    prompts = [tokens_of(pair, text) for text in (LONG, REPEATS * 10)]
    streams = [pair.stream_tokens(prompt, max_tokens=4, method="none") for prompt in prompts]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda stream: stream.wait(), streams))
    for prompt in (*prompts, *reversed(prompts)):
        reply = pair.stream_tokens(prompt, max_tokens=4, method="none").wait()
        assert reply.stats.cached_prompt_tokens == len(prompt) - 1


@pytest.mark.long
def test_a_prefix_of_one_place_is_restored_in_another(pair: Runtime) -> None:
    pair.clear_cache()
    prompt = tokens_of(pair, LONG)
    expected = pair.stream_tokens(prompt, max_tokens=6, seed=1, method="none").wait()
    for other in (REPEATS * 12, "Tell me about `tar`. " * 40, HOWTO * 30):
        pair.generate(other, raw=True, max_tokens=2, method="none")
    holder = pair.stream_tokens(tokens_of(pair, HOWTO), max_tokens=30, method="none")
    next(holder)
    reply = pair.stream_tokens(prompt, max_tokens=6, seed=1, method="none").wait()
    holder.wait()
    assert reply.tokens == expected.tokens
    assert pair.memory().prefix_cache.hits >= 1


class Failing(LogitsProcessor):
    """Fails at the third token."""

    def __init__(self) -> None:
        self._count = 0

    def apply(self, candidates: Candidates) -> Candidates:
        if self._count == 3:
            raise RuntimeError("this processor is broken")
        return candidates

    def push(self, token: int) -> None:
        self._count += 1

    def pop(self, count: int) -> None:
        self._count -= count


def test_a_failing_reply_does_not_affect_the_others(alone: Runtime, pair: Runtime) -> None:
    options: dict[str, Any] = {"seed": 2, "max_tokens": 60, "method": "none", "temperature": 0.0}
    prompt = tokens_of(pair, REPEATS)
    expected = alone.stream_tokens(prompt, **options).wait()
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(lambda: pair.stream_tokens(prompt, **options).wait())
        for _ in range(3):
            with pytest.raises(RuntimeError, match="broken"):
                pair.generate(HOWTO, processors=[Failing()], max_tokens=20, method="none")
        check_equal(alone, prompt, other.result(), expected, 0.0)
    assert not ACTIVE_REPLIES


def test_cancelling_one_reply_keeps_the_other(alone: Runtime, pair: Runtime) -> None:
    options: dict[str, Any] = {"seed": 3, "max_tokens": 60, "temperature": 0.8}
    prompt = tokens_of(pair, REPEATS)
    expected = alone.stream_tokens(prompt, method="none", **options).wait()
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(lambda: pair.stream_tokens(prompt, method="model", **options).wait())
        stream = pair.stream(LONG, max_tokens=300)
        next(stream)
        stream.cancel()
        assert stream.wait().finish_reason == "cancelled"
        check_equal(alone, prompt, other.result(), expected, 0.8)


@pytest.mark.long
def test_a_context_that_is_full_ends_only_its_own_reply(alone: Runtime, pair: Runtime) -> None:
    text = "Tell me about `tar`. " * 200
    with pytest.raises(ContextFullError):
        pair.generate(text, raw=True)
    forever = {token: -100.0 for token in range(pair.target.vocab_size) if pair.vocabulary.is_end(token)}
    prompt, other = tokens_of(pair, text)[:1000], tokens_of(pair, HOWTO)
    options: dict[str, Any] = {"seed": 1, "max_tokens": 60, "logit_bias": forever}
    with ThreadPoolExecutor(2) as pool:
        replies = list(
            pool.map(
                lambda tokens: pair.stream_tokens(tokens, method="model", **options).wait(), (prompt, other)
            )
        )
    assert [len(reply.tokens) for reply in replies] == [25, 60]
    assert replies[0].finish_reason == "length"


def test_the_queue_runs_as_many_replies_as_there_are_sessions(pair: Runtime) -> None:
    running = threading.Barrier(2)
    pair.clear_cache()

    def meet(_what: str, _fraction: float) -> bool:
        running.wait(60)
        return True

    with RequestQueue(pair, max_waiting=1) as queue:
        queued = [
            queue.stream(text, progress=meet, max_tokens=4, raw=True) for text in ("one two", "three four")
        ]
        third = queue.stream(HOWTO, max_tokens=4)
        with raises(BusyError, "1 requests", code="queue_full"):
            queue.stream(HOWTO, max_tokens=4)
        assert all(reply.wait().tokens for reply in (*queued, third))


def test_closing_during_replies() -> None:
    runtime = edgespec.load("demo", context=512, parallel=2)
    with RequestQueue(runtime) as queue:
        endless = {
            token: -100.0 for token in range(runtime.target.vocab_size) if runtime.vocabulary.is_end(token)
        }
        queued = [
            queue.stream(text, max_tokens=400, logit_bias=endless, method="none")
            for text in (HOWTO, REPEATS, HOWTO)
        ]
        next(queued[0])
        next(queued[1])
        runtime.close()
        for running in queued[:2]:
            with suppress(ClosedError):
                assert running.wait().finish_reason == "cancelled"
        with pytest.raises(ClosedError):
            queued[2].wait()
    with pytest.raises(ClosedError):
        runtime.generate(HOWTO)
    assert not ACTIVE_REPLIES


@pytest.mark.long
@pytest.mark.parametrize(
    ("target", "options", "reason"),
    [
        ("demo-mlx-draft", {"draft": "none"}, "MLX generates one reply at a time"),
        ("demo", {"exact": True}, "--exact"),
        ("demo", {"draft": "demo-mlx-draft"}, "MLX generates one reply at a time"),
    ],
)
def test_replies_that_cannot_share_passes_run_in_turns(
    target: str, options: dict[str, Any], reason: str
) -> None:
    with edgespec.load(target, parallel=2, context=256, measure_costs=False, **options) as runtime:
        assert runtime.parallel == 1
        assert "replies run one after the other" in runtime.target.notice
        assert reason in runtime.target.notice
        with RequestQueue(runtime) as queue:
            assert all(queue.stream(text, max_tokens=4).wait().tokens for text in (HOWTO, REPEATS))


def test_the_plan_counts_all_contexts(pair: Runtime) -> None:
    one = edgespec.plan("demo", context=1024, reserve_full_context=True).plan
    two = edgespec.plan("demo", context=1024, parallel=2).plan

    def cache_bytes(plan: edgespec.MemoryPlan) -> int:
        return sum(item.bytes for item in plan.items if item.kind == "cache")

    assert two.context_tokens == one.context_tokens == pair.context_tokens == 1024
    assert cache_bytes(two) == 2 * cache_bytes(one) == pair.memory().kv_bytes


def test_the_plan_counts_the_cache_of_a_head_for_each_reply() -> None:
    def cache_bytes(parallel: int) -> int:
        plan = edgespec.plan("demo", parallel=parallel, context=256, head="demo-head").plan
        return sum(item.bytes for item in plan.items if item.name == "head cache")

    assert cache_bytes(3) == 3 * cache_bytes(1) > 0


def test_a_prefix_of_one_place_is_restored_in_another_with_the_state_of_the_head() -> None:
    options: dict[str, Any] = {"draft": "none", "head": "demo-head", "method": "eagle"}
    with always_draft(), edgespec.load("demo", context=1024, parallel=2, **options) as pair:
        prompt = tokens_of(pair, LONG)
        first = pair.stream_tokens(prompt, max_tokens=20, seed=1).wait()
        # The other replies evict the prompt from both places, and the last one takes its place.
        for other in (REPEATS * 12, "Tell me about `tar`. " * 40, HOWTO * 30):
            pair.generate(other, raw=True, max_tokens=2)
        holder = pair.stream_tokens(tokens_of(pair, HOWTO), max_tokens=30)
        next(holder)
        again = pair.stream_tokens(prompt, max_tokens=20, seed=1).wait()
        holder.wait()
        assert again.stats.cached_prompt_tokens > first.stats.cached_prompt_tokens
        assert again.tokens == first.tokens
        assert again.stats.accepted_tokens == first.stats.accepted_tokens > 0


ANOTHER = "choose another method, such as model or suffix"


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "command"),
    [
        ("lowbit", "edgespec prepare lowbit demo"),
        ("layerskip", "edgespec prepare layerskip demo"),
    ],
)
def test_methods_that_draft_on_the_targets_cache_are_refused(
    pair: Runtime, method: str, command: str
) -> None:
    """The first refusal says everything that the method needs."""
    why = f"{method} cannot draft for several replies at once, as --parallel requires"
    reason = f"method '{method}' cannot be used: {why}"
    preparation = f" and run `{command}` once" if command else ""
    with pytest.raises(OptionError) as caught:
        edgespec.load("demo", parallel=2, context=256, method=method)
    assert caught.value.what == reason
    assert caught.value.next_step == f"{ANOTHER}, or omit --parallel{preparation}"
    with pytest.raises(OptionError) as caught:
        pair.generate(HOWTO, method=method)
    assert caught.value.what == reason
    alone = f"load the model with --method {method} and --parallel 1"
    assert caught.value.next_step == f"{ANOTHER}, or {alone}{preparation}"


@pytest.mark.long
def test_methods_that_draft_on_the_targets_cache_work_in_turns() -> None:
    with edgespec.load(
        "demo-mlx-draft", parallel=2, context=256, method="layerskip", exit_layer=1, exactness="off"
    ) as runtime:
        assert runtime.parallel == 1
        assert runtime.generate(HOWTO, max_tokens=4).method.effective == "layerskip"
