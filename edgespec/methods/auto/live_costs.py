"""Track the cost of verify passes while replies are generated."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.methods.auto.constants import (
    ASSUMED_PASS_RATIO,
    ASSUMED_RATIO_OF_THREADS,
    CONTEXT_BUCKETS,
    DEVIATION_WEIGHT,
    FIRST_DECAY,
    FIRST_PASSES,
    LINK_DECAY,
    MAX_CHANGE,
    MAX_DEVIATION,
    MAX_REPLIES,
    MAX_SAVED_RATIO,
    MIN_TARGET_STEPS,
    SETTLED_PASSES,
    TARGET_STEP_WEIGHT,
    VERIFY_DECAY,
    WIDE_PASS_WEIGHT,
    WORST_PASS_STEP_DECAY,
)
from edgespec.methods.costs.curve import CostCurve

__all__ = ["Conditions", "LiveCosts"]

_MAX_LOG_SAVED_RATIO = math.log(MAX_SAVED_RATIO)


class Conditions(NamedTuple):
    """Conditions that affect how long the target's forward passes take.

    Attributes:
        replies: Number of concurrent replies.
        threads: Number of CPU threads that the target uses.
    """

    replies: int = 1
    threads: int = 0


@dataclass(slots=True)
class _Bucket:
    """Costs of the target's forward passes in one range of context lengths.

    Attributes:
        log_ratios: Logarithm of the ratio of measured to expected cost, for each pass width.
        common_log_ratio: Log ratio to use for widths that are not in `log_ratios`.
        target_steps: Number of single-token passes measured.
        wide_passes: Number of multi-token passes measured.
        worst_ratio: Highest recent ratio of the measured to the expected duration of a verify pass.
    """

    target_step_seconds: float
    log_ratios: dict[int, float] = field(default_factory=dict)
    common_log_ratio: float = 0.0
    target_steps: int = MIN_TARGET_STEPS
    wide_passes: int = SETTLED_PASSES
    worst_ratio: float = 1.0

    def record_ratio(self, ratio: float, width: int, target_step_decay: float) -> None:
        """Record the ratio of a pass's measured duration to its expected duration."""
        if width == 1:
            self.worst_ratio = max(self.worst_ratio * target_step_decay, 1.0)
            return
        decay = FIRST_DECAY if self.wide_passes <= FIRST_PASSES else VERIFY_DECAY
        self.worst_ratio = max(self.worst_ratio * decay, ratio, 1.0)

    def copy(self) -> _Bucket:
        return replace(self, log_ratios=dict(self.log_ratios))


class LiveCosts:
    """Costs of the target's forward passes, updated while replies are generated.

    Costs are tracked separately for each range of context lengths, number of concurrent replies and number of
    CPU threads.

    If concurrent replies share their passes, a longer draft in one reply slows down all of them. Costs
    therefore assume that all replies verify the same number of tokens. Drafting for as long as it saves time
    under this assumption maximises the total tokens per second (goodput, arXiv 2406.14066).

    Args:
        curve: The initial cost curve.
        threads: Number of CPU threads with which the curve was measured.
        shares_passes: Whether concurrent replies share their passes.

    Attributes:
        last_width: Width of the target's last pass, including padding. 0 after a prompt.
    """

    _MAX_LOG_CHANGE, _MAX_LOG_DEVIATION = math.log(MAX_CHANGE), math.log(MAX_DEVIATION)

    def __init__(self, curve: CostCurve, threads: int = 0, *, shares_passes: bool = False) -> None:
        self.curve = curve
        self.last_width = 0
        self._shares_passes = shares_passes
        self._bucket = _Bucket(curve.target_step_seconds)
        self._measured = Conditions(threads=threads)
        self._key = (0, self._measured)
        self._buckets = {self._key: self._bucket}
        self._deviation = 0.0
        self._steps, self._spread = 0, 0.0
        self._at_last_target_step = self._bucket.copy()
        self._is_restored = False

    def for_another_slot(self) -> LiveCosts:
        """Return costs for another reply that shares the target's passes, backed by the same measurements."""
        other = LiveCosts(self.curve, self._measured.threads, shares_passes=self._shares_passes)
        other._buckets, other._is_restored = self._buckets, True
        other._bucket = self._buckets[other._key]
        return other

    @property
    def target_step_seconds(self) -> float:
        return self._bucket.target_step_seconds

    def set_context_tokens(self, context_tokens: int) -> None:
        """Switch to the costs for a context length, in tokens."""
        self._select(bisect_right(CONTEXT_BUCKETS, context_tokens), self._key[1])

    @property
    def conditions(self) -> Conditions:
        return self._key[1]

    def set_conditions(self, conditions: Conditions) -> None:
        """Switch to the costs for a different number of concurrent replies or CPU threads."""
        replies = max(1, min(conditions.replies, MAX_REPLIES))
        self._select(self._key[0], conditions._replace(replies=replies))

    def _select(self, context_bucket: int, conditions: Conditions) -> None:
        key = (context_bucket, conditions)
        if key == self._key:
            return
        if key not in self._buckets:
            replies, threads = conditions
            # Iterate over a copy, because another thread may add buckets at the same time.
            nearest = min(
                tuple(self._buckets),
                key=lambda at: (
                    abs(at[1].replies - replies), abs(at[1].threads - threads), abs(at[0] - context_bucket)
                ),
            )  # fmt: skip
            bucket = self._buckets[nearest].copy()
            if nearest[1] != conditions:
                same_replies = nearest[1].replies == replies
                bucket.worst_ratio = (
                    max(bucket.worst_ratio, ASSUMED_RATIO_OF_THREADS) if same_replies else ASSUMED_PASS_RATIO
                )
                bucket.target_steps = bucket.wide_passes = 0
                if self._shares_passes:
                    bucket.target_step_seconds *= self.curve.v(replies) / self.curve.v(nearest[1].replies)
            self._buckets[key] = bucket
        self._key, self._bucket = key, self._buckets[key]
        self._at_last_target_step, self._deviation = self._bucket.copy(), 0.0

    @property
    def return_seconds(self) -> float:
        """Extra time that the next target step takes if the last pass had a different width."""
        return self.curve.change_seconds if self.last_width != 1 else 0.0

    def v(self, width: int) -> float:
        """Return the duration of a pass of `width` tokens per reply, relative to a single-token pass.

        A pass whose width differs from the last pass takes `change_seconds` longer.
        """
        if width <= 1:
            return 1.0
        bucket, replies = self._bucket, self._sharing_replies
        width = self.curve.padded(width)
        expected = self.curve.v(replies * width) / self.curve.v(replies)
        if width != self.last_width:
            expected += self.curve.change_seconds / self.curve.target_step_seconds
        return expected * math.exp(bucket.log_ratios.get(width, bucket.common_log_ratio))

    @property
    def _sharing_replies(self) -> int:
        return self._key[1].replies if self._shares_passes else 1

    def worst_v(self, width: int) -> float:
        """Return the worst-case duration of a pass, relative to a single-token pass."""
        return self._bucket.worst_ratio * self.v(width)

    def pass_seconds(self, width: int) -> float:
        return self.v(width) * self.target_step_seconds

    def comparable_seconds(self, seconds: float, width: int, other_tokens: int) -> float:
        """Scale a shared pass's duration to that of a pass with `width` tokens for every reply.

        This way, a reply is not charged for the prompts and longer drafts of other replies.

        Args:
            seconds: Duration of the pass.
            width: Number of the reply's own tokens in the pass.
            other_tokens: Number of tokens in the pass that belong to other replies.
        """
        return seconds * self.v(width) / self.v(self._mean_width(width, other_tokens))

    def _mean_width(self, width: int, other_tokens: int) -> int:
        return max(1, round((width + other_tokens) / self._sharing_replies)) if other_tokens else width

    @property
    def needs_target_step(self) -> bool:
        """Whether the next pass should have a single token, to measure the machine's speed."""
        return self._bucket.target_steps < MIN_TARGET_STEPS or self._is_deviating

    @property
    def _is_deviating(self) -> bool:
        return abs(self._deviation) > self._MAX_LOG_DEVIATION

    @property
    def uncertainty(self) -> float:
        """Relative standard error of the estimated duration of a single-token pass."""
        return self._spread / math.sqrt(max(1, min(self._steps, 4)))

    def record_pass(self, width: int, seconds: float, other_tokens: int = 0) -> None:
        """Record the duration of a pass. See `comparable_seconds` for the arguments."""
        mean_width = self._mean_width(width, other_tokens)
        if width == 1:
            seconds = max(seconds - self.return_seconds, 0.0)
        mean_width = self.curve.padded(mean_width)
        ratio = seconds / self.pass_seconds(mean_width)
        self._record(mean_width, seconds)
        self.last_width = self.curve.padded(width)
        decay = LINK_DECAY if self.curve.change_seconds else WORST_PASS_STEP_DECAY
        self._bucket.record_ratio(ratio, width, decay)
        if width == 1 < mean_width:
            # Other replies drafted tokens in this pass. Count it as a target step anyway, because passes
            # without any drafts may never occur.
            self._bucket.target_steps += 1

    def _record(self, width: int, seconds: float) -> None:
        bucket = self._bucket
        change = math.log(max(seconds, 1e-9) / self.pass_seconds(width))
        change = max(-self._MAX_LOG_CHANGE, min(change, self._MAX_LOG_CHANGE))
        if width > 1:
            self._record_wide_pass(width, change)
            return
        self._steps += 1
        self._spread += (abs(change) - self._spread) / min(self._steps, 10)
        if self._is_deviating and change / self._deviation > 0.5:
            # Single-token and multi-token passes have slowed down or sped up by a similar factor, so scale
            # both estimates.
            bucket.target_step_seconds *= math.exp(change)
            bucket.log_ratios = dict(self._at_last_target_step.log_ratios)
            bucket.common_log_ratio = self._at_last_target_step.common_log_ratio
        else:
            rate = max(TARGET_STEP_WEIGHT, 1.0 / (bucket.target_steps + 1))
            bucket.target_step_seconds *= math.exp(rate * change)
        self._deviation, bucket.target_steps = 0.0, bucket.target_steps + 1
        self._at_last_target_step = bucket.copy()

    def _record_wide_pass(self, width: int, change: float) -> None:
        bucket = self._bucket
        rate = max(WIDE_PASS_WEIGHT, MIN_TARGET_STEPS / (bucket.wide_passes + MIN_TARGET_STEPS))
        log_ratio = bucket.log_ratios.get(width, bucket.common_log_ratio)
        bucket.log_ratios[width] = log_ratio + rate * change
        bucket.common_log_ratio += 0.5 * rate * (log_ratio + change - bucket.common_log_ratio)
        bucket.wide_passes += 1
        self._deviation += DEVIATION_WEIGHT * (change - self._deviation)

    def saved_statistics(self) -> dict[str, NDArray[Any]]:
        """Return the measured costs as named arrays, to be saved for later runs.

        Costs measured with concurrent replies or a different number of CPU threads are left out.
        """
        step = self.curve.target_step_seconds
        # Copy each bucket, because another thread may record passes in it at the same time.
        single = {
            context: bucket.copy()
            for (context, at), bucket in tuple(self._buckets.items())
            if at == self._measured
        }
        steps = [(at, each.target_step_seconds / step, each.common_log_ratio) for at, each in single.items()]
        wide = [(at, width, ratio) for at, each in single.items() for width, ratio in each.log_ratios.items()]
        return {"found": np.array(steps), "extra": np.array(wide).reshape(-1, 3)}

    def restore_statistics(self, saved: Mapping[str, NDArray[Any]]) -> None:
        """Restore costs from `saved_statistics`. Raises KeyError or ValueError if they are damaged.

        Has no effect if another slot has already restored them.
        """
        if self._is_restored:
            return
        buckets = {}
        for context, steps, common in saved["found"].reshape(-1, 3).tolist():
            is_known = 0 <= context <= len(CONTEXT_BUCKETS)
            if not (
                is_known and steps > 0.0 and max(abs(math.log(steps)), abs(common)) < _MAX_LOG_SAVED_RATIO
            ):
                raise ValueError(
                    f"the saved speed measurements are damaged: invalid pass costs {steps}, {common}"
                )
            seconds = steps * self.curve.target_step_seconds
            buckets[int(context)] = _Bucket(seconds, common_log_ratio=common)
        for context, width, log_ratio in saved["extra"].reshape(-1, 3).tolist():
            if not (abs(log_ratio) < _MAX_LOG_SAVED_RATIO and 1 < width < math.inf):
                raise ValueError(
                    f"the saved speed measurements are damaged: invalid cost of a {width}-token pass:"
                    f" {log_ratio}"
                )
            buckets[int(context)].log_ratios[int(width)] = log_ratio
        self._buckets.clear()
        self._buckets |= {(context, self._measured): bucket for context, bucket in buckets.items()}
        self._key = (0, self._measured)
        self._bucket = self._buckets.setdefault(self._key, _Bucket(self.curve.target_step_seconds))
        self._at_last_target_step = self._bucket.copy()
        self._is_restored = True
