"""What a draft may bring, before either model was run: a guess by sizes, to choose by and not to promise."""

from __future__ import annotations

import math

__all__ = ["estimate_acceptance", "estimate_speedup"]

# Our assumption, not a measurement: of drafts of 1, 10 and 100 % of the target's size 0.70, 0.78 and 0.86 of
# the guesses are accepted. Larger drafts guess better, and even as large a model not perfectly. The embedded
# pair (21 %) has 0.75 where this says 0.80; what has run here is known better, see `AcceptanceHistory`.
_AT_EQUAL_SIZE, _PER_DECADE = 0.86, 0.08
_LEAST, _MOST = 0.3, 0.95
# A verified row costs this much of a plain step, with F16 weights on two cores of a processor.
_ROW = 0.14
_LONGEST = 8


def estimate_acceptance(size_share: float, shared_share: float = 1.0) -> float:
    """The share of guesses that come true, in [0, 1], by the draft's share of the target's parameters.

    shared_share: of the target's tokens, those that the draft has; others it can never guess.
    """
    guess = _AT_EQUAL_SIZE + _PER_DECADE * math.log10(max(size_share, 1e-9))
    return min(max(guess, _LEAST), _MOST) * shared_share


def estimate_speedup(
    size_share: float, cost: float, shared_share: float = 1.0, measured: float | None = None
) -> float:
    """Tokens per second against plain decoding, at the best draft length.

    cost: what one guess costs in plain steps: the bytes it reads over the bytes that the target reads, for
    decoding waits for memory. measured: the acceptance, where this pair has run.
    """
    acceptance = estimate_acceptance(size_share, shared_share) if measured is None else measured
    best, tokens = 0.0, 1.0
    for length in range(1, _LONGEST + 1):
        tokens += acceptance**length
        best = max(best, tokens / (length * cost + 1.0 + _ROW * length))
    return best
