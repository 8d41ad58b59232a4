"""What a verify pass costs on this machine.

Everything is reckoned in plain steps: v(m) is what a pass of m rows costs over a pass of one. The curve
is measured because it is not even monotone: it differs by machine, quantisation and kernel.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter as now

import numpy as np

from edgespec.backends.base import LanguageModel
from edgespec.engine.tree import TokenTree

__all__ = ["WIDTHS", "CostCurve", "Curve", "gentle", "measure"]

# v(m): the cost of a pass of m rows, in plain steps.
Curve = Callable[[int], float]

# Close together where kernels change from one width to the next.
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)
# Timed on the slowest machine too: without them nothing can be said of what a draft costs.
_ALWAYS = (1, 2, 4, 8)
_LEAST_STEPS = 12


def gentle(rows: int) -> float:
    """A cost curve for a machine nobody has measured: each row costs a twentieth of a plain step."""
    return 1.0 + 0.05 * (rows - 1)


@dataclass(frozen=True, slots=True)
class CostCurve:
    """How long one verify pass takes at some widths.

    widths: rows of a pass, ascending from 1. seconds: what each took.
    """

    widths: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raises ValueError for what is no curve."""
        if len(self.widths) != len(self.seconds) or self.widths[:1] != (1,):
            raise ValueError(f"widths {self.widths} do not begin with 1 or do not fit {self.seconds}")
        if any(a >= b for a, b in pairwise(self.widths)) or not all(s > 0 for s in self.seconds):
            raise ValueError(f"widths {self.widths} must ascend and seconds {self.seconds} be positive")

    @property
    def target_step_seconds(self) -> float:
        """What a plain step takes."""
        return self.seconds[0]

    def v(self, width: int) -> float:
        """The cost of a pass of `width` rows in plain steps.

        Straight lines between measured widths; beyond the last as steep as at the end, but never falling.
        Where only plain steps were timed nothing is known of wider passes, and they are taken as `gentle`.
        """
        if len(self.widths) == 1:
            return gentle(width)
        at = bisect_left(self.widths, width)
        at = min(max(at, 1), len(self.widths) - 1)
        left, right = self.widths[at - 1], self.widths[at]
        slope = (self.seconds[at] - self.seconds[at - 1]) / (right - left)
        if width > right:
            return (self.seconds[at] + max(slope, 0.0) * (width - right)) / self.target_step_seconds
        return (self.seconds[at - 1] + slope * (width - left)) / self.target_step_seconds


def measure(
    model: LanguageModel, widths: Sequence[int] = WIDTHS, repeats: int = 5, budget_seconds: float = 2.0
) -> CostCurve:
    """Time real verify passes after what the model has cached; the cache is left as it was.

    Chains of `widths` rows as far as the model and its context take them. A plain step, and passes of 2, 4
    and 8 rows where they are among those, are always timed; others, the narrow ones first, while there is
    time. That is `budget_seconds`, or 12 plain steps of this model where those take longer: no other pass
    is begun after it. The first pass of a width pays for cold memory and counts only where there is no
    other. Repeats are interleaved, so that drift touches all widths alike.
    Raises CancelledError after `interrupt`, ContextFullError where not even one token fits.
    """
    able = model.facts.capabilities
    most = min(able.max_width, model.free_tokens) if able.rollback else 1
    chosen = [width for width in sorted(set(widths)) if 1 < width <= most]
    # The very first pass may read all weights from a disk, and takes nothing from the time of others.
    cold = _pass_seconds(model, 1)
    started = now()
    seconds: dict[int, list[float]] = {1: [cold, _pass_seconds(model, 1)]}
    budget = max(budget_seconds, _LEAST_STEPS * seconds[1][-1])
    # Half of the time to reach wide passes, the other half to be sure of them.
    for width in sorted(chosen, key=lambda width: width not in _ALWAYS):
        if width not in _ALWAYS and now() - started > budget / 2:
            break
        seconds[width] = [_pass_seconds(model, width)]
    timed = sorted(seconds.items())
    for _ in range(repeats):
        for width, taken in timed:
            if now() - started > budget:
                break
            taken.append(_pass_seconds(model, width))
    return CostCurve(
        tuple(width for width, _ in timed), tuple(median(taken[1:] or taken) for _, taken in timed)
    )


def _pass_seconds(model: LanguageModel, width: int) -> float:
    """The time of one pass, its logits included: they may be computed only when they are read."""
    length = model.length
    chain = TokenTree.chain(0, [0] * (width - 1))
    started = now()
    try:
        model.verify(chain).at(width - 1, np.array([0]))
        return now() - started
    finally:
        model.truncate(length)
