"""Contexts that grow during replies give the tokens of plain decoding in a full context."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import edgespec
from edgespec import Reply, Runtime
from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.backends.llamacpp.context_plan import ContextPlan
from edgespec.backends.llamacpp.model import LlamaCppModel
from edgespec.errors import ContextFullError, MemoryBudgetError
from edgespec.loading.prepare.layerskip import prepare_layerskip
from edgespec.loading.prepare.lowbit import prepare_lowbit
from edgespec.memory.budget import Budget
from edgespec.memory.context_resize import ResizableContext, has_room_to_resize
from edgespec.memory.plan import Item, MemoryPlan
from edgespec.store.catalogue import models_folder
from tests.backends.tiny_models import write_gemma2, write_jamba, write_llama
from tests.raising import raises
from tests.tabular import TabularModel

FIRST = 256
PROMPT = [(7 * i * i + 11) % 250 + 5 for i in range(120)] * 2
SHORT = 40
# Over the end of two contexts.
TWICE: dict[str, Any] = {"context": 1024, "max_tokens": 300}


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make contexts start smaller, so that a short reply makes them grow."""
    monkeypatch.setattr("edgespec.loading.load_request.INITIAL_CONTEXT_TOKENS", FIRST)
    for module in ("memory.context_resize", "decode.session"):
        monkeypatch.setattr(f"edgespec.{module}.MIN_ROOM_TOKENS", 16)


def ended(runtime: Runtime, prompt: list[int], **options: Any) -> Reply:
    """A reply without an end-of-sequence token."""
    vocabulary = runtime.vocabulary
    never = {token: -math.inf for token in range(vocabulary.size) if vocabulary.is_end(token)}
    stream = runtime.stream_tokens(prompt, **{"max_tokens": SHORT, "seed": 3, "logit_bias": never, **options})
    for _ in stream:
        pass
    return stream.reply


def check_same(
    target: str,
    draft: str | None,
    methods: tuple[str, ...],
    *,
    context: int = 2 * FIRST,
    max_tokens: int = SHORT,
    **options: Any,
) -> None:
    """Compare replies during context growth with plain decoding in a full context."""
    plain = {}
    options |= {"context": context}
    with edgespec.load(target, None, reserve_full_context=True, **options) as whole:
        assert whole.target.context_tokens == whole.context_tokens == context
        for temperature in (0.0, 0.8):
            how = {"temperature": temperature, "max_tokens": max_tokens}
            reply = ended(whole, PROMPT, method="none", **how)
            assert reply.stats.growth_seconds == 0.0
            plain[temperature] = reply.tokens
    for method in methods:
        with edgespec.load(target, draft, method=method, **options) as runtime:
            assert (runtime.target.context_tokens, runtime.context_tokens) == (FIRST, context)
            before = runtime.target.kv_bytes
            for temperature, tokens in plain.items():
                how = {"temperature": temperature, "max_tokens": max_tokens}
                reply = ended(runtime, PROMPT, method=method, **how)
                assert reply.tokens == tokens
                assert (reply.stats.growth_seconds > 0.0) == (temperature == 0.0)
            assert runtime.target.context_tokens == context
            assert runtime.target.kv_bytes > before
            if runtime.draft:
                assert runtime.draft.context_tokens == context


class TestTheSameTokens:
    @pytest.mark.long
    def test_the_demo(self) -> None:
        check_same("demo", "demo-draft", ("auto",))

    @pytest.mark.long
    def test_the_demo_by_named_drafters(self) -> None:
        check_same("demo", "demo-draft", ("none", "model", "suffix", "lookahead", "auto"), **TWICE)

    @pytest.mark.long
    @pytest.mark.parametrize(
        "write",
        [
            pytest.param(write_llama, marks=pytest.mark.long),
            pytest.param(write_gemma2, marks=pytest.mark.long),
            write_jamba,
        ],
    )
    def test_other_memories(self, write: Any, tmp_path: Path) -> None:
        target, draft = write(tmp_path / "target.gguf"), write(tmp_path / "draft.gguf", seed=1)
        check_same(str(target), str(draft), ("suffix", "model"))

    @pytest.mark.long
    def test_quantised_keys_and_values(self) -> None:
        check_same("demo", "demo-draft", ("none", "model", "auto"), kv_type="q8_0", **TWICE)

    @pytest.mark.long
    def test_the_layers_below_and_a_copy_with_fewer_bits(self, tmp_path: Path) -> None:
        path = write_llama(tmp_path / "model.gguf", layers=3)
        halves = str(prepare_layerskip(path, 1, to=tmp_path / "halves").folder)
        prepare_lowbit(path, "Q4_0")
        check_same(str(path), None, ("lowbit", "lowbit+suffix"))
        check_same(halves, None, ("layerskip",))

    @pytest.mark.long
    def test_the_demo_in_halves(self, tmp_path: Path) -> None:
        path = models_folder() / "demo-target-q8_0.gguf"
        halves = prepare_layerskip(path, 4, to=tmp_path / "halves").folder
        check_same(str(halves), None, ("none", "layerskip", "layerskip+suffix", "auto"), **TWICE)


@pytest.mark.long
def test_an_mlx_draft_grows_by_itself() -> None:
    with edgespec.load("demo", "demo-mlx-draft", context=1024, method="model") as runtime:
        assert runtime.draft is not None
        assert (runtime.target.context_tokens, runtime.draft.context_tokens) == (FIRST, 1024)
        assert ended(runtime, PROMPT, max_tokens=40).stats.drafted_tokens > 40
        assert runtime.target.context_tokens == 512


@pytest.mark.long
def test_sliding_window_cache_starts_at_full_size() -> None:
    with edgespec.load("demo", "demo-draft", context=1024, draft_window=512) as runtime:
        assert runtime.draft is not None
        assert runtime.draft.context_tokens == 1024
        assert ended(runtime, PROMPT, max_tokens=40, method="model").stats.drafted_tokens > 40
        assert runtime.target.context_tokens == 512


@pytest.mark.long
def test_cache_hit_of_a_longer_prompt_grows_the_context() -> None:
    other = [(5 * i + 9) % 200 + 5 for i in range(40)]
    with (
        edgespec.load("demo", None, context=1024, reserve_full_context=True) as whole,
        edgespec.load("demo", None, context=1024) as runtime,
    ):
        for prompt in (other, [*PROMPT, *PROMPT], other, [*PROMPT, *PROMPT, 7, 8], [*other, 9]):
            replies = [ended(one, prompt, max_tokens=30) for one in (runtime, whole)]
            assert replies[0].tokens == replies[1].tokens
            assert len({reply.stats.cached_prompt_tokens for reply in replies}) == 1


def test_resizing_is_not_charged_to_the_loss_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds of context growth count neither as decoding nor as prefill."""
    resize = LlamaCppModel.resize

    def slow(self: LlamaCppModel, context_tokens: int) -> None:
        time.sleep(0.7)
        resize(self, context_tokens)

    with edgespec.load("demo", "demo-draft", context=1024, method="auto") as runtime:
        monkeypatch.setattr(LlamaCppModel, "resize", slow)
        short = runtime.target.context_tokens
        reply = ended(runtime, PROMPT)
        stats = reply.stats
        assert runtime.target.context_tokens > short
        assert stats.growth_seconds > 1.3  # the target's, and its draft's
        assert stats.ledger_credit_seconds is not None
        assert stats.ledger_credit_seconds > -0.5


class Memory:
    """Limit the tokens of all contexts together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
        self.tokens = tokens
        made: dict[LlamaContext, int] = {}
        make, free = LlamaContext.allocate, LlamaContext.release

        def freed(context: LlamaContext) -> None:
            made.pop(context, None)
            free(context)

        def limited(context: LlamaContext, plan: ContextPlan) -> None:
            context.release()
            if sum(made.values()) + plan.tokens > self.tokens:
                raise MemoryBudgetError(f"no memory for {plan.tokens} tokens", "use fewer")
            make(context, plan)
            made[context] = plan.tokens

        monkeypatch.setattr(LlamaContext, "allocate", limited)
        monkeypatch.setattr(LlamaContext, "release", freed)


class TestNoMemory:
    @pytest.fixture
    def runtime(self) -> Iterator[Runtime]:
        with edgespec.load("demo", None, context=1024, method="suffix") as runtime:
            yield runtime

    @pytest.mark.long
    def test_a_reply_ends_where_the_context_does(
        self, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = ended(runtime, PROMPT[:200], max_tokens=100)
        with edgespec.load("demo", None, context=1024, method="suffix") as runtime:
            Memory(monkeypatch, 256)
            cut = ended(runtime, PROMPT[:200], max_tokens=100)
            assert cut.finish_reason == "length"
            assert len(cut.tokens) == 57
            assert whole.tokens[:57] == cut.tokens
            assert "cannot grow beyond 256 tokens: no memory for 512" in cut.method.note
            assert runtime.context_tokens == 256
            with raises(ContextFullError, "256"):
                ended(runtime, PROMPT + PROMPT)
            assert ended(runtime, PROMPT[:200], max_tokens=50).tokens == whole.tokens[:50]

    def test_prompt_without_memory_raises_and_keeps_the_caches(
        self, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said = ended(runtime, PROMPT[:100], max_tokens=20)
        with monkeypatch.context() as patch:
            Memory(patch, 256)
            with raises(ContextFullError, "480", "256", code="out_of_memory"):
                ended(runtime, PROMPT + PROMPT)
        again = ended(runtime, PROMPT[:100], max_tokens=20)
        assert again.tokens == said.tokens
        assert again.stats.cached_prompt_tokens >= 50

    def test_a_chat_slides_instead(self, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
        Memory(monkeypatch, 256)
        chat = runtime.chat()
        for question in ("What does tar do? " * 8, *("And gzip? " * count for count in range(12, 18))):
            try:
                chat.ask(question, max_tokens=40)
            except ContextFullError:
                chat.ask(question, max_tokens=40)
        assert chat.dropped_messages > 0
        assert runtime.context_tokens == 256

    @pytest.mark.long
    def test_draft_cache_is_freed_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with edgespec.load("demo", "demo-draft", context=1024, method="model") as runtime:
            plain = ended(runtime, PROMPT + PROMPT, method="none").tokens
        memory = Memory(monkeypatch, 1 << 20)
        with edgespec.load("demo", "demo-draft", context=1024, method="model") as runtime:
            memory.tokens = 768 + 256
            reply = ended(runtime, PROMPT + PROMPT)
            assert reply.tokens == plain
            assert runtime.target.context_tokens == 768
            assert runtime.draft is not None
            assert runtime.draft.context_tokens == 256
            assert reply.stats.drafted_tokens > 0
            assert "turned off the draft model" in reply.method.note

    @pytest.mark.long
    def test_draft_without_memory_stops_drafting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        memory = Memory(monkeypatch, 1 << 20)
        with edgespec.load("demo", "demo-draft", context=1024, method="model") as runtime:
            plain = ended(runtime, PROMPT[:100], max_tokens=30, method="none").tokens
            assert ended(runtime, PROMPT[:100], max_tokens=30).tokens == plain
            memory.tokens = 1024 + 512
            reply = ended(runtime, PROMPT + PROMPT)
            assert "cannot draft beyond 512 tokens" in reply.method.note
            assert ended(runtime, PROMPT + PROMPT, method="none").tokens == reply.tokens
            again = ended(runtime, PROMPT[:100], max_tokens=30)
            assert again.tokens == plain
            assert again.stats.drafted_tokens > 0


class TestTheBudget:
    """Growing a cache copies part of it. Without memory for the copy it is allocated at full size."""

    @staticmethod
    def plan(free_bytes: int, *caches: tuple[str, int]) -> MemoryPlan:
        items = tuple(Item(role, f"{role} cache", "cache", size) for role, size in caches)
        budget = Budget(free_bytes + sum(size for _, size in caches), "given")
        return MemoryPlan(budget, 4096, "f16", items)

    def test_context_grows_if_a_copy_of_half_of_it_fits(self) -> None:
        assert has_room_to_resize(self.plan(300, ("target", 600)))
        assert not has_room_to_resize(self.plan(299, ("target", 600)))
        assert has_room_to_resize(self.plan(300, ("target", 600), ("draft", 500)))
        assert not has_room_to_resize(self.plan(300, ("target", 300), ("target", 301)))
        assert has_room_to_resize(self.plan(0))

    def test_full_context_is_allocated_if_no_copy_fits(self) -> None:
        options: dict[str, Any] = {"draft": None, "context": 1024, "method": "none"}
        with edgespec.load("demo", **options) as runtime:
            assert runtime.plan is not None
            least = runtime.plan.total_bytes
        for more, expected in ((0, 1024), (1 << 30, FIRST)):
            with edgespec.load("demo", **options, memory=least + more) as runtime:
                assert runtime.target.context_tokens == expected

    @given(st.integers(1, 40), st.lists(st.integers(1, 3000), max_size=12))
    def test_no_more_than_half_is_copied(self, limit_blocks: int, texts: list[int]) -> None:
        limit = limit_blocks * 256
        model = TabularModel(np.zeros((11, 11), np.float32), context_tokens=256)
        model.facts = dataclasses.replace(model.facts, requested_context_tokens=limit)
        context = ResizableContext(model)
        for tokens in texts:
            before = model.facts.context_tokens
            context.grow_to(tokens)
            after = model.facts.context_tokens
            assert min(tokens, limit) <= after <= max(limit, 256)
            assert after == before or 2 * before <= after
            context.check_fits(min(tokens, after))
