"""Measure how the cost of a verify pass depends on its width (number of tokens).

The cost v(m) is the duration of an m-token pass divided by that of a single-token pass. It must be measured,
because it depends on the machine, the quantisation and the kernels, and does not always increase with m.
`PassLimits` describes the largest passes that a target and its draft model support.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from time import perf_counter as now
from typing import TypeAlias

import numpy as np

from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError
from edgespec.methods.constants import DEFAULT_MAX_BRANCHES, DEFAULT_MAX_WIDTH
from edgespec.methods.costs.constants import (
    ASSUMED_COST_PER_TOKEN,
    BUDGET_SECONDS,
    CHANGE_REPEATS,
    MAX_EXCESS,
    MAX_FLAT_COST,
    MAX_REQUIRED_PADDED_WIDTH,
    MEASURED_WIDTHS,
    MIN_BUDGET_STEPS,
    REPEATS,
    REQUIRED_WIDTHS,
    WIDE_WIDTH,
)
from edgespec.model.base import LanguageModel, Progress
from edgespec.model.model_facts import Capabilities

__all__ = ["CostCurve", "CostFunction", "PassLimits", "assumed_cost", "measure_costs"]


# A function v(m) that returns the duration of an m-token pass, relative to a single-token pass.
CostFunction: TypeAlias = Callable[[int], float]


def assumed_cost(width: int) -> float:
    """Estimate the duration of a pass of `width` tokens, relative to a single-token pass.

    Used if only single-token passes were measured.
    """
    return 1.0 + ASSUMED_COST_PER_TOKEN * (width - 1)


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Measured durations of verify passes over different numbers of tokens.

    Attributes:
        widths: The measured widths in tokens, in ascending order starting at 1.
        seconds: The duration of a pass at each width, in seconds.
        pass_widths: Widths to which the model pads its passes, in ascending order. Empty if it does not pad
            them. Large widths may not have been measured.
        change_seconds: How much longer a pass takes if the previous pass had a different width. Measured only
            for models with `has_slow_width_changes`. Not included in `seconds`.

    Raises:
        ValueError: The widths are not ascending from 1, or there is not exactly one positive duration
            per width.
    """

    widths: tuple[int, ...]
    seconds: tuple[float, ...]
    pass_widths: tuple[int, ...] = ()
    change_seconds: float = 0.0

    def __post_init__(self) -> None:
        if len(self.widths) != len(self.seconds) or self.widths[:1] != (1,):
            raise ValueError(
                "the speed measurements must contain one duration for each number of tokens, starting with"
                f" 1, but contain durations {self.seconds} for {self.widths} tokens"
            )
        if any(a >= b for a, b in pairwise(self.widths)) or not all(s > 0 for s in self.seconds):
            raise ValueError(
                "the speed measurements must contain ascending numbers of tokens and positive durations, but"
                f" contain durations {self.seconds} for {self.widths} tokens"
            )

    @property
    def target_step_seconds(self) -> float:
        return self.seconds[0]

    def up_to(self, max_width: int) -> CostCurve:
        """Return this curve without widths above `max_width`."""
        count = bisect_right(self.widths, max_width)
        return replace(self, widths=self.widths[:count], seconds=self.seconds[:count])

    def padded(self, width: int) -> int:
        """Return the padded width of a pass of `width` tokens.

        A pass of one token counts as one token even if it is padded, because it is the unit of all costs.
        """
        if width == 1:
            return 1
        at = bisect_left(self.pass_widths, width)
        return self.pass_widths[at] if at < len(self.pass_widths) else width

    def v(self, width: int) -> float:
        """Return the duration of a pass of `width` tokens, relative to a single-token pass.

        Interpolates linearly between measured widths, and extrapolates beyond the largest one. If only
        single-token passes were measured, `assumed_cost` is used.
        """
        if len(self.widths) == 1:
            return assumed_cost(width)
        width = self.padded(width)
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
    repeats: int = REPEATS,
    budget_seconds: float = BUDGET_SECONDS,
    progress: Progress | None = None,
) -> CostCurve:
    """Measure the durations of verify passes over different numbers of tokens.

    The passes run after the tokens in the model's KV cache and leave the cache unchanged. Widths 1, 2, 4 and
    8 are measured first, followed by 16 if the cost of a pass hardly depends on its width. The others follow
    in ascending order until half of the time budget is spent. The other half is spent on repetitions. Once a
    width has been repeated, its slower first measurement is ignored.

    If the model pads its passes, only the padded widths are measured. Those up to 9 are measured even if the
    budget is spent.

    Args:
        model: The target model.
        widths: The widths to measure in addition to 1. Widths that exceed the limits of the model or its
            context are skipped.
        repeats: The number of additional passes per width.
        budget_seconds: Time budget in seconds, raised to the duration of 12 single-token passes if it is
            lower. Once it is spent, only widths 1, 2, 4 and 8 are still measured, and 16 as above.
        progress: Called before each pass, because a pass of a large model can take seconds. Returning False
            cancels the measurement.

    Raises:
        CancelledError: `progress` returned False, or `model.interrupt` was called.
        ContextFullError: The context has no room for another token.
    """

    def pass_seconds(width: int) -> float:
        if progress and not progress("measuring the speed of the model", 0.0):
            raise CancelledError("the speed measurement was cancelled")
        return _pass_seconds(model, width)

    able = model.facts.capabilities
    max_width = min(able.max_width, model.free_tokens) if able.rollback else 1
    if widths and able.pass_widths:
        widths = able.pass_widths
    required = [width for width in able.pass_widths if width <= MAX_REQUIRED_PADDED_WIDTH] or REQUIRED_WIDTHS
    changes = able.has_slow_width_changes
    chosen = [width for width in sorted(set(widths)) if 1 < width <= max_width]
    # Exclude the very first pass, because it may have to load weights from disk.
    cold = pass_seconds(1)
    started = now()
    seconds: dict[int, list[float]] = {1: [cold, pass_seconds(1)]}
    budget = max(budget_seconds, MIN_BUDGET_STEPS * seconds[1][-1])

    def measure(width: int) -> None:
        if changes:
            # The first pass of each width is slower, because llama.cpp queries the workers for tensor sizes.
            pass_seconds(width)
        seconds[width] = [pass_seconds(width)]

    for width in chosen:
        if width in required:
            measure(width)
    others = [width for width in chosen if width not in required]
    if len(seconds) > 1 and seconds[max(seconds)][0] < MAX_FLAT_COST * seconds[1][-1]:
        for wide in [width for width in others if width >= WIDE_WIDTH][:1]:
            measure(wide)
            others.remove(wide)
    for width in others:
        if now() - started > budget / 2:
            break
        measure(width)
    timed = sorted(seconds.items())
    steady = seconds[1][1:]
    for _ in range(repeats):
        for width, durations in timed:
            if now() - started > budget:
                break
            durations.append(pass_seconds(width))
            if changes and width == 1:
                steady.append(pass_seconds(1))
    for _ in range(CHANGE_REPEATS if len(timed) > 1 and changes else 0):
        if now() - started > budget:
            break
        pass_seconds(timed[1][0])
        seconds[1].append(pass_seconds(1))
        steady.append(pass_seconds(1))
    medians = [median(durations[1:] or durations) for _, durations in timed]
    # Cap the duration of a narrow pass that took much longer than a wider one, because another program must
    # have slowed it down.
    plausible = [min(medians[i], *(MAX_EXCESS * wider for wider in medians[i:])) for i in range(len(medians))]
    measured = tuple(width for width, _ in timed)
    if not changes:
        return CostCurve(measured, tuple(plausible), able.pass_widths)
    step = median(steady)
    change = max(median(seconds[1][2:] or steady) - step, 0.0)
    return CostCurve(
        measured, (step, *(max(each - change, step) for each in plausible[1:])), able.pass_widths, change
    )


def _pass_seconds(model: LanguageModel, width: int) -> float:
    length, vocab_size = model.length, model.facts.vocab_size
    # Use different tokens, because a mixture of experts reads fewer experts for equal ones. A wide pass
    # begins with the same tokens as a narrow one, so that it never reads fewer experts.
    tokens = np.random.default_rng(1).integers(vocab_size // 8, vocab_size, width).tolist()
    chain = TokenTree.chain(tokens[0], tokens[1:])
    started = now()
    try:
        model.verify(chain).at(width - 1, np.array([0]))
        return now() - started
    finally:
        model.truncate(length)


@dataclass(frozen=True, slots=True)
class PassLimits:
    """Limits on the token tree in a verify pass, and on the draft model passes used to build it.

    Attributes:
        max_width: The maximum number of tokens in the tree, including the root token.
        max_branches: The maximum number of leaves in the tree. With 1, the tree must be a chain.
        max_draft_passes: The number of tree levels that take one draft model pass each. Deeper levels need no
            further passes.
    """

    max_width: int = DEFAULT_MAX_WIDTH
    max_branches: int = DEFAULT_MAX_BRANCHES
    max_draft_passes: int = 1 << 20

    @property
    def can_branch(self) -> bool:
        """Whether the tree can have branches."""
        return self.max_branches > 1

    @classmethod
    def of(cls, target: Capabilities, draft: Capabilities | None = None) -> PassLimits:
        """Return the limits that the target and the draft model, if any, both support."""
        models = [target, draft] if draft else [target]
        can_branch = all(model.tree for model in models)
        return cls(
            min(model.max_width for model in models),
            min(model.max_branches for model in models) if can_branch else 1,
            1 if draft and draft.drafts_in_one_pass else 1 << 20,
        )
