"""Tests of the memory figures that the system reports."""

from __future__ import annotations

from edgespec.memory import available_bytes, peak_bytes, resident_bytes


def test_memory_of_this_process() -> None:
    assert 0 < resident_bytes() <= peak_bytes() * 1.1
    assert available_bytes() > 0
