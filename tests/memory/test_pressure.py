"""Other programs need memory: what no text needs goes, replies stay what they would be with all of it."""

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
from edgespec import Reply, Runtime, idle
from edgespec.backends.base import Snapshot
from edgespec.backends.tabular import TabularModel
from edgespec.memory import pressure, resident_bytes
from edgespec.memory.context_resize import ResizableContext
from edgespec.memory.prefix_cache import RESERVE_BYTES
from edgespec.memory.prefix_cache.segments import Segment
from edgespec.memory.pressure import MemoryPressure
from edgespec.methods import DrafterSet
from tests.backends.tiny_models import write_jamba
from tests.memory.prefix_cache.helpers import ask, keeper
from tests.tables import table

FIRST = 256
LONG = [(7 * i * i + 11) % 250 + 5 for i in range(300)]
SHORT = [*LONG[:50], *((5 * i + 9) % 200 + 5 for i in range(40))]
PLENTY, LITTLE, NOTHING = 1 << 40, RESERVE_BYTES - 1, 1 << 20
SECONDS = 20.0


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts begin small, and nothing is done between replies unless a test is about that."""
    monkeypatch.setattr("edgespec.assembly.loading.INITIAL_CONTEXT_TOKENS", FIRST)
    for module in ("memory.context_resize", "session"):
        monkeypatch.setattr(f"edgespec.{module}.MIN_ROOM_TOKENS", 16)
    monkeypatch.setattr(idle, "QUIET_SECONDS", 60.0)


def free(runtime: Runtime, free_bytes: int) -> None:
    """So much is free now."""
    runtime._session.memory_pressure.available = lambda: free_bytes
    if kept := runtime._session.prefix_cache:
        kept.store._available = lambda: free_bytes


def until(condition: Callable[[], bool]) -> bool:
    """Whether that came true soon."""
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


class TestTheContext:
    @pytest.mark.parametrize("draft", [pytest.param(None, marks=pytest.mark.long), "demo-draft"])
    def test_it_is_made_smaller_before_a_short_text(self, draft: str | None, plain: Runtime) -> None:
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
                reply, whole = said(runtime, prompt), said(plain, prompt, method="none")
                assert reply.tokens == whole.tokens
                assert reply.stats.cached_prompt_tokens >= min(whole.stats.cached_prompt_tokens, 50)
                assert runtime.target.context_tokens == runtime.memory().context_tokens == expected
                if runtime.draft:
                    assert runtime.draft.context_tokens == expected
                if prompt == [*SHORT, 9]:
                    assert runtime.memory().kv_bytes <= before / 2
                    assert "of the context that no text needs" in reply.method.note
                    assert runtime.memory().reclaimed_bytes >= before - runtime.memory().kv_bytes
                    assert reply.stats.growth_seconds > 0
                if prompt == [*SHORT, 9, 8]:
                    assert "little memory was free" not in reply.method.note

    def test_what_cannot_be_cut_stays_the_same(self, tmp_path: Path) -> None:
        path = str(write_jamba(tmp_path / "target.gguf"))
        options: dict[str, Any] = {"draft": None, "context": 512, "method": "suffix"}
        with edgespec.load(path, **options) as runtime, edgespec.load(path, **options) as whole:
            for prompt, available in ((LONG, PLENTY), (SHORT, LITTLE), ([*SHORT, 9], LITTLE), (LONG, LITTLE)):
                free(runtime, available)
                for temperature in (0.0, 0.8):
                    how = {"temperature": temperature}
                    expected = said(whole, prompt, method="none", **how)
                    assert said(runtime, prompt, **how).tokens == expected.tokens
                assert runtime.target.context_tokens == (512 if prompt == LONG else FIRST)

    def test_one_that_was_asked_for_whole_stays_whole(self, plain: Runtime) -> None:
        free(plain, NOTHING)
        said(plain, SHORT)
        assert plain.target.context_tokens == 512
        free(plain, PLENTY)

    @given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 3000)), max_size=12))
    def test_half_of_it_is_freed_at_least(self, blocks: int, acts: list[tuple[bool, int]]) -> None:
        limit = blocks * 256
        model = TabularModel(np.zeros((11, 11), np.float32), context_tokens=256)
        model.facts = dataclasses.replace(model.facts, requested_context_tokens=limit)
        context = ResizableContext(model)
        for grow, tokens in acts:
            before = model.facts.context_tokens
            if grow:
                context.hold(tokens)
                model.truncate(0)
                model.prefill([1] * min(tokens, model.free_tokens))
                continue
            model.truncate(min(tokens, model.length))
            held, gives = list(model._tokens), context.gives
            context.shrink()
            after = model.facts.context_tokens
            assert model._tokens == held
            assert max(256, model.length) <= after
            assert after == before or 2 * after <= before
            assert gives == (after < before)
            assert not context.gives


class TestTheDraft:
    def test_its_cache_goes_last_and_comes_back(self, plain: Runtime) -> None:
        with edgespec.load("demo", "demo-draft", context=512, method="model") as runtime:
            notes = []
            for prompt, available, drafts, size in (
                (LONG, PLENTY, True, 512),
                ([*LONG, 7], LITTLE, True, 512),
                ([*LONG, 7, 8], NOTHING, False, FIRST),
                ([*LONG, 9], LITTLE, False, FIRST),
                ([*LONG, 9, 5], PLENTY, True, 512),
            ):
                free(runtime, available)
                reply = said(runtime, prompt)
                assert reply.tokens == said(plain, prompt, method="none").tokens
                assert (reply.stats.drafted_tokens > 0) == drafts
                assert runtime.draft is not None
                assert runtime.draft.context_tokens == size
                notes.append(reply.method.note)
            assert "guesses no more until there is room" in notes[2]
            assert ["guesses no more" in note for note in notes] == [False, False, True, False, False]

    def test_it_stays_where_the_memory_was_short_from_the_first(self) -> None:
        """What was planned is no reason to give the draft up: somebody else must have taken as much."""
        models = [TabularModel(np.zeros((11, 11), np.float32), context_tokens=512) for _ in range(2)]
        for model in models:
            model.facts = dataclasses.replace(model.facts, kv_bytes=1 << 20)
        few, free_bytes = pressure._SEVERE_BYTES, [0]
        for first, grown, now_free, goes in (
            (few + 5, 0, 5, True),
            (few + 4, 0, 5, False),
            (few + 5 + 9, 9, 5, True),
            (few + 5 + 8, 9, 5, False),
            (1 << 40, 0, few, False),
            (few - 1, 0, few - 1, False),
        ):
            free_bytes[0] = first
            context = ResizableContext(models[0], models[1])
            giving = MemoryPressure(context, None, lambda: free_bytes[0])
            free_bytes[0] = now_free
            giving._cache_at_first -= grown
            assert giving._is_severe() == goes

    @pytest.mark.long
    def test_a_window_is_left_as_it_is(self, plain: Runtime) -> None:
        """Its cache is no larger than it must be: nothing would be free, and it would be read again."""
        with edgespec.load("demo", "demo-draft", context=512, draft_window=64, method="model") as runtime:
            for prompt in (LONG, [*LONG, 7], [*LONG, 7, 8]):
                free(runtime, NOTHING)
                reply = said(runtime, prompt)
                assert reply.tokens == said(plain, prompt, method="none").tokens
                assert reply.stats.drafted_tokens > 0
                assert "little memory was free" not in reply.method.note
            assert not runtime._session.memory_pressure.anything


class TestBetweenReplies:
    @pytest.fixture(autouse=True)
    def at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(idle, "QUIET_SECONDS", 0.0)
        monkeypatch.setattr(idle, "WATCH_SECONDS", 0.005)

    def test_it_is_noticed_while_nobody_asks(self, plain: Runtime) -> None:
        with edgespec.load("demo", None, context=512, method="suffix") as runtime:
            free(runtime, PLENTY)
            said(runtime, LONG)
            reply = said(runtime, SHORT)
            assert runtime.target.context_tokens == 512
            free(runtime, LITTLE)
            assert until(lambda: runtime.target.context_tokens == FIRST)
            assert until(lambda: "no text needs" in runtime.memory().last_reclaim)
            assert runtime.memory().reclaimed_bytes > 0
            # It is told by the next reply, which goes on with the very cache; and told once.
            prompt = [*SHORT, *reply.tokens, 9]
            later = said(runtime, prompt)
            assert later.tokens == said(plain, prompt, method="none").tokens
            assert later.stats.cached_prompt_tokens >= len(prompt) - 3
            assert "little memory was free" in later.method.note
            assert "little memory was free" not in said(runtime, [*prompt, *later.tokens, 9]).method.note

    def test_texts_go_to_disk_and_are_gone_back_to(self, tmp_path: Path) -> None:
        model = table(1)
        kept = keeper(model, tmp_path)
        with Runtime(model, None, DrafterSet(model, None), prefix_cache=kept) as runtime:
            free(runtime, PLENTY)
            chats = [np.random.default_rng(seed).integers(0, 7, 150).tolist() for seed in range(3)]
            for chat in chats:
                ask(runtime, chat, max_tokens=5)
            assert kept.store.held_bytes > 0
            free(runtime, LITTLE)
            assert until(lambda: not kept.store.held_bytes)
            assert runtime.memory().prefix_cache.disk_bytes > 0
            free(runtime, PLENTY)
            assert ask(runtime, [*chats[0], 1], max_tokens=5).stats.cached_prompt_tokens >= 149

    def test_the_thread_ends_where_there_is_nothing_to_give(self) -> None:
        model = table(1)
        kept = keeper(model)
        with Runtime(model, None, DrafterSet(model, None), prefix_cache=kept) as runtime:
            free(runtime, PLENTY)
            for seed in range(2):
                ask(runtime, np.random.default_rng(seed).integers(0, 7, 150).tolist(), max_tokens=5)
            watcher = watcher_of(runtime)
            assert watcher.is_alive()
            free(runtime, LITTLE)
            assert until(lambda: not watcher.is_alive())
            assert not runtime._session.memory_pressure.anything

    def test_who_is_dropped_is_not_held_by_it(self) -> None:
        model = table(1)
        runtime = Runtime(model, None, DrafterSet(model, None), prefix_cache=keeper(model))
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
import edgespec, edgespec.assembly.loading

edgespec.assembly.loading.INITIAL_CONTEXT_TOKENS = 256
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
def test_a_limit_that_is_really_there_is_noticed() -> None:
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    first, note = done.stdout.splitlines()
    assert first == "1024 512 True"
    assert "little memory was free" in note


def watcher_of(runtime: Runtime) -> threading.Thread:
    thread = runtime._session._idle_worker._thread
    assert thread
    return thread


class TestWithinAReply:
    def test_copies_are_dropped_and_the_reply_goes_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Those on disk go first, for nothing; and nothing is written meanwhile."""
        model = table(1)
        kept = keeper(model, tmp_path)
        chats = [np.random.default_rng(seed).integers(0, 7, 150).tolist() for seed in range(5)]
        expected = ask(
            Runtime(other := table(1), None, DrafterSet(other, None)), chats[4], max_tokens=60, seed=2
        )
        with Runtime(model, None, DrafterSet(model, None), prefix_cache=kept) as runtime:
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
            assert 0 < sum(piece.size_bytes for piece in unsaved) < kept.store.held_bytes
            runtime._session.memory_pressure._next_look = 0.0
            # As much is missing as those on disk take.
            kept.store._available = lambda: RESERVE_BYTES - (kept_before - wanted)
            kept_before, wanted = kept.store.held_bytes, sum(piece.size_bytes for piece in unsaved)
            runtime._session.memory_pressure.available = kept.store._available
            next(stream)
            assert kept.store.held_bytes == wanted
            assert all(piece.snapshot for piece in unsaved)
            runtime._session.memory_pressure._next_look = 0.0
            free(runtime, NOTHING)
            for _ in stream:
                pass
            assert kept.store.held_bytes == 0
            assert stream.reply.tokens == expected.tokens
            assert "was free: gave back" in stream.reply.method.note
            assert runtime.memory().prefix_cache.disk_bytes == on_disk
            free(runtime, PLENTY)
            assert "little memory was free" not in ask(runtime, [*chats[4], 2], max_tokens=5).method.note

    @pytest.mark.skipif(sys.platform != "linux", reason="others return what is freed, or never do")
    @pytest.mark.parametrize("within", [True, False])
    def test_the_system_has_what_was_freed(self, within: bool) -> None:
        model = table(1)
        kept = keeper(model)
        giving = MemoryPressure(ResizableContext(model), kept.store, lambda: NOTHING)
        kept.store._available = lambda: NOTHING
        largest = b"1" * (30 << 20)  # from here on the allocator keeps what is no larger
        del largest
        between = []
        for i in range(30):
            snapshot = Snapshot(10, b"1" * (5 << 20))
            kept.store.tree.add(Segment(str(i), None, np.full(10, i, np.int32), len(snapshot.data), snapshot))
            between.append(bytes([i]) * 700)
            del snapshot
        before = resident_bytes()
        giving.within_reply() if within else giving.between_replies()
        assert giving.given_bytes == 150 << 20
        assert resident_bytes() < before - (100 << 20)
        assert len(between) == 30

    def test_one_look_a_second(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = table(1)
        kept = keeper(model)
        with Runtime(model, None, DrafterSet(model, None), prefix_cache=kept) as runtime:
            for seed in range(2):
                ask(runtime, np.random.default_rng(seed).integers(0, 7, 150).tolist(), max_tokens=5)
            clock, looks = 100.0, []

            def available() -> int:
                looks.append(clock)
                return PLENTY

            monkeypatch.setattr(pressure, "now", lambda: clock)
            giving = MemoryPressure(runtime._session.context, kept.store, available)
            looks.clear()
            for _ in range(300):
                giving.within_reply()
                clock += 0.01
            assert len(looks) == 3
            without = MemoryPressure(runtime._session.context, None, available)
            looks.clear()
            without.within_reply()
            assert not looks
