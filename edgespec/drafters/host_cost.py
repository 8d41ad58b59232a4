"""What a drafter that computes on the host costs for each token of a reply."""

from __future__ import annotations

from time import perf_counter as now

__all__ = ["HostCost"]


class HostCost:
    """Adds up the time spent in `with cost:` blocks, one at a time, and the tokens emitted."""

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
        """Of everything the drafter did, for each emitted token; None before the first."""
        return 1e6 * self.seconds / self.tokens if self.tokens else None

    def note(self, name: str) -> str:
        """The cost in words; empty before the first token."""
        each = self.microseconds_per_token
        return f"{name} costs {each:.0f} µs a token" if each is not None else ""
