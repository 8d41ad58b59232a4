"""Which window of lookahead decoding pays on this machine, if any (Fu et al. 2024, arXiv 2402.02057)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from edgespec.backends.base import Capabilities
from edgespec.costs.curve import CostCurve

__all__ = ["HitRate", "LookaheadWindow", "choose_window", "smallest", "speed_up"]


class LookaheadWindow(NamedTuple):
    """The paper's W, N and G.

    columns: positions guessed ahead at once; 0: no window, only n-grams of the text.
    size: tokens of an n-gram, the one it is looked up by included.
    candidates: n-grams verified in a pass.
    """

    columns: int
    size: int
    candidates: int

    def __str__(self) -> str:
        """As people read it."""
        return f"W {self.columns}, N {self.size}, G {self.candidates}"

    @property
    def levels(self) -> int:
        """Tokens of a column, and of a candidate after the last token."""
        return self.size - 1

    @property
    def rows(self) -> int:
        """The most rows of a pass, the root included."""
        return 1 + self.levels * (self.columns + self.candidates)

    @property
    def leaves(self) -> int:
        """The most leaves of the tree."""
        return (self.columns if self.levels > 1 else min(self.columns, 1)) + self.candidates

    @property
    def depth(self) -> int:
        """How deep the tree is."""
        return self.levels + max(0, self.columns - 1)

    def fits(self, able: Capabilities) -> bool:
        """Whether a target takes such a tree."""
        return self.rows <= able.max_width and self.leaves <= (able.max_branches if able.tree else 1)


_LARGEST = LookaheadWindow(16, 6, 16)


def smallest(able: Capabilities) -> LookaheadWindow:
    """The least a target can be asked for; without branches, one n-gram of the text as a chain."""
    return LookaheadWindow(2, 3, 1) if able.tree else LookaheadWindow(0, 3, 1)


class HitRate:
    """How many tokens a candidate adds to a pass: the paper's model, corrected by what was seen.

    With G candidates of N - 1 tokens, each right with the same chance a, the best one is right in
    sum over i < N of 1 - (1 - a^i)^G tokens (section 4); that happens in one pass of f. The correction is
    1 / f, which begins with a value of that order and follows the text, old rounds fading away.
    """

    CHANCE = 0.4
    PASSES_PER_HIT = 3.0
    _DOUBT = 16.0
    _FADING = 0.98

    def __init__(self) -> None:
        self._modelled = self._DOUBT
        self._seen = self._DOUBT / self.PASSES_PER_HIT

    def gain(self, window: LookaheadWindow) -> float:
        """Tokens beyond the one of a plain step to be expected of a pass."""
        return self._model(window) * self._seen / self._modelled

    def count(self, window: LookaheadWindow, tokens: int) -> None:
        """The best candidate of a round was right in so many tokens."""
        self._modelled = self._FADING * self._modelled + self._model(window)
        self._seen = self._FADING * self._seen + tokens

    @classmethod
    def _model(cls, window: LookaheadWindow) -> float:
        # More candidates than columns find no more n-grams to choose from.
        tries = min(window.candidates, window.columns or 1)
        return sum(1 - (1 - cls.CHANCE**i) ** tries for i in range(1, window.size))


def speed_up(curve: CostCurve, window: LookaheadWindow, luck: HitRate) -> float:
    """Tokens per plain step's time."""
    return (1 + luck.gain(window)) / curve.v(window.rows)


def choose_window(
    curve: CostCurve, able: Capabilities, draft_length: int, luck: HitRate
) -> LookaheadWindow | None:
    """The window of the largest speed-up that the target and a draft length take; None where none gains."""
    fitting = (w for w in _windows(smallest(able)) if w.depth <= draft_length and w.fits(able))
    best = max(fitting, key=lambda w: (speed_up(curve, w, luck), -w.rows), default=None)
    return best if best and speed_up(curve, best, luck) > 1 else None


def _windows(least: LookaheadWindow) -> Iterator[LookaheadWindow]:
    for size in range(least.size, _LARGEST.size + 1):
        if not least.columns:
            yield least._replace(size=size)
            continue
        for columns in range(least.columns, _LARGEST.columns + 1):
            for candidates in range(least.candidates, columns + 1):
                yield LookaheadWindow(columns, size, candidates)
