"""What drafting a chain is worth, and how long it should be."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["best_draft_length"]


def best_draft_length(agreement: float, cost: Callable[[int], float], longest: int) -> tuple[int, float]:
    """How many tokens to draft, 1 to `longest`, and the speed-up over plain decoding to expect of that.

    S(k) = E(k) / cost(k) with E(k) = 1 + a + ... + a^k (Leviathan et al. 2023, arXiv 2211.17192). All k are
    looked at, because what passes cost has steps. agreement: a, how often a drafted token is right.
    cost: of a round that drafts k tokens, in plain steps.
    """

    def speed_up(length: int) -> float:
        return sum(agreement**i for i in range(length + 1)) / cost(length)

    best = max(range(1, longest + 1), key=speed_up)
    return best, speed_up(best)
