"""Measurements of a reply, the same for all programs, and a function that measures an edgespec reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter as now
from typing import Any

import edgespec


@dataclass(frozen=True)
class GenerationOptions:
    """Options of a reply that are the same for all programs. `schema` is the text of a JSON schema."""

    max_tokens: int
    temperature: float
    seed: int
    top_k: int
    top_p: float
    min_p: float
    schema: str | None = None


@dataclass(frozen=True)
class Run:
    """Tokens and times of one reply.

    Attributes:
        tokens: Tokens of the reply.
        later_tokens: Tokens after the first round. Some programs prefill the prompt in the first round.
        later_seconds: Seconds after the first round.
        seconds: Seconds of the whole reply, including prefill.
        accepted: Accepted draft tokens.
        passes: Target passes.
        method: Method that was used, if the program reports one.
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
        """Seconds per token after the first round."""
        return self.later_seconds / max(1, self.later_tokens)


class TokenClock:
    """Records the arrival times of tokens. Create it immediately before the request.

    Accepted draft tokens precede the target's own token, which ends a round.
    """

    def __init__(self) -> None:
        self._started = now()
        self._first = self._last = 0.0
        self._later = 0

    def add(self, count: int, accepted: bool) -> None:
        """Record that `count` tokens arrived now, either accepted draft tokens or the target's own."""
        self._last = now()
        self._later += count if self._first else 0
        if not accepted and not self._first:
            self._first = self._last

    def finish(self, tokens: Sequence[int], accepted: int, passes: int, method: str = "") -> Run:
        """Return the measurements of the complete reply."""
        later_seconds = self._last - self._first if self._later else 0.0
        seconds = now() - self._started
        return Run(tuple(tokens), self._later, later_seconds, seconds, accepted, passes, method)


def edgespec_reply(runtime: edgespec.Runtime, prompt: Sequence[int], options: dict[str, Any]) -> Run:
    """Generate a reply with edgespec."""
    clock = TokenClock()
    stream = runtime.stream_tokens(prompt, **options)
    for chunk in stream:
        clock.add(chunk.token_count, chunk.accepted)
    reply = stream.reply
    stats = reply.stats
    return clock.finish(reply.tokens, stats.accepted_tokens, stats.target_passes, reply.method.effective)
