"""Choose the fastest window for lookahead decoding (arXiv 2402.02057) on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from edgespec.backends.base import Capabilities
from edgespec.costs.curve import CostCurve

__all__ = ["HitRate", "LookaheadWindow", "choose_window", "expected_speed_up", "smallest_window"]


class LookaheadWindow(NamedTuple):
    """Shape of a lookahead decoding tree: W, N and G in the paper (arXiv 2402.02057).

    Attributes:
        columns: W, the number of future positions predicted in parallel. If 0, only n-grams from the sequence
            are drafted.
        ngram_tokens: N, the length of an n-gram, including its first token, which is the lookup key.
        candidates: G, the number of n-grams verified per pass.
    """

    columns: int
    ngram_tokens: int
    candidates: int

    def __str__(self) -> str:
        """Return a user-facing description of the shape."""
        return f"W {self.columns}, N {self.ngram_tokens}, G {self.candidates}"

    @property
    def levels(self) -> int:
        """Number of tokens in a column, and in a candidate without its first token."""
        return self.ngram_tokens - 1

    @property
    def rows(self) -> int:
        """Maximum width of a verify pass, including the root."""
        return 1 + self.levels * (self.columns + self.candidates)

    @property
    def leaves(self) -> int:
        """Maximum number of leaves in the tree."""
        return (self.columns if self.levels > 1 else min(self.columns, 1)) + self.candidates

    @property
    def depth(self) -> int:
        """Maximum depth of the tree."""
        return self.levels + max(0, self.columns - 1)

    def fits(self, capabilities: Capabilities) -> bool:
        """Return whether a target with these capabilities can verify a tree of this shape."""
        max_leaves = capabilities.max_branches if capabilities.tree else 1
        return self.rows <= capabilities.max_width and self.leaves <= max_leaves


# Largest window to consider, similar to the largest windows in the paper.
_LARGEST = LookaheadWindow(16, 6, 16)


def smallest_window(capabilities: Capabilities) -> LookaheadWindow:
    """Return the smallest useful window. It is a single chain if the target cannot verify trees."""
    return LookaheadWindow(2, 3, 1) if capabilities.tree else LookaheadWindow(0, 3, 1)


class HitRate:
    """Estimates how many tokens the best candidate adds to a pass.

    Uses the model from the paper (arXiv 2402.02057, section 4). With G candidates of N - 1 tokens, where each
    token is correct with probability a, the expected number of correct tokens in the best candidate is the
    sum over i < N of 1 - (1 - a^i)^G. The candidates are useful in one of f passes. The factor 1 / f starts
    from a typical value and is updated from observed hits with exponential decay.
    """

    TOKEN_PROBABILITY = 0.4
    PASSES_PER_HIT = 3.0
    # Weight of the initial estimate, in expected tokens, and the decay factor per observation. Both are
    # heuristics.
    _PRIOR_TOKENS = 16.0
    _DECAY = 0.98

    def __init__(self) -> None:
        self._modelled = self._PRIOR_TOKENS
        self._observed = self._PRIOR_TOKENS / self.PASSES_PER_HIT

    def expected_tokens(self, window: LookaheadWindow) -> float:
        """Return the expected number of accepted tokens per pass."""
        return self._modelled_tokens(window) * self._observed / self._modelled

    def record(self, window: LookaheadWindow, tokens: int) -> None:
        """Record how many tokens in the best candidate were correct."""
        self._modelled = self._DECAY * self._modelled + self._modelled_tokens(window)
        self._observed = self._DECAY * self._observed + tokens

    @classmethod
    def _modelled_tokens(cls, window: LookaheadWindow) -> float:
        # Each column adds only one n-gram per pass, so having more candidates than columns does not help.
        tries = min(window.candidates, window.columns or 1)
        return sum(1 - (1 - cls.TOKEN_PROBABILITY**i) ** tries for i in range(1, window.ngram_tokens))


def expected_speed_up(curve: CostCurve, window: LookaheadWindow, hit_rate: HitRate) -> float:
    """Return the expected number of tokens emitted in the time of one target step."""
    return (1 + hit_rate.expected_tokens(window)) / curve.v(window.rows)


def choose_window(
    curve: CostCurve, capabilities: Capabilities, draft_length: int, hit_rate: HitRate
) -> LookaheadWindow | None:
    """Return the window with the highest expected speed-up, or None if plain decoding is faster.

    Args:
        curve: Cost of verify passes by width on this machine.
        capabilities: What the target can verify.
        draft_length: Maximum depth of the tree.
        hit_rate: Estimates the number of accepted tokens.
    """
    windows = _windows(smallest_window(capabilities))
    fitting = (window for window in windows if window.depth <= draft_length and window.fits(capabilities))
    best = max(fitting, key=lambda w: (expected_speed_up(curve, w, hit_rate), -w.rows), default=None)
    return best if best and expected_speed_up(curve, best, hit_rate) > 1 else None


def _windows(smallest: LookaheadWindow) -> Iterator[LookaheadWindow]:
    for ngram_tokens in range(smallest.ngram_tokens, _LARGEST.ngram_tokens + 1):
        if not smallest.columns:
            yield smallest._replace(ngram_tokens=ngram_tokens)
            continue
        for columns in range(smallest.columns, _LARGEST.columns + 1):
            for candidates in range(smallest.candidates, columns + 1):
                yield LookaheadWindow(columns, ngram_tokens, candidates)
