"""Measure the CPU time of a lookup drafter per reply token."""

from __future__ import annotations

from time import perf_counter as now

__all__ = ["HostCost"]


class HostCost:
    """Measures the time spent in `with` blocks that use this object. The blocks must not be nested.

    Attributes:
        seconds: Total time spent in the blocks.
        tokens: Number of tokens emitted while drafting. The drafter updates this number.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.tokens = 0
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = now()

    def __exit__(self, *_: object) -> None:
        self.seconds += now() - self._started

    @property
    def microseconds_per_token(self) -> float | None:
        """Average time per emitted token in microseconds. None before the first token."""
        return 1e6 * self.seconds / self.tokens if self.tokens else None

    def note(self, name: str) -> str:
        """Return the cost as a sentence for the user; empty before the first token."""
        each = self.microseconds_per_token
        return f"{name} takes {each:.0f} µs per token" if each is not None else ""
