"""Cost of verify passes on this machine: the curve v(m), and how it is measured.

v(m) is the duration of a pass of width m over that of a target step (a pass of width 1). It differs by
machine, quantisation and kernel, and need not be monotone, so it is measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter as now
from typing import TypeAlias

import numpy as np

from edgespec.backends.base import LanguageModel
from edgespec.engine.tree import TokenTree

__all__ = ["MEASURED_WIDTHS", "CostCurve", "CostFunction", "assumed_cost", "measure_costs"]

# v(m): returns the cost of a pass of width m, in target steps.
CostFunction: TypeAlias = Callable[[int], float]

# Dense where backends switch kernels from one width to the next.
MEASURED_WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)
# Widths timed on the slowest machine too: without them the cost of a draft is unknown.
_REQUIRED_WIDTHS = (1, 2, 4, 8)
# Least time budget of a measurement, in target steps of the model.
_MIN_BUDGET_STEPS = 12


def assumed_cost(width: int) -> float:
    """Return the assumed cost of a pass on an unmeasured machine: 5 % of a target step per extra token."""
    return 1.0 + 0.05 * (width - 1)


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Measured durations of verify passes.

    Attributes:
        widths: Measured widths, ascending from 1.
        seconds: Duration of a pass of each width.

    Raises:
        ValueError: The widths do not ascend from 1, or a duration is not positive.
    """

    widths: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.widths) != len(self.seconds) or self.widths[:1] != (1,):
            raise ValueError(f"widths {self.widths} must begin with 1 and match durations {self.seconds}")
        if any(a >= b for a, b in pairwise(self.widths)) or not all(s > 0 for s in self.seconds):
            raise ValueError(f"widths {self.widths} must ascend and durations {self.seconds} be positive")

    @property
    def target_step_seconds(self) -> float:
        """Duration of a target step."""
        return self.seconds[0]

    def v(self, width: int) -> float:
        """Return the cost of a pass of `width` tokens, in target steps.

        Linear between measured widths. Beyond the last one the curve continues with its last slope, but never
        falls. `assumed_cost` applies if only target steps were measured.
        """
        if len(self.widths) == 1:
            return assumed_cost(width)
        at = bisect_left(self.widths, width)
        at = min(max(at, 1), len(self.widths) - 1)
        left, right = self.widths[at - 1], self.widths[at]
        slope = (self.seconds[at] - self.seconds[at - 1]) / (right - left)
        if width > right:
            return (self.seconds[at] + max(slope, 0.0) * (width - right)) / self.target_step_seconds
        return (self.seconds[at - 1] + slope * (width - left)) / self.target_step_seconds


def measure_costs(
    model: LanguageModel,
    widths: Sequence[int] = MEASURED_WIDTHS,
    repeats: int = 5,
    budget_seconds: float = 2.0,
) -> CostCurve:
    """Time verify passes of chains after the tokens that the model has cached. The cache is unchanged.

    Widths 1, 2, 4 and 8 are always timed, the others in ascending order while the time budget lasts. The
    first pass of each width reads cold memory and counts only if it is the only one. Repeats are interleaved,
    so that a change of the machine's speed affects all widths alike.

    Args:
        model: The target.
        widths: Widths to time, as far as the model and its context permit.
        repeats: Further passes per width.
        budget_seconds: Time after which no further pass begins, but at least 12 target steps.

    Raises:
        CancelledError: `model.interrupt` was called.
        ContextFullError: The context has no room for a token.
    """
    able = model.facts.capabilities
    max_width = min(able.max_width, model.free_tokens) if able.rollback else 1
    chosen = [width for width in sorted(set(widths)) if 1 < width <= max_width]
    # The very first pass may load all weights from disk, so it is not charged to the budget.
    cold = _pass_seconds(model, 1)
    started = now()
    seconds: dict[int, list[float]] = {1: [cold, _pass_seconds(model, 1)]}
    budget = max(budget_seconds, _MIN_BUDGET_STEPS * seconds[1][-1])
    # Half of the budget is for reaching wide passes, the other half for repeats.
    for width in sorted(chosen, key=lambda width: width not in _REQUIRED_WIDTHS):
        if width not in _REQUIRED_WIDTHS and now() - started > budget / 2:
            break
        seconds[width] = [_pass_seconds(model, width)]
    timed = sorted(seconds.items())
    for _ in range(repeats):
        for width, durations in timed:
            if now() - started > budget:
                break
            durations.append(_pass_seconds(model, width))
    return CostCurve(
        tuple(width for width, _ in timed),
        tuple(median(durations[1:] or durations) for _, durations in timed),
    )


def _pass_seconds(model: LanguageModel, width: int) -> float:
    """Time one pass. Its logits are read, because some backends compute them only then."""
    length = model.length
    chain = TokenTree.chain(0, [0] * (width - 1))
    started = now()
    try:
        model.verify(chain).at(width - 1, np.array([0]))
        return now() - started
    finally:
        model.truncate(length)
