"""Compute the best draft length for a given acceptance rate and cost."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["best_draft_length"]


def best_draft_length(
    acceptance_rate: float, cost: Callable[[int], float], longest: int
) -> tuple[int, float]:
    """Return the draft length with the highest expected speed-up, and that speed-up.

    The expected speed-up is S(k) = E(k) / cost(k), where E(k) = 1 + a + ... + a^k is the expected number of
    emitted tokens (Leviathan et al. 2023, arXiv 2211.17192).

    Args:
        acceptance_rate: The probability a that a drafted token is accepted.
        cost: Returns the duration of drafting and verifying k tokens, relative to a single-token target pass.
        longest: Maximum draft length to consider.
    """

    def speed_up(length: int) -> float:
        return sum(acceptance_rate**i for i in range(length + 1)) / cost(length)

    best = max(range(1, longest + 1), key=speed_up)
    return best, speed_up(best)
