"""Constants for the estimates that rank models before they have run. See `speedup_estimate` and `drafts`.

Acceptance rates and pass costs measured on this machine replace the assumed ones where they are known.
"""

from __future__ import annotations

# Minimum size in bytes of the weights that a model reads per pass for its speed to be predicted. The passes
# of smaller models are dominated by fixed costs, so speeds derived from the size would be too high. The limit
# was chosen because a CPU reads 64 MiB in 1 to 3 ms, and below `FAST_TARGET_SECONDS`
# (`methods/auto/constants.py`), drafting usually costs more than it saves.
MIN_ESTIMABLE_BYTES = 64 * 2**20

# Assumed acceptance rate of a draft model as large as the target, and the decrease for every tenfold
# reduction in size. The values were chosen rather than measured, because they only rank models that have not
# run yet.
RATE_AT_EQUAL_SIZE, RATE_PER_DECADE = 0.86, 0.08
# Limits on the assumed acceptance rate, chosen so that extreme sizes do not give rates near 0 or 1.
MIN_ASSUMED_RATE, MAX_ASSUMED_RATE = 0.3, 0.95
# Assumed size of a draft model relative to the target if either file cannot be read, chosen as a typical
# ratio.
ASSUMED_SIZE_RATIO = 0.1
# Assumed acceptance rate of a head or a low-bit copy. It is derived from a published benchmark: AngelSlim
# measured 1.99 tokens per target pass with its EAGLE-3 head for Qwen 3 8B and two-token drafts, which
# corresponds to a rate of 0.62.
HEAD_RATE = 0.62
# Assumed cost of verifying one more token in the same pass, relative to a single-token pass of the target. It
# was measured with F16 weights on two CPU cores, for which the curve in `scripts/simulation/machines.py`
# gives 0.137 between one and four tokens. The value is used only to rank models that are not loaded:
# `speed_prediction` uses the measured speed of this machine instead, and `auto` measures the loaded model.
COST_PER_ROW = 0.14
# Maximum draft length to consider when estimating a speed-up, chosen as half of the maximum of `auto`.
MAX_ESTIMATED_DRAFT_LENGTH = 8

# Minimum number of drafted tokens for a usable acceptance rate, chosen so that the standard error of the rate
# is at most 0.035.
MIN_DRAFTED = 200
# Number of drafted tokens above which the counts are halved, so that recent replies have more weight. The
# limit was chosen as a hundred times `MIN_DRAFTED`.
MAX_DRAFTED = 20_000
# Save the acceptance counts after this many drafted tokens, chosen so that the file is not written after
# every reply.
SAVE_EVERY_DRAFTED = 2_000

# Maximum size of a draft model relative to the target, in bytes read per token. It was chosen because larger
# draft models are rarely fast enough.
MAX_STEP_COST = 0.5
# Minimum fraction of the target's tokens that a draft model must share. It was chosen so that most tokens can
# be drafted.
MIN_SHARED_FRACTION = 0.5
# Minimum fraction of the target's tokens that a draft model selected by `--draft auto` must share. It was
# chosen so that models selected automatically lack only a few tokens.
AUTO_MIN_SHARED_FRACTION = 0.9
# Speed-up estimates count as equal if the ratio of the smaller to the larger is at least this value. It was
# chosen so that the catalogue's order decides between similar estimates.
EQUAL_SPEEDUP_RATIO = 0.97
# Context length in tokens that is assumed when estimating KV cache sizes, chosen to match a long chat.
ESTIMATED_CONTEXT_TOKENS = 8192
