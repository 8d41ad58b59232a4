"""What one round's guesses are worth: expected tokens for each plain step of its cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat, zip_longest

from edgespec.costs.curve import Curve

__all__ = ["RoundEstimate"]


@dataclass(frozen=True, slots=True)
class RoundEstimate:
    """All that was said in a round so far, as of one draft.

    reached: level by level the chance, in [0, 1], that the text is still in it. rows: of each level. spent:
    what saying it cost, in plain steps.
    """

    reached: tuple[float, ...] = ()
    rows: tuple[int, ...] = ()
    spent: float = 0.0

    def also(self, reached: Sequence[float], rows: Sequence[int], cost: float) -> RoundEstimate:
        """This and what another drafter said."""
        both = (sum(pair) for pair in zip_longest(self.rows, rows, fillvalue=0))
        return RoundEstimate(tuple(_either(self.reached, reached)), tuple(both), self.spent + cost)

    def worth(self, curve: Curve) -> float:
        """It is verified down to no level at all, to the first, and so on: the best of these."""
        tokens = accumulate(self.reached, initial=1.0)
        rows = accumulate(self.rows, initial=1)
        return max(one / (self.spent + curve(width)) for one, width in zip(tokens, rows, strict=True))

    def worth_with(
        self, adds: Sequence[float], more_rows: int, cost: float, curve: Curve, most_rows: int, joined: bool
    ) -> float:
        """The same with another draft beside it, which is verified whole.

        adds: as `reached`. joined: False where only one of the two can be verified, the other draft then.
        """
        alone = chain(adds, repeat(0.0))
        gains = (both - one for both, one in zip(_either(self.reached, adds), alone, strict=False))
        tokens = accumulate(gains, initial=1.0 + sum(adds))
        rows = list(accumulate(self.rows, initial=1))
        return max(
            one / (self.spent + cost + curve(min(width + more_rows, most_rows)))
            for one, width in zip(tokens, rows if joined else rows[:1], strict=False)
        )


def _either(said: Sequence[float], adds: Sequence[float]) -> list[float]:
    """Level by level the chance that the text is in one of two drafts, from the chances of each.

    Halfway between drafts that know nothing of each other and ones that are right together.
    """
    chances = []
    for one, other in zip_longest(said, adds, fillvalue=0.0):
        low, high = sorted((one, other))
        chances.append(high + 0.5 * low * (1.0 - high))
    return chances
