"""Choose the window of lookahead decoding (arXiv 2402.02057) that is fastest on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from edgespec.backends.base import Capabilities
from edgespec.costs.curve import CostCurve

__all__ = ["HitRate", "LookaheadWindow", "choose_window", "expected_speed_up", "smallest_window"]


class LookaheadWindow(NamedTuple):
    """Shape of the tree of lookahead decoding: W, N and G of the paper.

    Attributes:
        columns: W, the positions predicted ahead at once. With 0, only n-grams of the sequence are used.
        ngram_tokens: N, the length of an n-gram, including the token it is looked up by.
        candidates: G, the n-grams verified per pass.
    """

    columns: int
    ngram_tokens: int
    candidates: int

    def __str__(self) -> str:
        """Return the shape as shown to users."""
        return f"W {self.columns}, N {self.ngram_tokens}, G {self.candidates}"

    @property
    def levels(self) -> int:
        """Tokens of a column, and of a candidate without its first token."""
        return self.ngram_tokens - 1

    @property
    def rows(self) -> int:
        """Largest width of a pass, including the root."""
        return 1 + self.levels * (self.columns + self.candidates)

    @property
    def leaves(self) -> int:
        """Largest number of leaves of the tree."""
        return (self.columns if self.levels > 1 else min(self.columns, 1)) + self.candidates

    @property
    def depth(self) -> int:
        """Depth of the tree."""
        return self.levels + max(0, self.columns - 1)

    def fits(self, capabilities: Capabilities) -> bool:
        """Return whether a target with these capabilities can verify such a tree."""
        max_leaves = capabilities.max_branches if capabilities.tree else 1
        return self.rows <= capabilities.max_width and self.leaves <= max_leaves


# Upper limit of the search. Chosen; the paper's largest windows are of this order.
_LARGEST = LookaheadWindow(16, 6, 16)


def smallest_window(capabilities: Capabilities) -> LookaheadWindow:
    """Return the smallest useful window: for a target without trees, one n-gram as a chain."""
    return LookaheadWindow(2, 3, 1) if capabilities.tree else LookaheadWindow(0, 3, 1)


class HitRate:
    """Estimates how many tokens the best candidate adds to a pass.

    The model of the paper (section 4): with G candidates of N - 1 tokens, each right with probability a, the
    best one is right in sum over i < N of 1 - (1 - a^i)^G tokens. This happens in one of f passes. The factor
    1 / f is estimated from observed rounds, with exponential decay, from a typical initial value.
    """

    TOKEN_PROBABILITY = 0.4
    PASSES_PER_HIT = 3.0
    # Weight of the initial value, in expected tokens, and decay per round. Chosen.
    _PRIOR_TOKENS = 16.0
    _DECAY = 0.98

    def __init__(self) -> None:
        self._modelled = self._PRIOR_TOKENS
        self._observed = self._PRIOR_TOKENS / self.PASSES_PER_HIT

    def expected_tokens(self, window: LookaheadWindow) -> float:
        """Return the expected number of accepted tokens per pass."""
        return self._modelled_tokens(window) * self._observed / self._modelled

    def record(self, window: LookaheadWindow, tokens: int) -> None:
        """Record how many tokens of the best candidate of a round were right."""
        self._modelled = self._DECAY * self._modelled + self._modelled_tokens(window)
        self._observed = self._DECAY * self._observed + tokens

    @classmethod
    def _modelled_tokens(cls, window: LookaheadWindow) -> float:
        # Each column yields one n-gram per pass, so more candidates than columns have nothing to choose from.
        tries = min(window.candidates, window.columns or 1)
        return sum(1 - (1 - cls.TOKEN_PROBABILITY**i) ** tries for i in range(1, window.ngram_tokens))


def expected_speed_up(curve: CostCurve, window: LookaheadWindow, hit_rate: HitRate) -> float:
    """Return the expected number of tokens in the time of one target step."""
    return (1 + hit_rate.expected_tokens(window)) / curve.v(window.rows)


def choose_window(
    curve: CostCurve, capabilities: Capabilities, draft_length: int, hit_rate: HitRate
) -> LookaheadWindow | None:
    """Return the window with the largest expected speed-up, or None if plain decoding is faster.

    Args:
        curve: Cost of passes on this machine.
        capabilities: What the target can verify.
        draft_length: Largest depth of the tree.
        hit_rate: Estimated number of accepted tokens.
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
