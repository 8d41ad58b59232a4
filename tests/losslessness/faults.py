"""Realistic faults, which `verify` must find and classify."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest

from edgespec.api.runtime import Runtime
from edgespec.backends.llamacpp.kv_cells import KvCells
from edgespec.backends.llamacpp.kv_sequences import KvSequences
from edgespec.backends.llamacpp.model import LlamaCppModel
from edgespec.backends.llamacpp.shared_context import ContextSlot
from edgespec.engine.tree import common_prefix_length
from edgespec.memory import target_cache
from edgespec.methods.suffix.drafter import SuffixDrafter

__all__ = [
    "keep_a_rejected_cell",
    "keep_stale_prefixes",
    "keep_the_wrong_branch",
    "leave_a_cell_behind",
    "noisy_width",
    "share_cells",
    "write_into_the_cache",
]


def share_cells(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Make each sequence read `count` KV cells of the next sequence."""
    run = ContextSlot._run

    def faulty(self: ContextSlot, *args: Any, **options: Any) -> Any:
        part = run(self, *args, **options)
        slots = self.shared.slots
        other = slots[(slots.index(self) + 1) % len(slots)]
        with self._lock:
            # llama.cpp fails if a sequence has cells after its last position.
            end = self._lib.llama_memory_seq_pos_max(self._memory, self._first)
            self._lib.llama_memory_seq_cp(self._memory, other._first, self._first, 1, min(1 + count, end))
        return part

    monkeypatch.setattr(ContextSlot, "_run", faulty)


def target_of(runtime: Runtime) -> LlamaCppModel:
    target = runtime._session.target
    assert isinstance(target, LlamaCppModel)
    return target


def keep_a_rejected_cell(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> None:
    """Make every commit of the target also keep the first rejected token's cell."""
    commit, cells = KvCells.commit, target_of(runtime).cells

    def faulty(self: KvCells, path: tuple[int, ...]) -> bool:
        following = (path[-1] if path else 0) + 1
        is_wrong = self is cells and following < len(self._positions)
        return commit(self, (*path, following) if is_wrong else path)

    monkeypatch.setattr(KvCells, "commit", faulty)


def leave_a_cell_behind(monkeypatch: pytest.MonkeyPatch, runtime: Runtime, *, only_commit: bool) -> None:
    """Make the target's rollbacks leave the first removed cell in the cache, where later tokens read it.

    Args:
        monkeypatch: Undoes the fault at the end of the test.
        runtime: The runtime.
        only_commit: Whether only rollbacks at the end of a round are faulty, rather than all of them.
    """
    drop, commit, target = KvSequences.drop, KvCells.commit, target_of(runtime)
    committing: list[KvCells] = []

    def faulty_drop(self: KvSequences, sequence: int, start: int, end: int = -1) -> bool:
        is_wrong = self is target.context and (committing or not only_commit)
        if is_wrong and sequence == 0 and start > 0 and end == -1:
            with self._lock:
                # llama.cpp fails if a sequence has cells after its last position.
                self._lib.llama_memory_seq_add(self._memory, self._first, start, start + 1, -start)
        return drop(self, sequence, start, end)

    def noted_commit(self: KvCells, path: tuple[int, ...]) -> bool:
        committing.append(self)
        try:
            return commit(self, path)
        finally:
            committing.pop()

    monkeypatch.setattr(KvSequences, "drop", faulty_drop)
    monkeypatch.setattr(KvCells, "commit", noted_commit)


def keep_the_wrong_branch(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> Callable[[], int]:
    """Make the target keep the cells of another branch of a draft tree of the same length, if any.

    Returns:
        A function that returns how often a wrong branch was kept.
    """
    compact_branch, target = KvSequences.compact_branch, target_of(runtime)
    kept = [0]

    def faulty(self: KvSequences, source: int, start: int, end: int) -> None:
        others = [
            sequence
            for sequence in sorted(self._others - {source, self._scratch})
            if self is target.context
            and self._lib.llama_memory_seq_pos_max(self._memory, self._first + sequence) >= end - 1
        ]
        kept[0] += bool(others)
        compact_branch(self, others[0] if others else source, start, end)

    monkeypatch.setattr(KvSequences, "compact_branch", faulty)
    return lambda: kept[0]


def write_into_the_cache(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> None:
    """Make the suffix drafter overwrite the last cell of the target's cache with another token's cell."""
    propose = SuffixDrafter.propose
    target = target_of(runtime)

    def faulty(self: SuffixDrafter, *args: Any) -> Any:
        length = target.length
        target.truncate(length - 1)
        target.prefill([300])
        assert target.length == length
        return propose(self, *args)

    monkeypatch.setattr(SuffixDrafter, "propose", faulty)


def noisy_width(
    monkeypatch: pytest.MonkeyPatch, runtime: Runtime, width: int, size: float, *, repeatable: bool = True
) -> Callable[[], int]:
    """Add noise to the logits of all target passes of one width, as a faulty kernel would.

    Args:
        monkeypatch: Undoes the fault at the end of the test.
        runtime: The runtime.
        width: The width of the passes.
        size: Maximum noise, in logits.
        repeatable: Whether the same pass gets the same noise every time.

    Returns:
        A function that returns how many passes had noise.
    """
    logits, calls, target = LlamaCppModel._logits, count(), target_of(runtime)
    passes = [0]

    def faulty(self: LlamaCppModel, tree: Any, first: int) -> Any:
        rows = logits(self, tree, first)
        if self is not target or tree.width != width:
            return rows
        passes[0] += 1
        seed = [self.length] if repeatable else [self.length, next(calls)]
        noise = np.random.default_rng(seed).uniform(-size, size, rows.shape)
        return (rows + noise).astype(np.float32)

    monkeypatch.setattr(LlamaCppModel, "_logits", faulty)
    return lambda: passes[0]


def keep_stale_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the target's cache reuse three tokens more than a prompt shares with the previous one."""

    def faulty(a: Sequence[int], b: Sequence[int]) -> int:
        shared = common_prefix_length(a, b)
        return min(shared + 3, len(a), len(b)) if shared else 0

    monkeypatch.setattr(target_cache, "common_prefix_length", faulty)
