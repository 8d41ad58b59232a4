"""Constants for benchmarks, races and `edgespec tune`: how much to generate, and which differences matter."""

from __future__ import annotations

from edgespec.methods.constants import FIXED_DRAFT_LENGTH

__all__ = [
    "BOOTSTRAP_DRAWS",
    "CHECK_TOKENS",
    "CONFIDENCE_LEVEL",
    "EQUAL_SPEEDS",
    "MAX_BUSY_SHARE",
    "MAX_DRIFT",
    "MAX_PASS_RATIO",
    "MIN_SPEED_UP",
    "TRIED_DRAFT_LENGTH",
    "WARM_UP_TOKENS",
]

# Number of warm-up tokens per method, chosen to get a backend's slow first passes out of the way.
WARM_UP_TOKENS = 8

# Number of tokens that plain decoding generates again after the race, to check whether the machine's speed
# has changed. It was chosen to keep the check short.
CHECK_TOKENS = 32
# Maximum absolute value of `Race.drift` in a fair race, chosen by judgement. A larger drift makes the result
# unreliable.
MAX_DRIFT = 0.2
# Speeds that differ by less than this fraction count as equal. The threshold was chosen because a single race
# cannot resolve smaller differences.
EQUAL_SPEEDS = 0.03
# A speed-up that exceeds the number of tokens per target pass by more than this factor cannot come from
# drafting. The factor was chosen to allow for noise.
MAX_PASS_RATIO = 1.15

# Minimum speed-up for `tune` to recommend a method. The threshold was chosen because a smaller speed-up could
# be measurement noise.
MIN_SPEED_UP = 1.05
# Warn if other programs used the CPU during more than this fraction of a method's passes. The threshold was
# chosen so that brief disturbances do not trigger the warning.
MAX_BUSY_SHARE = 0.2
# Draft length in tokens at which `tune` tries each drafter, chosen to match the default for drafters with a
# fixed length.
TRIED_DRAFT_LENGTH = FIXED_DRAFT_LENGTH

# Number of bootstrap resamples, and the confidence level. Both were chosen as commonly used values.
BOOTSTRAP_DRAWS, CONFIDENCE_LEVEL = 2000, 0.95
