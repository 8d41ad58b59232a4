"""What the machine says it has."""

from __future__ import annotations

from edgespec.memory import available_bytes, peak_bytes, resident_bytes


def test_what_this_process_holds() -> None:
    assert 0 < resident_bytes() <= peak_bytes() * 1.1
    assert available_bytes() > 0
