"""Estimate the decoding speed with and without a drafter, to decide which drafters to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat, zip_longest

from edgespec.methods.costs.curve import CostFunction
from edgespec.methods.costs.pass_limits import PassLimits

__all__ = ["RoundEstimate"]


@dataclass(frozen=True, slots=True)
class RoundEstimate:
    """Estimate for the combined draft of all drafters selected so far in this round.

    Attributes:
        reach_probs: For each level of the draft, the probability that one of its tokens is accepted.
        rows: Number of drafted tokens on each level.
        cost: Duration of drafting, relative to a single-token target pass.
    """

    reach_probs: tuple[float, ...] = ()
    rows: tuple[int, ...] = ()
    cost: float = 0.0

    def with_draft(self, reach_probs: Sequence[float], rows: Sequence[int], cost: float) -> RoundEstimate:
        all_rows = tuple(sum(pair) for pair in zip_longest(self.rows, rows, fillvalue=0))
        return RoundEstimate(tuple(_either_prob(self.reach_probs, reach_probs)), all_rows, self.cost + cost)

    def speed(self, v: CostFunction) -> float:
        """Return the expected speed-up over plain decoding with the most profitable prefix of this draft.

        Args:
            v: Returns the duration of a verify pass of a given width, relative to a single-token target pass.
        """
        tokens = accumulate(self.reach_probs, initial=1.0)
        widths = accumulate(self.rows, initial=1)
        return max(expected / (self.cost + v(width)) for expected, width in zip(tokens, widths, strict=True))

    def speed_with(
        self,
        reach_probs: Sequence[float],
        rows: int,
        cost: float,
        v: CostFunction,
        limits: PassLimits,
    ) -> float:
        """Return the expected speed-up over plain decoding with a new draft added to the current one.

        All tokens of the new draft are verified. The current draft is shortened if that saves time.

        Args:
            reach_probs: For each level of the new draft, the probability that one of its tokens is accepted.
            rows: Number of tokens in the new draft.
            cost: Time to create the new draft, relative to a single-token target pass.
            v: Returns the duration of a verify pass of a given width, relative to a single-token target pass.
            limits: Limits of a verify pass. Without branches, only the new draft is verified.
        """
        alone = chain(reach_probs, repeat(0.0))
        either = _either_prob(self.reach_probs, reach_probs)
        added = (both - one for both, one in zip(either, alone, strict=False))
        tokens = accumulate(added, initial=1.0 + sum(reach_probs))
        widths = list(accumulate(self.rows, initial=1))
        return max(
            expected / (self.cost + cost + v(min(width + rows, limits.max_width)))
            for expected, width in zip(tokens, widths if limits.can_branch else widths[:1], strict=False)
        )


def _either_prob(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Return the probability, for each depth, that at least one of two drafts is accepted.

    The result is halfway between the probabilities for independent and for identical drafts.
    """
    probs = []
    for one, other in zip_longest(first, second, fillvalue=0.0):
        low, high = sorted((one, other))
        probs.append(high + 0.5 * low * (1.0 - high))
    return probs
