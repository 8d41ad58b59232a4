"""Tests of prompts that exceed the limit of one copy or of the prefix cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgespec import Runtime
from edgespec.decode.drafter_set import DrafterSet
from edgespec.memory.prefix_cache.cache import PrefixCache
from edgespec.memory.prefix_cache.store import Segment
from edgespec.model.base import LanguageModel, Snapshot
from tests.memory.prefix_cache.helpers import PLENTY, Always, ask, keeping
from tests.memory.prefix_cache.test_cache import CHATS, words
from tests.tables import table


def sized(size_bytes: int) -> LanguageModel:
    """Return a tabular model whose KV cache has this size per token, like its snapshots."""
    model = table(1)
    model.facts = replace(model.facts, kv_bytes=size_bytes * model.facts.context_tokens)
    return model


@pytest.mark.parametrize("max_bytes", [0, 500, PLENTY])
def test_long_prompts_are_stored_as_several_segments(
    max_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sizes = sized(3), [0]
    snapshot = model.snapshot

    def copied(start: int = 0, end: int | None = None) -> Snapshot:
        made = snapshot(start, end)
        assert kept
        assert kept.usage().memory_bytes <= max_bytes
        sizes.append(len(made.data))
        return made

    monkeypatch.setattr(model, "snapshot", copied)
    with keeping(model, tmp_path, max_bytes=max_bytes, max_copied_bytes=300) as runtime:
        kept = runtime._session.prefix_cache
        ask(runtime, words(5, 180), max_tokens=5)
        ask(runtime, [*words(5, 90), *words(6, 60)], max_tokens=5)
        chat = words(7, 700)
        for turn in range(4):
            chat += ask(runtime, chat, max_tokens=20, seed=turn).tokens
            assert ask(runtime, words(turn, 40), max_tokens=5).stats.cached_prompt_tokens < 5
            reply = ask(runtime, [*chat, 1], max_tokens=1)
            assert reply.stats.cached_prompt_tokens >= len(chat) - 1
        assert 100 < max(sizes) <= 303
        # The existing parts are not copied again each time the text grows.
        assert sum(sizes) < 2 * 3 * len(chat)


def test_prompts_larger_than_the_limit_keep_their_beginning() -> None:
    with keeping(sized(3), max_bytes=1500) as runtime:
        chat = words(7, 700)
        for _ in range(2):
            ask(runtime, chat, max_tokens=5)
            ask(runtime, words(8, 40), max_tokens=5)
        assert 300 <= ask(runtime, chat, max_tokens=5).stats.cached_prompt_tokens <= 500
        assert runtime.memory().prefix_cache.memory_bytes <= 1500


def copies_of(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> list[Snapshot]:
    """Return a list that receives every later snapshot of the model."""
    made: list[Snapshot] = []
    snapshot = model.snapshot

    def copied(start: int = 0, end: int | None = None) -> Snapshot:
        made.append(snapshot(start, end))
        return made[-1]

    monkeypatch.setattr(model, "snapshot", copied)
    return made


def test_segments_without_room_are_not_copied_repeatedly(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sized(3)
    made = copies_of(model, monkeypatch)
    with keeping(model, max_bytes=1500) as runtime:
        for _ in range(4):
            ask(runtime, words(7, 900), max_tokens=5, seed=1)
            ask(runtime, words(8, 10), max_tokens=5, seed=1)
        ends = [copy.length for copy in made if copy.length > 15]
        assert len(ends) == len(set(ends))
        assert runtime.memory().prefix_cache.hits >= 3


def test_large_segments_are_split_to_the_copy_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with keeping(table(1), tmp_path) as runtime:
        ask(runtime, words(7, 700), max_tokens=5)
    model = sized(3)
    made = copies_of(model, monkeypatch)
    with keeping(model, tmp_path, max_copied_bytes=300) as runtime:
        reply = ask(runtime, [*words(7, 400), *words(5, 30)], max_tokens=5)
        assert reply.stats.cached_prompt_tokens >= 400
        ask(runtime, words(8, 40), max_tokens=5)
        assert ask(runtime, words(7, 700), max_tokens=5).stats.cached_prompt_tokens == 699
        assert max(len(copy.data) for copy in made) <= 303


@pytest.mark.parametrize("max_bytes", [0, 1000])
def test_usage_excludes_files_deleted_for_the_quota(max_bytes: int, tmp_path: Path) -> None:
    with keeping(table(1), tmp_path, max_bytes=max_bytes, quota_bytes=4000) as runtime:
        for seed in range(8):
            ask(runtime, words(seed, 200), max_tokens=5)
        files = [path.stat().st_size for path in tmp_path.rglob("*.kept")]
        use = runtime.memory().prefix_cache
        assert 1000 < use.disk_bytes < sum(files) <= 4000
        assert len(files) <= use.sequences <= len(files) + max_bytes // 500


def test_without_room_for_a_copy_nothing_is_cached() -> None:
    model = table(1)
    kept = PrefixCache(model, 1 << 20, reuse_costs=Always(), max_copied_bytes=0)
    with Runtime(model, None, DrafterSet(model), prefix_cache=kept) as runtime:
        ask(runtime, CHATS[0], max_tokens=5)
        # A table model uses no memory, so tokens have no size until a token with a size is added.
        kept.store.tree.add(Segment("any", None, np.zeros(10, np.int32), 10, None))
        ask(runtime, CHATS[1], max_tokens=5)
        assert runtime.memory().prefix_cache.memory_bytes == 0
