"""Choose the fastest window for lookahead decoding (arXiv 2402.02057) on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from edgespec.backends.base import Capabilities
from edgespec.costs.curve import CostCurve

__all__ = ["HitRate", "LookaheadWindow", "choose_window", "expected_speed_up", "smallest_window"]


class LookaheadWindow(NamedTuple):
    """Size of the window in lookahead decoding, called W, N and G in the paper (arXiv 2402.02057).

    Attributes:
        columns: W, the number of future tokens predicted in parallel. If 0, only n-grams from the sequence
            are drafted.
        ngram_tokens: N, the length of an n-gram, including its first token, which is the lookup key.
        candidates: G, the number of n-grams verified per pass.
    """

    columns: int
    ngram_tokens: int
    candidates: int

    def __str__(self) -> str:
        """Return a description of the window for the user."""
        return f"W {self.columns}, N {self.ngram_tokens}, G {self.candidates}"

    @property
    def levels(self) -> int:
        """Number of tokens in a column. A candidate has one more token."""
        return self.ngram_tokens - 1

    @property
    def rows(self) -> int:
        """Maximum number of tokens in a verify pass, including the root."""
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
    """Estimates how many extra tokens a pass emits thanks to the best candidate.

    As in the paper (arXiv 2402.02057, section 4), every token of a candidate is assumed to be correct with
    the same probability a. The expected number of correct tokens in the best of G candidates of N - 1 tokens
    is then the sum over i < N of 1 - (1 - a^i)^G. Only one in f passes has useful candidates, so this number
    is multiplied by 1 / f. The factor 1 / f starts at a typical value and then follows the observed hits,
    with exponential decay.
    """

    TOKEN_PROBABILITY = 0.4
    PASSES_PER_HIT = 3.0
    # Weight of the initial estimate, as a number of expected tokens, and decay factor per observation. Both
    # values are heuristics.
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
        # Each column adds only one n-gram per pass, so more candidates than columns do not help.
        tries = min(window.candidates, window.columns or 1)
        return sum(1 - (1 - cls.TOKEN_PROBABILITY**i) ** tries for i in range(1, window.ngram_tokens))


def expected_speed_up(curve: CostCurve, window: LookaheadWindow, hit_rate: HitRate) -> float:
    """Return the expected number of tokens emitted in the time of one target step."""
    return (1 + hit_rate.expected_tokens(window)) / curve.v(window.rows)


def choose_window(
    curve: CostCurve, capabilities: Capabilities, draft_length: int, hit_rate: HitRate
) -> LookaheadWindow | None:
    """Return the window with the highest expected speed-up, or None if decoding without it is faster.

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
