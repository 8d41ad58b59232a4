"""What every program reports of one reply, and how edgespec is asked for one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter as now
from typing import Any

import edgespec

__all__ = ["Arrivals", "Asked", "Run", "ours"]


@dataclass(frozen=True)
class Asked:
    """How a reply is to be made: what all programs are told alike."""

    max_tokens: int
    temperature: float
    seed: int
    top_k: int
    top_p: float
    min_p: float


@dataclass(frozen=True)
class Run:
    """One reply.

    later_tokens, later_seconds: those after the first round, which pays for the prompt in some programs and
    not in others; seconds: all of it, the prompt included. passes: those of the target that brought tokens.
    method: what really ran, as far as the program tells.
    """

    tokens: tuple[int, ...]
    later_tokens: int
    later_seconds: float
    seconds: float
    accepted: int
    passes: int
    method: str = ""

    @property
    def seconds_per_token(self) -> float:
        """Of all tokens after the first round."""
        return self.later_seconds / max(1, self.later_tokens)


class Arrivals:
    """When tokens came. Those of the first round, which ends with the target's own, come together."""

    def __init__(self) -> None:
        self._begun = now()
        self._first = self._last = 0.0
        self._later = 0

    def note(self, count: int, accepted: bool) -> None:
        """So many tokens came now."""
        self._last = now()
        self._later += count if self._first else 0
        if not accepted and not self._first:
            self._first = self._last

    def run(self, tokens: Sequence[int], accepted: int, passes: int, method: str = "") -> Run:
        """The reply, of which nothing comes any more."""
        later_seconds = self._last - self._first if self._later else 0.0
        seconds = now() - self._begun
        return Run(tuple(tokens), self._later, later_seconds, seconds, accepted, passes, method)


def ours(runtime: edgespec.Runtime, prompt: Sequence[int], options: dict[str, Any]) -> Run:
    """A reply of edgespec."""
    arrivals = Arrivals()
    stream = runtime.stream_tokens(prompt, **options)
    for piece in stream:
        arrivals.note(piece.token_count, piece.accepted)
    reply = stream.reply
    return arrivals.run(
        reply.tokens, reply.stats.accepted_tokens, reply.stats.target_passes, reply.method.effective
    )
