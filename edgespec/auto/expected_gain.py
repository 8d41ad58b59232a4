"""Estimate the decoding speed with and without a drafter, to decide which drafters to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat, zip_longest

from edgespec.costs.curve import CostFunction

__all__ = ["RoundEstimate"]


@dataclass(frozen=True, slots=True)
class RoundEstimate:
    """The combined draft of all drafters selected so far in a round.

    Speed is the expected number of emitted tokens divided by the cost of drafting and verifying.

    Attributes:
        reach_probs: Per level, the probability that a drafted token of this level is accepted.
        rows: Drafted tokens per level.
        cost: Cost of drafting, in target steps.
    """

    reach_probs: tuple[float, ...] = ()
    rows: tuple[int, ...] = ()
    cost: float = 0.0

    def with_draft(self, reach_probs: Sequence[float], rows: Sequence[int], cost: float) -> RoundEstimate:
        """Return the estimate with another drafter's draft added."""
        all_rows = tuple(sum(pair) for pair in zip_longest(self.rows, rows, fillvalue=0))
        return RoundEstimate(tuple(_either_prob(self.reach_probs, reach_probs)), all_rows, self.cost + cost)

    def speed(self, v: CostFunction) -> float:
        """Return the expected tokens per target step when the draft is cut at its most profitable depth."""
        tokens = accumulate(self.reach_probs, initial=1.0)
        widths = accumulate(self.rows, initial=1)
        return max(expected / (self.cost + v(width)) for expected, width in zip(tokens, widths, strict=True))

    def speed_with(
        self,
        reach_probs: Sequence[float],
        rows: int,
        cost: float,
        v: CostFunction,
        max_width: int,
        can_branch: bool,
    ) -> float:
        """Return the expected tokens per target step if one more draft is added.

        The added draft is verified in full. The earlier drafts are cut at the most profitable depth.

        Args:
            reach_probs: Per level of the added draft, the probability that one of its tokens is accepted.
            rows: Number of tokens in the added draft.
            cost: Cost of the added draft, in target steps.
            v: Cost of a verify pass by width, in target steps.
            max_width: Maximum width of a pass.
            can_branch: Whether a pass can verify a tree. If False, it verifies only the added draft.
        """
        alone = chain(reach_probs, repeat(0.0))
        either = _either_prob(self.reach_probs, reach_probs)
        added = (both - one for both, one in zip(either, alone, strict=False))
        tokens = accumulate(added, initial=1.0 + sum(reach_probs))
        widths = list(accumulate(self.rows, initial=1))
        return max(
            expected / (self.cost + cost + v(min(width + rows, max_width)))
            for expected, width in zip(tokens, widths if can_branch else widths[:1], strict=False)
        )


def _either_prob(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Return, for each level, the probability that at least one of two drafts is accepted.

    The estimate is halfway between independent drafters and drafters whose correct tokens coincide.
    """
    probs = []
    for one, other in zip_longest(first, second, fillvalue=0.0):
        low, high = sorted((one, other))
        probs.append(high + 0.5 * low * (1.0 - high))
    return probs
