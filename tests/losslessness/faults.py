"""Faults of a shared context, which `verify` must find."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.backends.llamacpp.shared_context import ContextSlot

__all__ = ["share_cells"]


def share_cells(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Make each sequence read `count` KV cells of the next sequence."""
    run = ContextSlot._run

    def faulty(self: ContextSlot, *args: Any, **options: Any) -> Any:
        part = run(self, *args, **options)
        slots = self.shared.slots
        other = slots[(slots.index(self) + 1) % len(slots)]
        with self._lock:
            # llama.cpp fails if a sequence has cells after its own last position.
            end = self._lib.llama_memory_seq_pos_max(self._memory, self._first)
            self._lib.llama_memory_seq_cp(self._memory, other._first, self._first, 1, min(1 + count, end))
        return part

    monkeypatch.setattr(ContextSlot, "_run", faulty)
