"""Constants for cost measurements: which passes to time, for how long, and which results to use.

The costs themselves are measured on the machine with the loaded model.
"""

from __future__ import annotations

__all__ = [
    "ASSUMED_COST_PER_TOKEN",
    "BENCHMARK_BYTES",
    "BENCHMARK_PROMPT_TOKENS",
    "BUDGET_SECONDS",
    "CHANGE_REPEATS",
    "MACHINE_REPEATS",
    "MACHINE_ROUNDS",
    "MACHINE_WIDTHS",
    "MAX_EXCESS",
    "MAX_FLAT_COST",
    "MAX_REQUIRED_PADDED_WIDTH",
    "MAX_STEP_RATIO",
    "MAX_THREAD_SLOWDOWN",
    "MEASURED_WIDTHS",
    "MIN_BUDGET_STEPS",
    "MIN_THREAD_GAIN",
    "PLAIN_STEP_WEIGHT",
    "REPEATS",
    "REQUIRED_WIDTHS",
    "STREAMED_LAYERS_RATIO",
    "THREAD_BUDGET_SECONDS",
    "THREAD_ROUNDS",
    "THREAD_SHARES",
    "TYPE_SECONDS",
    "WIDE_WIDTH",
]

# --- Cost curve of a loaded model (`curve.py`, `target_costs.py`) ---

# Pass widths to measure. They were chosen to be closer together among small widths, because backends use
# different kernels for them.
MEASURED_WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)
# Pass widths to measure even if the time budget is spent, chosen to show the shape of the curve with few
# passes.
REQUIRED_WIDTHS = (1, 2, 4, 8)
# Another width to measure even if the time budget is spent, or the next larger one that is measured, if the
# widest of these passes costs less than `MAX_FLAT_COST`. The curve is then flat, for example because most of
# the time is spent reading weights from disk, so that long drafts pay, and extrapolating would multiply the
# noise of narrow passes. The width was chosen to cover the longest drafts, and the cost so that the wide pass
# takes at most a few times as long as a narrow one.
WIDE_WIDTH, MAX_FLAT_COST = 16, 2.0
# For models that pad their passes, the largest width to measure even if the time budget is spent. Derived as
# one more than the largest of `REQUIRED_WIDTHS`.
MAX_REQUIRED_PADDED_WIDTH = 9
# Number of additional measurements of `CostCurve.change_seconds`. A large number was chosen, because an
# overestimate would make drafting seem too expensive for as long as the model is loaded.
CHANGE_REPEATS = 20
# Default time budget of a measurement in seconds, and the minimum budget in single-token passes. Both were
# chosen to keep the first load of a model short.
BUDGET_SECONDS, MIN_BUDGET_STEPS = 2.0, 12
# Default number of additional passes per width, chosen so that two outliers cannot affect the median.
REPEATS = 5
# Maximum duration of a pass, as a multiple of a wider pass's duration. The limit was chosen to be generous.
# The largest multiple in `scripts/simulation/machines.py` is 1.41 (three versus four tokens on two CPU cores
# with Q4_0).
MAX_EXCESS = 3.0
# Assumed cost of each additional token in a pass, relative to a single-token pass, if only single-token
# passes were measured. A low value was chosen, so that unknown costs do not rule out drafting.
ASSUMED_COST_PER_TOKEN = 0.05
# Discard saved pass durations if a single-token pass is now slower or faster by more than this factor. The
# factor was chosen to exceed the usual variation in a machine's speed.
MAX_STEP_RATIO = 2.0
# Saved pass durations of a model that is read from disk are reused if the number of streamed layers has
# changed by less than about this factor. It was chosen to cover small changes in the amount of free memory,
# which would otherwise cause every load to measure the model again.
STREAMED_LAYERS_RATIO = 1.1
# Weight of the newest token in the moving average of the time per token without drafting, chosen to average
# over about five tokens.
PLAIN_STEP_WEIGHT = 0.2

# --- Number of CPU threads (`target_costs.py`) ---

# Thread counts to compare, as shares of the number of physical cores. Shares below 1 were chosen because half
# of the cores are slow on many laptops, and because a few cores can saturate the memory bandwidth.
THREAD_SHARES = (1.0, 0.75, 0.5, 0.34)
# Number of measurement rounds. Three was chosen as the fewest for which one outlier cannot affect the median.
THREAD_ROUNDS = 3
# After the first round, measure a thread count again only if it is slower than the fastest one by at most
# this factor. The factor was chosen to exceed the noise of a single pass.
MAX_THREAD_SLOWDOWN = 1.25
# Seconds after which no new measurement round starts, chosen to keep the first load of a model short.
THREAD_BUDGET_SECONDS = 2.0
# Use one thread per physical core unless another count is faster by this factor. The factor was chosen
# because smaller differences are often noise.
MIN_THREAD_GAIN = 1.05

# --- Machine speed (`machine_speed.py`) ---

# Pass widths to measure with the benchmark models. Fewer were chosen than for a loaded model, because every
# quantisation type is measured.
MACHINE_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)
# Approximate weight size of each benchmark model, chosen so that the weights, like those of real models, do
# not fit into most processor caches.
BENCHMARK_BYTES = 192 * 2**20
# Number of prompt tokens for measuring prefill, chosen to keep the measurement short.
BENCHMARK_PROMPT_TOKENS = 32
# Number of measurement rounds over all quantisation types. The shortest durations are used. Two rounds were
# chosen because other activity can slow down a machine for a few seconds.
MACHINE_ROUNDS = 2
# Number of additional passes per width, and time budget in seconds per type and round. Both were chosen so
# that measuring all types takes less than 20 seconds.
MACHINE_REPEATS, TYPE_SECONDS = 3, 0.6
