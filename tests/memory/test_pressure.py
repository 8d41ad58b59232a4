"""Under memory pressure, prefixes are dropped, then idle contexts shrink, and replies stay the same."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import edgespec
from edgespec import Reply, Runtime
from edgespec.decode import idle
from edgespec.decode.drafter_set import DrafterSet
from edgespec.memory import pressure
from edgespec.memory.budget import resident_bytes
from edgespec.memory.constants import DEFAULT_RESERVE_BYTES
from edgespec.memory.context_resize import ResizableContext
from edgespec.memory.prefix_cache.store import Segment
from edgespec.memory.pressure import MemoryPressure
from edgespec.model.base import Snapshot
from tests.backends.tiny_models import write_jamba
from tests.memory.prefix_cache.helpers import ask, keeper
from tests.tables import table
from tests.tabular import TabularModel

FIRST = 256
LONG = [(7 * i * i + 11) % 250 + 5 for i in range(300)]
SHORT = [*LONG[:50], *((5 * i + 9) % 200 + 5 for i in range(40))]
PLENTY, LITTLE, NOTHING = 1 << 40, DEFAULT_RESERVE_BYTES - 1, 1 << 20
SECONDS = 20.0


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start with small contexts, and do no idle work unless a test requests it."""
    monkeypatch.setattr("edgespec.loading.load_request.INITIAL_CONTEXT_TOKENS", FIRST)
    for module in ("memory.context_resize", "decode.session"):
        monkeypatch.setattr(f"edgespec.{module}.MIN_ROOM_TOKENS", 16)
    monkeypatch.setattr(idle, "QUIET_SECONDS", 60.0)


def free(runtime: Runtime, free_bytes: int) -> None:
    """Set the free memory that the runtime sees."""
    runtime._session.memory_pressure.available = lambda: free_bytes
    if kept := runtime._session.prefix_cache:
        kept.store.available = lambda: free_bytes


def until(condition: Callable[[], bool]) -> bool:
    """Wait until the condition is true, and return whether it became true."""
    end = time.monotonic() + SECONDS
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def said(runtime: Runtime, prompt: list[int], **options: Any) -> Reply:
    return ask(runtime, prompt, **{"max_tokens": 8, "seed": 3, **options})


@pytest.fixture(scope="module")
def plain() -> Iterator[Runtime]:
    with edgespec.load("demo", None, context=512, reserve_full_context=True, prefix_cache="none") as runtime:
        yield runtime


def idle_once(runtime: Runtime) -> None:
    """Run one step of idle work with a fixed amount of free memory."""
    runtime._session._reclaim_memory(lambda: True)


class TestIdleShrinking:
    @pytest.mark.long
    @pytest.mark.parametrize("draft", [pytest.param(None, marks=pytest.mark.long), "demo-draft"])
    def test_the_context_shrinks_when_idle_and_grows_again(self, draft: str | None, plain: Runtime) -> None:
        method = "model" if draft else "suffix"
        plain.clear_cache()
        with edgespec.load("demo", draft, context=512, method=method) as runtime:
            for prompt, available, expected in (
                (LONG, PLENTY, 512),
                (SHORT, PLENTY, 512),
                ([*SHORT, 9], LITTLE, FIRST),
                ([*SHORT, 9, 8], LITTLE, FIRST),
                (LONG, LITTLE, 512),
                ([*SHORT, 7], PLENTY, 512),
            ):
                free(runtime, available)
                before = runtime.memory().kv_bytes
                idle_once(runtime)
                reply, whole = said(runtime, prompt), said(plain, prompt, method="none")
                assert reply.tokens == whole.tokens
                assert reply.stats.cached_prompt_tokens >= min(whole.stats.cached_prompt_tokens, 50)
                assert runtime.target.context_tokens == runtime.memory().context_tokens == expected
                if runtime.draft:
                    assert runtime.draft.context_tokens == expected
                if prompt == [*SHORT, 9]:
                    assert runtime.memory().kv_bytes <= before / 2
                    assert "by shrinking the context" in reply.method.note
                    assert runtime.memory().reclaimed_bytes >= before - runtime.memory().kv_bytes
                if prompt == [*SHORT, 9, 8]:
                    assert "memory was low" not in reply.method.note

    @pytest.mark.long
    def test_a_shrunk_recurrent_model_gives_the_same_replies(self, tmp_path: Path) -> None:
        path = str(write_jamba(tmp_path / "target.gguf"))
        options: dict[str, Any] = {"draft": None, "context": 512, "method": "suffix"}
        with edgespec.load(path, **options) as runtime, edgespec.load(path, **options) as whole:
            for prompt, available, size in (
                (LONG, PLENTY, 512),
                (SHORT, LITTLE, 512),
                ([*SHORT, 9], LITTLE, FIRST),
                (LONG, LITTLE, 512),
            ):
                free(runtime, available)
                idle_once(runtime)
                for temperature in (0.0, 0.8):
                    how = {"temperature": temperature}
                    expected = said(whole, prompt, method="none", **how)
                    assert said(runtime, prompt, **how).tokens == expected.tokens
                assert runtime.target.context_tokens == size

    def test_a_reserved_full_context_does_not_shrink(self, plain: Runtime) -> None:
        free(plain, NOTHING)
        said(plain, SHORT)
        idle_once(plain)
        assert plain.target.context_tokens == 512
        free(plain, PLENTY)

    @given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 3000)), max_size=12))
    def test_shrinking_frees_at_least_half(self, blocks: int, acts: list[tuple[bool, int]]) -> None:
        limit = blocks * 256
        model = TabularModel(np.zeros((11, 11), np.float32), context_tokens=256)
        model.facts = dataclasses.replace(model.facts, requested_context_tokens=limit)
        context = ResizableContext(model)
        for grow, tokens in acts:
            before = model.facts.context_tokens
            if grow:
                context.grow_to(tokens)
                model.truncate(0)
                model.prefill([1] * min(tokens, model.free_tokens))
                continue
            model.truncate(min(tokens, model.length))
            held, can_shrink = list(model._tokens), context.can_shrink
            context.shrink()
            after = model.facts.context_tokens
            assert model._tokens == held
            assert max(256, model.length) <= after
            assert after == before or 2 * after <= before
            assert can_shrink == (after < before)
            assert not context.can_shrink


class TestIdleThread:
    @pytest.fixture(autouse=True)
    def at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(idle, "QUIET_SECONDS", 0.0)
        monkeypatch.setattr(idle, "WATCH_SECONDS", 0.005)

    def test_low_memory_is_noticed_between_replies_and_reported_once(self, plain: Runtime) -> None:
        with edgespec.load("demo", None, context=512, method="suffix") as runtime:
            free(runtime, PLENTY)
            said(runtime, LONG)
            reply = said(runtime, SHORT)
            assert runtime.target.context_tokens == 512
            free(runtime, LITTLE)
            assert until(lambda: runtime.target.context_tokens == FIRST)
            assert until(lambda: "shrinking the context" in runtime.memory().last_reclaim)
            assert runtime.memory().reclaimed_bytes > 0
            # The next reply reports this, and continues from the same cache.
            prompt = [*SHORT, *reply.tokens, 9]
            later = said(runtime, prompt)
            assert later.tokens == said(plain, prompt, method="none").tokens
            assert later.stats.cached_prompt_tokens >= len(prompt) - 3
            assert "memory was low" in later.method.note
            assert "memory was low" not in said(runtime, [*prompt, *later.tokens, 9]).method.note

    def test_prefixes_move_to_disk_and_are_restored(self, tmp_path: Path) -> None:
        model = table(1)
        kept = keeper(model, tmp_path)
        with Runtime(model, None, DrafterSet(model), prefix_cache=kept) as runtime:
            free(runtime, PLENTY)
            chats = [np.random.default_rng(seed).integers(0, 7, 150).tolist() for seed in range(3)]
            for chat in chats:
                ask(runtime, chat, max_tokens=5)
            assert kept.store.memory_bytes > 0
            free(runtime, LITTLE)
            assert until(lambda: not kept.store.memory_bytes)
            assert runtime.memory().prefix_cache.disk_bytes > 0
            free(runtime, PLENTY)
            assert ask(runtime, [*chats[0], 1], max_tokens=5).stats.cached_prompt_tokens >= 149

    def test_the_thread_ends_when_nothing_is_left_to_reclaim(self) -> None:
        model = table(1)
        kept = keeper(model)
        with Runtime(model, None, DrafterSet(model), prefix_cache=kept) as runtime:
            free(runtime, PLENTY)
            for seed in range(2):
                ask(runtime, np.random.default_rng(seed).integers(0, 7, 150).tolist(), max_tokens=5)
            watcher = watcher_of(runtime)
            assert watcher.is_alive()
            free(runtime, LITTLE)
            assert until(lambda: not watcher.is_alive())
            assert not runtime._session.memory_pressure.can_reclaim

    def test_the_thread_does_not_keep_the_session_alive(self) -> None:
        model = table(1)
        runtime = Runtime(model, None, DrafterSet(model), prefix_cache=keeper(model))
        free(runtime, PLENTY)
        for seed in range(2):
            ask(runtime, np.random.default_rng(seed).integers(0, 7, 150).tolist(), max_tokens=5)
        watcher, session = watcher_of(runtime), weakref.ref(runtime._session)
        assert watcher.is_alive()
        del runtime
        assert until(lambda: gc.collect() >= 0 and session() is None)
        assert until(lambda: not watcher.is_alive())


SCRIPT = """
import resource, sys, time
import psutil
import edgespec, edgespec.loading.load_request

edgespec.loading.load_request.INITIAL_CONTEXT_TOKENS = 256
with edgespec.load("demo", None, context=1024, method="suffix", prefix_cache="none") as runtime:
    for prompt in ("word " * 600, "word"):
        runtime.generate(prompt, raw=True, max_tokens=2)
    large = runtime.target.context_tokens
    limit = psutil.Process().memory_info().vms + 300 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    end = time.monotonic() + 20
    while runtime.target.context_tokens == large and time.monotonic() < end:
        time.sleep(0.02)
    print(large, runtime.target.context_tokens, runtime.memory().available_bytes < 512 * 2**20)
    print(runtime.generate("word", raw=True, max_tokens=2).method.note)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="its address space is limited")
def test_a_real_address_limit_is_noticed() -> None:
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    first, note = done.stdout.splitlines()
    assert first == "1024 512 True"
    assert "memory was low" in note


def watcher_of(runtime: Runtime) -> threading.Thread:
    thread = runtime._session._idle_worker._thread
    assert thread
    return thread


class TestDuringAReply:
    def test_prefixes_are_dropped_and_the_reply_continues(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Segments that are also on disk are dropped first, and nothing is written during the reply."""
        model = table(1)
        kept = keeper(model, tmp_path)
        chats = [np.random.default_rng(seed).integers(0, 7, 150).tolist() for seed in range(5)]
        expected = ask(Runtime(other := table(1), None, DrafterSet(other)), chats[4], max_tokens=60, seed=2)
        with Runtime(model, None, DrafterSet(model), prefix_cache=kept) as runtime:
            free(runtime, PLENTY)
            for chat in chats[:3]:
                ask(runtime, chat, max_tokens=5)
            runtime.save_prefix_cache()
            ask(runtime, chats[3], max_tokens=5)
            on_disk = runtime.memory().prefix_cache.disk_bytes
            stream = runtime.stream_tokens(chats[4], max_tokens=60, seed=2)
            next(stream)
            unsaved = [piece for piece in kept.store.tree if piece.snapshot and not piece.on_disk]
            assert unsaved
            assert 0 < sum(piece.size_bytes for piece in unsaved) < kept.store.memory_bytes
            runtime._session.memory_pressure._next_check = 0.0
            # The system lacks exactly as much memory as the segments that are also on disk take up.
            kept.store.available = lambda: DEFAULT_RESERVE_BYTES - (kept_before - wanted)
            kept_before, wanted = kept.store.memory_bytes, sum(piece.size_bytes for piece in unsaved)
            runtime._session.memory_pressure.available = kept.store.available
            next(stream)
            assert kept.store.memory_bytes == wanted
            assert all(piece.snapshot for piece in unsaved)
            runtime._session.memory_pressure._next_check = 0.0
            free(runtime, NOTHING)
            for _ in stream:
                pass
            assert kept.store.memory_bytes == 0
            assert stream.reply.tokens == expected.tokens
            assert "memory was low: freed" in stream.reply.method.note
            assert runtime._session.memory_pressure.reclaimed_bytes == kept_before
            assert runtime.memory().prefix_cache.disk_bytes == on_disk
            free(runtime, PLENTY)
            assert "memory was low" not in ask(runtime, [*chats[4], 2], max_tokens=5).method.note

    @pytest.mark.skipif(sys.platform != "linux", reason="others return what is freed, or never do")
    @pytest.mark.parametrize("within", [True, False])
    def test_freed_memory_returns_to_the_system(self, within: bool) -> None:
        model = table(1)
        kept = keeper(model)
        reclaimer = MemoryPressure(ResizableContext(model), kept.store, lambda: NOTHING)
        kept.store.available = lambda: NOTHING
        largest = b"1" * (30 << 20)  # from here on the allocator keeps what is no larger
        del largest
        between = []
        for i in range(30):
            snapshot = Snapshot(10, b"1" * (5 << 20))
            kept.store.tree.add(Segment(str(i), None, np.full(10, i, np.int32), len(snapshot.data), snapshot))
            between.append(bytes([i]) * 700)
            del snapshot
        before = resident_bytes()
        reclaimer.check_during_reply() if within else reclaimer.reclaim_idle()
        assert reclaimer.reclaimed_bytes == 150 << 20
        assert resident_bytes() < before - (100 << 20)
        assert len(between) == 30

    def test_the_system_is_asked_once_a_second(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = table(1)
        kept = keeper(model)
        with Runtime(model, None, DrafterSet(model), prefix_cache=kept) as runtime:
            for seed in range(2):
                ask(runtime, np.random.default_rng(seed).integers(0, 7, 150).tolist(), max_tokens=5)
            clock, checks = 100.0, []

            def available() -> int:
                checks.append(clock)
                return PLENTY

            monkeypatch.setattr(pressure, "now", lambda: clock)
            reclaimer = MemoryPressure(runtime._session.context, kept.store, available)
            checks.clear()
            for _ in range(300):
                reclaimer.check_during_reply()
                clock += 0.01
            assert len(checks) == 3
            without = MemoryPressure(runtime._session.context, None, available)
            checks.clear()
            without.check_during_reply()
            assert not checks


def test_a_model_that_runs_from_disk_reads_ahead_until_half_of_the_reserve_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its plan fills the memory up to the reserve, so slightly more than planned must not slow it down."""
    target, watched = table(1), list[Callable[[], int]]()
    monkeypatch.setattr(target, "watch_memory", watched.append)
    MemoryPressure(ResizableContext(target), available=lambda: 60, reserve_bytes=100)
    (spare_bytes,) = watched
    assert spare_bytes() == 10
