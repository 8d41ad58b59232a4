"""Estimate the speed-up of draft models from their sizes, in order to rank them without running them."""

from __future__ import annotations

import math
from collections.abc import Callable

from edgespec.store.constants import (
    COST_PER_ROW,
    HEAD_RATE,
    MAX_ASSUMED_RATE,
    MAX_ESTIMATED_DRAFT_LENGTH,
    MIN_ASSUMED_RATE,
    RATE_AT_EQUAL_SIZE,
    RATE_PER_DECADE,
)

__all__ = ["estimate_acceptance_rate", "estimate_head_speedup", "estimate_speedup"]


def _assumed_pass_cost(width: int) -> float:
    return 1.0 + COST_PER_ROW * (width - 1)


def estimate_acceptance_rate(size_ratio: float, shared_token_fraction: float = 1.0) -> float:
    """Return the expected acceptance rate, from 0 to 1.

    Args:
        size_ratio: Parameters of the draft model divided by those of the target.
        shared_token_fraction: Fraction of the target's tokens that the draft model also has. It cannot
            propose the others.
    """
    rate = RATE_AT_EQUAL_SIZE + RATE_PER_DECADE * math.log10(max(size_ratio, 1e-9))
    return min(max(rate, MIN_ASSUMED_RATE), MAX_ASSUMED_RATE) * shared_token_fraction


def estimate_speedup(
    size_ratio: float,
    step_cost: float,
    shared_token_fraction: float = 1.0,
    acceptance_rate: float | None = None,
    pass_cost: Callable[[int], float] = _assumed_pass_cost,
) -> float:
    """Return the expected speed-up over plain decoding at the best draft length.

    Args:
        size_ratio: Parameters of the draft model divided by those of the target.
        step_cost: Time for one pass of the draft model, as a fraction of a single-token pass of the target.
            Because decoding is limited by memory bandwidth, this is the ratio of the bytes that the two
            models read per token.
        shared_token_fraction: Fraction of the target's tokens that the draft model has.
        acceptance_rate: The measured acceptance rate. If None, it is estimated from the sizes.
        pass_cost: Returns the duration of a pass of a given width, relative to a single-token pass.
    """
    if acceptance_rate is None:
        acceptance_rate = estimate_acceptance_rate(size_ratio, shared_token_fraction)
    best, tokens = 0.0, 1.0
    for length in range(1, MAX_ESTIMATED_DRAFT_LENGTH + 1):
        tokens += acceptance_rate**length
        best = max(best, tokens / (length * step_cost + pass_cost(length + 1)))
    return best


def estimate_head_speedup(step_cost: float, *, one_pass: bool) -> float:
    """Return the expected speed-up of a head over plain decoding, with an assumed acceptance rate.

    Args:
        step_cost: Time for one pass of the head, as a fraction of a single-token pass of the target.
        one_pass: Whether the head drafts all tokens in one pass.
    """
    if one_pass:
        return estimate_speedup(
            0.0,
            0.0,
            acceptance_rate=HEAD_RATE,
            pass_cost=lambda width: step_cost + _assumed_pass_cost(width),
        )
    return estimate_speedup(0.0, step_cost, acceptance_rate=HEAD_RATE)
