"""The prefix cache: replies stay the same, prefill processes only new tokens, and limits hold."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import NamedTuple
from zlib import crc32

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgespec import Runtime
from edgespec.decode.drafter_set import DrafterSet
from edgespec.decode.session import SessionModels
from edgespec.errors import BackendError
from edgespec.memory.constants import PREFILL_SPEEDUP
from edgespec.memory.prefix_cache.cache import PrefixCache
from edgespec.memory.prefix_cache.disk import delete_cached_prefixes
from edgespec.memory.prefix_cache.store import ReuseCosts, Segment, default_memory_bytes
from edgespec.model.base import LanguageModel, Progress, Snapshot
from tests.backends.rewindable import StateModel, replayed_table
from tests.memory.prefix_cache.helpers import ask, keeper, keeping
from tests.tables import table
from tests.tabular import TabularModel


def words(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 7, count).tolist()  # type: ignore[no-any-return]


SYSTEM = words(99, 120)
CHATS = [SYSTEM + words(seed, 150) for seed in range(4)]


class Act(NamedTuple):
    chat: int
    what: str
    tokens: int


acts = st.lists(
    st.builds(
        Act,
        st.integers(0, 5),
        st.sampled_from(["go on"] * 4 + ["edit", "quiet", "another run"]),
        st.integers(1, 200),
    ),
    max_size=14,
)


# Generated text gets cached in segments, which are processed in full when a text is continued.
OVER_PIECES = [Act(chat, "go on", 12) for chat in (1, 1, 2, 1, 2)]
OVER_PIECES += [Act(0, "quiet", 1), Act(0, "another run", 1), *OVER_PIECES]


@pytest.mark.parametrize("make", ["cuts", "replays", "rounds"])
@settings(max_examples=25)
@given(
    history=acts,
    max_bytes=st.sampled_from([0, 1200, 1 << 20]),
    quota_bytes=st.sampled_from([None, 4000, 1 << 20]),
    max_copied_bytes=st.sampled_from([None, 400, 1500]),
)
@example(history=OVER_PIECES, max_bytes=0, quota_bytes=None, max_copied_bytes=None)
@example(history=OVER_PIECES, max_bytes=1 << 20, quota_bytes=1 << 20, max_copied_bytes=400)
def test_every_reply_equals_that_of_a_fresh_run(
    make: str, history: list[Act], max_bytes: int, quota_bytes: int | None, max_copied_bytes: int | None
) -> None:
    """The KV cache is compared too, because most of these models predict from their last tokens only."""
    plain = Runtime(inner := MADE[make](), None, DrafterSet(inner))
    texts = [[0], SYSTEM[:60], SYSTEM, SYSTEM + words(1, 90), words(2, 5), words(3, 200)]
    if make == "rounds":
        texts = [4 * text for text in texts]
    with tempfile.TemporaryDirectory() as name:
        folder = None if quota_bytes is None else Path(name)

        def begun() -> Runtime:
            bounds = {"max_bytes": max_bytes, "quota_bytes": quota_bytes or 0}
            return keeping(MADE[make](), folder, max_copied_bytes=max_copied_bytes, **bounds)

        runtime = begun()
        for i, act in enumerate(history):
            if act.what == "another run":
                runtime.close()
                runtime = begun()
                continue
            if act.what == "quiet":
                runtime.save_prefix_cache()
                continue
            text = texts[act.chat]
            if act.what == "edit":
                text = text[: max(1, len(text) - act.tokens)]
            prompt = text + words(i, act.tokens % 50 + 1)
            options = {"seed": i, "max_tokens": act.tokens % 40 + 1, "temperature": 0.8 * (i % 2)}
            reply = ask(runtime, prompt, **options)
            plain.clear_cache()
            assert reply.tokens == ask(plain, prompt, **options).tokens
            assert held(runtime) == [*prompt, *reply.tokens][: len(held(runtime))]
            texts[act.chat] = prompt + list(reply.tokens)
            use = runtime.memory().prefix_cache
            assert use.memory_bytes <= max_bytes
            if quota_bytes is not None and folder is not None:
                files = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
                assert sum(files) <= quota_bytes
        runtime.close()


class Rounding(TabularModel):
    """A model whose output depends on the widths of all its prefill passes, as with quantised kernels.

    Each cache entry is the token id plus `_MARKS` times a checksum of the preceding tokens and pass widths.
    """

    _MARKS = 16

    def __init__(self) -> None:
        super().__init__(table(1)._table)
        able = replace(self.facts.capabilities, reuse_block_tokens=256)
        self.facts = replace(self.facts, capabilities=able)

    def _read(self, tokens: Sequence[int], rows: int) -> list[int]:
        read, last = [], self._tokens[-1] if self._tokens else 0
        for token in tokens:
            last = crc32(b"%d %d %d" % (last, token, rows)) * self._MARKS + token
            read.append(last)
        return read

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        super().prefill(self._read(tokens, len(tokens)), progress)

    def _row(self, path: list[int]) -> int:
        return self._read(path, 1)[-1] // self._MARKS % len(self._table)

    def commit(self, path: tuple[int, ...]) -> None:
        before = self.length
        super().commit(path)
        tokens = self._tokens[before:]
        del self._tokens[before:]
        self._tokens += self._read(tokens, 1)


MADE: dict[str, Callable[[], LanguageModel]] = {
    "cuts": lambda: table(1),
    "replays": lambda: replayed_table(StateModel(1, context_tokens=4096)),
    "rounds": Rounding,
}


def held(runtime: Runtime) -> list[int]:
    model = runtime._session.target
    if isinstance(model, Rounding):
        return [token % model._MARKS for token in model._tokens]
    known = getattr(model, "_known", None)
    return list(model._tokens if known is None else model._inner._tokens + model._pending)  # type: ignore[attr-defined]


@pytest.mark.parametrize("folder", [False, True])
def test_prefill_reads_only_new_tokens(folder: bool, tmp_path: Path) -> None:
    """Four interleaved chats share a system prompt. It is prefilled once, followed only by new tokens."""
    chats = [list(chat) for chat in CHATS]
    with keeping(table(1), tmp_path if folder else None, max_bytes=0 if folder else 1 << 20) as runtime:
        known: list[list[int]] = []
        for turn in range(3):
            for i, chat in enumerate(chats):
                chat += words(10 * turn + i, 30)
                reply = ask(runtime, chat, max_tokens=20, seed=turn)
                shared = max((common(chat[:-1], text) for text in known), default=0)
                # The last token of a reply is not in the cache when it ends.
                assert reply.stats.cached_prompt_tokens >= shared - 1
                chat += list(reply.tokens)
                known.append(list(chat))
        use = runtime.memory().prefix_cache
        assert use.hits >= 8
        assert use.reused_tokens > 8 * 150


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_a_shared_prefix_is_stored_once() -> None:
    with keeping(table(1)) as runtime:
        for chat in (*CHATS, CHATS[0]):
            ask(runtime, chat, max_tokens=5, seed=1)
        kept = runtime._session.prefix_cache
        assert kept
        own = [len(text) - len(SYSTEM) for text in kept.sequences()]
        assert sum(len(piece.tokens) for piece in kept.store.tree) == len(SYSTEM) + sum(own)
        assert len(own) == 4


def test_recurrent_states_are_saved_at_branch_points() -> None:
    with keeping(replayed_table(StateModel(1, context_tokens=4096))) as runtime:
        replies = [ask(runtime, chat, max_tokens=5, seed=1) for chat in CHATS]
        # The second text shows where the prompts diverge, and the third one benefits.
        assert [reply.stats.cached_prompt_tokens for reply in replies] == [0, 0, len(SYSTEM), len(SYSTEM)]
        said = [*CHATS[0], *replies[0].tokens]
        again = ask(runtime, [*said, *words(5, 20)], max_tokens=5, seed=1)
        assert again.stats.cached_prompt_tokens >= len(said) - 1


def test_prefill_in_two_parts_reports_one_progress() -> None:
    with keeping(replayed_table(StateModel(1, context_tokens=4096))) as runtime:
        ask(runtime, CHATS[0], max_tokens=5, seed=1)
        told: list[float] = []

        def progress(_what: str, fraction: float) -> bool:
            told.append(fraction)
            return True

        ask(runtime, CHATS[1], max_tokens=5, seed=1, progress=progress)
        assert told == sorted(told)
        assert told[0] == len(SYSTEM) / (len(CHATS[1]) - 1)
        assert told[-1] == 1.0


def test_models_with_inexact_reuse_restore_whole_blocks_only() -> None:
    """Prompts branch inside a segment. The shared tokens after the last whole block are prefilled again."""
    texts = [4 * chat[:150] for chat in CHATS[:2]]
    with keeping(Rounding()) as runtime:
        for text in texts:
            ask(runtime, text, max_tokens=5, seed=1)
        kept = runtime._session.prefix_cache
        assert kept
        for shared, goes_on in ((200, 0), (300, 256), (511, 256), (590, 512)):
            before = kept.usage()
            reply = ask(runtime, [*texts[0][:shared], *words(shared, 40)], max_tokens=5, seed=1)
            assert reply.stats.cached_prompt_tokens == goes_on
            after = kept.usage()
            assert after.reused_tokens - before.reused_tokens in (goes_on, 0)
            assert after.hits - before.hits == (after.reused_tokens > before.reused_tokens)
            ask(runtime, texts[1], max_tokens=5, seed=1)


def test_a_new_run_reuses_prefixes_from_disk(tmp_path: Path) -> None:
    with keeping(table(1), tmp_path) as runtime:
        for chat in CHATS:
            ask(runtime, chat, max_tokens=5, seed=1)
    with keeping(table(1), tmp_path) as runtime:
        for chat in CHATS:
            reply = ask(runtime, [*chat, 3], max_tokens=5, seed=1)
            assert reply.stats.cached_prompt_tokens >= len(chat) - 1
    with keeping(table(1), tmp_path, identity="another") as runtime:
        assert ask(runtime, CHATS[0], max_tokens=5, seed=1).stats.cached_prompt_tokens == 0


def test_low_memory_moves_prefixes_to_disk(tmp_path: Path) -> None:
    model = table(1)
    kept = keeper(model, tmp_path, available=1 << 40)
    with Runtime(model, None, DrafterSet(model), prefix_cache=kept) as runtime:
        for chat in CHATS:
            ask(runtime, chat, max_tokens=5)
        assert kept.usage().memory_bytes > 0
        kept.store.available = lambda: 100 << 20
        reply = ask(runtime, [*CHATS[1], 3], max_tokens=5)
        assert reply.stats.cached_prompt_tokens > len(CHATS[1]) - 2
        assert kept.usage().memory_bytes == 0
        assert kept.usage().disk_bytes > 0


def test_a_failed_restore_falls_back_to_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    model = table(1)
    with keeping(model) as runtime:
        expected = ask(runtime, CHATS[0], max_tokens=20, seed=1).tokens
        ask(runtime, CHATS[1], max_tokens=20, seed=1)

        def refused(_snapshot: Snapshot) -> None:
            model.truncate(0)
            raise BackendError("it does not fit", "read it again")

        monkeypatch.setattr(model, "restore", refused)
        again = ask(runtime, CHATS[0], max_tokens=20, seed=1)
        assert again.tokens == expected
        assert runtime.memory().prefix_cache.hits == 0


class TestWrongSnapshots:
    """A snapshot whose positions differ from its segment's is dropped instead of restored."""

    @staticmethod
    def visited(runtime: Runtime) -> PrefixCache:
        for chat in CHATS[:3]:
            ask(runtime, chat, max_tokens=5, seed=1)
        kept = runtime._session.prefix_cache
        assert kept
        return kept

    def check_read_again(self, runtime: Runtime, kept: PrefixCache, wrong: Segment, cached: int) -> None:
        prompt = [*CHATS[0], 3]
        reply = ask(runtime, prompt, max_tokens=5, seed=1)
        assert reply.stats.cached_prompt_tokens == cached
        assert wrong not in kept.store.tree
        assert held(runtime) == [*prompt, *reply.tokens][: len(held(runtime))]

    def test_a_wrong_start_position(self) -> None:
        with keeping(table(1)) as runtime:
            kept = self.visited(runtime)
            piece, shared = kept.store.tree.longest_match(np.array(CHATS[0], np.int32))
            assert piece
            assert piece.snapshot
            assert (piece.start, shared) == (len(SYSTEM), len(CHATS[0]))
            piece.snapshot = replace(piece.snapshot, start=0)
            self.check_read_again(runtime, kept, piece, len(SYSTEM))

    def test_a_wrong_end_position(self) -> None:
        with keeping(table(1)) as runtime:
            kept = self.visited(runtime)
            first = next(piece for piece in kept.store.tree if not piece.start)
            data = json.dumps(SYSTEM[:-30]).encode()
            first.snapshot = Snapshot(len(SYSTEM) - 30, data)
            ask(runtime, words(77, 200), max_tokens=5)
            self.check_read_again(runtime, kept, first, 0)


def test_a_failed_snapshot_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    model = table(1)

    def refused(_start: int, _end: int) -> Snapshot:
        raise BackendError("a memory of a strange kind cannot be saved", "compute it again")

    monkeypatch.setattr(model, "snapshot", refused)
    with keeping(model) as runtime:
        first = [ask(runtime, chat, max_tokens=20, seed=1).tokens for chat in CHATS]
        assert first == [ask(runtime, chat, max_tokens=20, seed=1).tokens for chat in CHATS]
        assert "strange kind" in runtime.memory().prefix_cache.notice


def test_cleared_prefixes_are_prefilled_again() -> None:
    with keeping(table(1)) as runtime:
        for chat in CHATS:
            ask(runtime, chat, max_tokens=5)
        runtime.clear_cache()
        assert runtime.memory().prefix_cache.sequences == 0
        assert ask(runtime, CHATS[0], max_tokens=5).stats.cached_prompt_tokens == 0


def test_prefixes_are_cached_only_if_reuse_saves_time() -> None:
    costs = ReuseCosts(1e-3)
    assert costs.saves_time(100, 1e6)
    assert not costs.saves_time(8, 0)
    costs.record_prefill(100, 1e-4)
    assert not costs.saves_time(100, 1e6)
    costs.record_copy(1 << 30, 0.01)
    assert costs.saves_time(100, 1e5)


def test_a_timed_prefill_outweighs_the_measured_target_step() -> None:
    costs = ReuseCosts()
    assert not costs.saves_time(100, 0)
    costs.assume_target_step(4e-3)
    assert costs.prefill_seconds == pytest.approx(1e-3)
    costs.record_prefill(100, 1e-2)
    costs.assume_target_step(4e-3)
    assert costs.prefill_seconds == pytest.approx(1e-4)


def test_a_session_estimates_prefill_from_its_measured_target_step() -> None:
    with keeping(table(1)) as runtime:
        cache = runtime._session.prefix_cache
        assert cache is not None
        step_seconds = runtime._session.target_step_seconds
        assert step_seconds > 0
        assert cache.reuse_costs.prefill_seconds == pytest.approx(step_seconds / PREFILL_SPEEDUP)


def test_the_default_size_limit_depends_on_free_memory() -> None:
    assert default_memory_bytes(-5, 1 << 30) == 0
    assert default_memory_bytes(8 << 30, 1 << 30) == 2 << 30
    assert default_memory_bytes(1 << 40, 1 << 30) == 4 << 30


def test_the_default_size_limit_is_at_most_eight_kv_caches() -> None:
    assert default_memory_bytes(1 << 40, 24 << 20) == 192 << 20


def test_clearing_discards_the_open_prompt_too(tmp_path: Path) -> None:
    """If the user deletes the open chat, closing the program must not write the chat to disk."""
    with keeping(table(1), tmp_path) as runtime:
        ask(runtime, CHATS[0], max_tokens=5)
        ask(runtime, CHATS[1], max_tokens=5)
        delete_cached_prefixes(tmp_path)
    assert list(tmp_path.rglob("*.kept")) == []
    with keeping(table(1), tmp_path) as runtime:
        ask(runtime, CHATS[1], max_tokens=5)
        delete_cached_prefixes(tmp_path)
        runtime.save_prefix_cache()
        ask(runtime, [1, *CHATS[2]], max_tokens=5)
    kept = keeper(table(1), tmp_path).sequences()
    assert [text[:200].tolist() for text in kept] == [[1, *CHATS[2]][:200]]


def test_clearing_discards_the_open_prompts_of_all_replies(tmp_path: Path) -> None:
    one, two = table(1), table(1)
    more = [SessionModels(two, None, DrafterSet(two))]
    kept = keeper(one, tmp_path)
    with Runtime(one, None, DrafterSet(one), prefix_cache=kept, more_models=more) as runtime:
        first = runtime.stream_tokens(CHATS[0], max_tokens=5)
        next(first)
        ask(runtime, CHATS[1], max_tokens=5)
        first.wait()
        assert one.length > len(SYSTEM) < two.length
        delete_cached_prefixes(tmp_path)
    assert list(tmp_path.rglob("*.kept")) == []


def test_a_prefix_longer_than_the_context_is_not_restored(tmp_path: Path) -> None:
    with keeping(table(1), tmp_path) as runtime:
        for chat in (CHATS[0], CHATS[1], CHATS[0]):
            ask(runtime, chat, max_tokens=5)
    small = table(1, context_tokens=200)
    with keeping(small, tmp_path) as runtime:
        reply = ask(runtime, CHATS[0][:180], max_tokens=5)
        # What all of them begin with fits.
        assert reply.stats.cached_prompt_tokens == len(SYSTEM)
    with keeping(table(1), tmp_path) as runtime:
        assert ask(runtime, CHATS[0], max_tokens=5).stats.cached_prompt_tokens >= len(CHATS[0]) - 1


def test_the_measured_time_of_a_copy_is_its_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: list[float] = []
    monkeypatch.setattr(ReuseCosts, "record_copy", lambda costs, size_bytes, taken: seconds.append(taken))
    model = table(1)
    began = perf_counter()
    with Runtime(model, None, DrafterSet(model), prefix_cache=keeper(model)) as runtime:
        for chat in CHATS:
            ask(runtime, chat, max_tokens=5)
    assert 0.0 < sum(seconds) < perf_counter() - began
