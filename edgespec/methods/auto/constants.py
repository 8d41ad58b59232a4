"""Constants for `--method auto`: when to draft, with which drafter, and how much time a reply can lose.

The values were chosen rather than measured individually. `scripts/simulate_policy.py` shows their combined
effect for several machines and acceptance rates (docs/policy.md). Costs are in *target steps*, the duration
of a single-token target pass, so that they do not depend on the speed of a machine.
"""

from __future__ import annotations

__all__ = [
    "ASSUMED_LEVEL_COST",
    "ASSUMED_PASS_RATIO",
    "ASSUMED_PREFILL_COST",
    "ASSUMED_RATIO_OF_THREADS",
    "CHALLENGE_ROUNDS",
    "CODE_SHARE",
    "COMPARED_DRAFT_LENGTHS",
    "CONTEXT_BUCKETS",
    "DEVIATION_WEIGHT",
    "DIGIT_SHARE",
    "DRAFT_ROUND_DECAY",
    "EXPLORATION_RATE",
    "FAST_TARGET_SECONDS",
    "FIRST_DECAY",
    "FIRST_PASSES",
    "FIRST_ROUNDS",
    "FIRST_ROUNDS_SHARE",
    "INSPECTED_CHARACTERS",
    "LINK_DECAY",
    "LONG_TERM_PRIOR_WEIGHT",
    "LOOKUP_PRIOR",
    "MAX_CHANGE",
    "MAX_DEVIATION",
    "MAX_LEVEL_COST_RATIO",
    "MAX_LEVEL_PASSES",
    "MAX_LOSS_RATE",
    "MAX_LOSS_STEPS",
    "MAX_PAUSE_ROUNDS",
    "MAX_PROB_SUM",
    "MAX_REPLIES",
    "MAX_RETRY_INTERVAL",
    "MAX_SAVED_RATIO",
    "MAX_TOKENS_AT_RISK",
    "MEASURED_ROUNDS",
    "MIN_COMPARED_TOKENS",
    "MIN_DOCUMENT_CHARACTERS",
    "MIN_GAIN",
    "MIN_INTERIM_GAIN",
    "MIN_PAUSE_ROUNDS",
    "MIN_PREFILL_TOKENS",
    "MIN_RETRY_INTERVAL",
    "MIN_TARGET_STEPS",
    "MODEL_PRIOR",
    "NEGLIGIBLE_COST",
    "PAUSED_ROUNDS",
    "PREFILL_ROUNDS",
    "PREFILL_SHARE",
    "RARE_FACTOR",
    "REMEASURE_TOKENS",
    "RETRY_COST_FACTOR",
    "RETRY_ROUNDS",
    "RETRY_SHARE",
    "SAVE_INTERVAL_SECONDS",
    "SETTLED_PASSES",
    "STREAKS",
    "TARGET_STEP_WEIGHT",
    "TEXT_KIND_TOKENS",
    "TOKENS_PER_RETRY",
    "TRIAL_ROUNDS",
    "VERIFY_DECAY",
    "WIDE_PASS_WEIGHT",
    "WORST_DRAFT_STEP_DECAY",
    "WORST_PASS_STEP_DECAY",
]

# --- Loss limit (`loss_limit.py`) ---

# Default maximum slowdown of a reply if no drafts are accepted: a share of its plain decoding time, plus a
# number of target steps that allows even short replies to try a draft. Both were chosen so that the slowdown
# is hard to notice.
MAX_LOSS_RATE, MAX_LOSS_STEPS = 0.02, 2.0
# Maximum time to spend trying drafters that do not seem to help, as a share of a reply's plain decoding time.
# The value was chosen as half of `MAX_LOSS_RATE`.
EXPLORATION_RATE = 0.01

# --- Controller (`controller.py`) ---

# Maximum number of tokens between two measurements of the target step, chosen so that only about 1 % of all
# tokens are spent on measuring.
REMEASURE_TOKENS = 96
# While drafting is paused, consider resuming it only once per this many tokens. The interval was chosen
# because the check is noticeably slow on small models.
PAUSED_ROUNDS = 15
# Minimum seconds between saves of the statistics, chosen to avoid frequent writes.
SAVE_INTERVAL_SECONDS = 60.0
# Omit drafters from the report if they saved no time and drafted less than once per this many tokens. The
# threshold was chosen because drafts that rare are merely retries.
TOKENS_PER_RETRY = 16
# Minimum length, in tokens, of a reply whose speed-up is reported. The minimum was chosen because the
# speed-up of shorter replies varies too much.
MIN_COMPARED_TOKENS = 16
# If a target step takes fewer seconds than this and drafting has saved no time, tell the user that the model
# is too fast to benefit from drafting. The threshold was chosen because the fixed costs of a draft matter
# more when a target step is short. It affects only this message, not the decision to draft.
FAST_TARGET_SECONDS = 0.003

# --- Pauses (`backoff.py`) ---

# Pause drafting if its mean gain falls below this share of a target step. The threshold was chosen to be
# slightly negative, so that drafting continues if it breaks even.
MIN_GAIN = -0.01
# Never pause drafting if an unsuccessful search for a draft takes less than this share of a target step. The
# value was chosen to be smaller than the loss that `MIN_GAIN` tolerates.
NEGLIGIBLE_COST = 0.005
# Minimum number of drafts before the first pause, chosen so that a few rejected drafts are not enough to
# pause drafting.
TRIAL_ROUNDS = 8
# Number of drafts in each attempt to resume drafting after a pause. It was chosen to be smaller than
# `TRIAL_ROUNDS`, to lose less time.
RETRY_ROUNDS = 4
# Initial and maximum pause in drafting, as a number of target passes. The pause doubles after each
# unsuccessful attempt to resume drafting. The initial pause was chosen so that the first retry comes after a
# sentence or two.
MIN_PAUSE_ROUNDS, MAX_PAUSE_ROUNDS = 32, 512
# Factor applied to the estimated cost of resuming drafting, chosen to make retries rarer.
RETRY_COST_FACTOR = 3

# --- Retries of individual drafters (`backoff.py`, `model_selection.py`) ---

# Number of rounds between the first two retries of a drafter, and the maximum after many unsuccessful
# retries. Both were chosen to be shorter than pauses that stop all drafting, because only one drafter is
# affected.
MIN_RETRY_INTERVAL, MAX_RETRY_INTERVAL = 4, 128
# Maximum share of the decoding time to spend on retrying drafters that save no time. The value was chosen to
# stay below `EXPLORATION_RATE`.
RETRY_SHARE = 0.0075
# Retries count as rare if the interval is at least this many times the shortest one. The factor was chosen so
# that three unsuccessful retries, each of which doubles the interval, reach it.
RARE_FACTOR = 8
# Retry unsuccessful drafters only while the other drafters are expected to contribute at most this many
# accepted tokens per pass. The limit was chosen to be low, because a retry sacrifices those tokens.
MAX_TOKENS_AT_RISK = 0.5
# Number of rounds for which to try a draft model other than the best one. The number was chosen to limit the
# time lost.
CHALLENGE_ROUNDS = 4
# While a better draft model waits for its prefill, run another one only if its expected speed-up is at least
# this. The minimum was chosen because smaller measured gains are often noise.
MIN_INTERIM_GAIN = 1.15
# Draft lengths to compare for drafters that choose their own length. They were chosen to be closer together
# at the short end, where one more token makes a larger difference.
COMPARED_DRAFT_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16)

# --- Draft model prefill (`drafter_stats.py`, `model_selection.py`) ---

# Prefilling draft models may use at most this share of the time that `--max-loss` allows. The share was
# chosen to leave the other half for drafts.
PREFILL_SHARE = 0.5
# Minimum number of tokens to prefill, chosen because a draft model that sees fewer tokens rarely predicts
# correctly.
MIN_PREFILL_TOKENS = 32
# Number of measurements needed to estimate a duration. It was chosen because the first one is often too high.
MEASURED_ROUNDS = 2
# Assumed time to prefill one token, in target steps, until it is measured. The value was chosen to be close
# to the costs in `scripts/simulation/machines.py`. The actual time is measured when a draft model is first
# used.
ASSUMED_PREFILL_COST = 0.03
# Number of draft-and-verify rounds over which to amortise the cost of a prefill when estimating whether
# drafting saves time. The number was chosen to be typical of a medium-length reply.
PREFILL_ROUNDS = 48

# --- Assumed acceptance rates (`drafter_stats.py`) ---

# Upper limit on the total acceptance probability of a node's children. A value below 1 was chosen, because
# acceptance is never certain.
MAX_PROB_SUM = 0.98
# Acceptance of lookups is counted separately after 0, 1 to 3, 4 to 15, and at least 16 accepted tokens in a
# row. The bounds were chosen so that each is four times the previous one.
STREAKS = (1, 4, 16)
# Assumed acceptance probability of a node's first, second and later children in lookup drafts, with one row
# per range of `STREAKS`. The values were chosen so that the first child's probability increases from row to
# row.
LOOKUP_PRIOR = ((0.4, 0.1, 0.05), (0.6, 0.1, 0.05), (0.75, 0.1, 0.05), (0.9, 0.05, 0.02))
# Assumed acceptance probability of a node's first, second and later children in drafts from draft models. The
# first value was chosen to be high, so that draft models are tried.
MODEL_PRIOR = ((0.85, 0.1, 0.05),)
# Weight of the assumed probabilities in long-term rates, as a number of drafted tokens. It was chosen to be
# higher than `PRIOR_WEIGHT` (`methods/constants.py`), so that a few rejected tokens do not rule out a
# drafter.
LONG_TERM_PRIOR_WEIGHT = 12.0

# --- Live pass costs (`live_costs.py`) ---

# Boundaries, in tokens, between the ranges of context lengths. Costs are tracked separately for each range,
# because passes take longer as the context grows. The boundaries were chosen so that each is four times the
# previous one.
CONTEXT_BUCKETS = (2048, 8192, 32768)
# Track costs separately for each number of concurrent replies up to this limit. Larger numbers share one set
# of costs. The limit was chosen to keep the number of measurements small.
MAX_REPLIES = 8
# After the number of concurrent replies or CPU threads changes, measure this many target steps before
# trusting the costs. The number was chosen to be small so that drafting resumes soon.
MIN_TARGET_STEPS = 3
# New estimates of pass costs adapt faster until about this many multi-token passes have been measured. The
# number was chosen as the point at which the faster rate has fallen to `WIDE_PASS_WEIGHT`.
SETTLED_PASSES = 20
# Assumed ratio of a verify pass's worst-case duration to its expected duration, after a change in the number
# of concurrent replies and of CPU threads, respectively. The values were chosen to be on the safe side.
# Measurements replace them within `FIRST_PASSES` passes.
ASSUMED_PASS_RATIO, ASSUMED_RATIO_OF_THREADS = 2.0, 1.25
# Decay factors for the worst-case ratio, applied after each target step and each verify pass, respectively,
# so that outliers are forgotten. They were chosen so that a slow pass is remembered for dozens of passes.
WORST_PASS_STEP_DECAY, VERIFY_DECAY = 0.995, 0.97
# Replaces `WORST_PASS_STEP_DECAY` if layers run on workers. The value was chosen to equal `VERIFY_DECAY`.
# Passes on workers are often delayed for reasons unrelated to drafting, and a single slow pass must not stop
# drafting for the rest of the reply.
LINK_DECAY = 0.97
# `FIRST_DECAY` replaces `VERIFY_DECAY` during the first `FIRST_PASSES` verify passes. It was chosen so that
# measurements soon replace the assumed ratio.
FIRST_DECAY, FIRST_PASSES = 0.8, 4
# Saved costs are treated as damaged if they differ from measured costs by more than this factor. The factor
# was chosen to be far larger than any change in a machine's speed.
MAX_SAVED_RATIO = 1000.0
# Weight of the newest measurement in the estimated duration of a target step, chosen to average over about
# four steps.
TARGET_STEP_WEIGHT = 0.25
# Weight of the newest measurement in the moving average of the cost of multi-token passes, chosen to average
# over about seven passes.
WIDE_PASS_WEIGHT = 0.15
# Maximum factor by which a single pass can change an estimate, chosen to limit the effect of interruptions.
MAX_CHANGE = 4.0
# If multi-token passes deviate from their estimated durations by more than this factor, the machine's speed
# may have changed. The factor was chosen to exceed the usual variation between passes.
MAX_DEVIATION = 1.25
# Weight of the newest pass in the moving average of the ratio of actual to estimated durations, chosen to
# average over about three passes.
DEVIATION_WEIGHT = 0.3

# --- Worst-case draft costs (`loss_limit.py`) ---

# Assumed time to draft one token, in target steps, if the draft model has not been measured. A value above
# `ASSUMED_DRAFT_PASS_COST` was chosen, because this is a worst case.
ASSUMED_LEVEL_COST = 0.3
# Worst-case time to draft one token, including sampling, relative to a pass of the draft model. The value was
# chosen to be on the safe side.
MAX_LEVEL_PASSES = 1.5
# Decay factors for the worst-case time to draft a token, applied after each draft and each target step,
# respectively, so that outliers are forgotten. They were chosen to match `VERIFY_DECAY` and
# `WORST_PASS_STEP_DECAY`.
DRAFT_ROUND_DECAY, WORST_DRAFT_STEP_DECAY = 0.97, 0.995
# The first `FIRST_ROUNDS` drafts of a reply may each lose only `FIRST_ROUNDS_SHARE` of the time that
# `--max-loss` allows. The share was chosen so that drafting can continue if one of them is rejected.
FIRST_ROUNDS, FIRST_ROUNDS_SHARE = 2, 0.5
# Do not shorten a draft if that would raise its cost per token by more than this factor. The factor was
# chosen so that a shorter draft costs only slightly more per token.
MAX_LEVEL_COST_RATIO = 1.25

# --- Kinds of text (`drafter_stats.py`) ---

# Determine the kind of a text from at most this many tokens and characters at its end. Both limits were
# chosen to keep classification fast.
TEXT_KIND_TOKENS, INSPECTED_CHARACTERS = 512, 2000
# Prompts of more than this many characters are classified as documents rather than conversation. The limit
# was chosen to be about 200 words.
MIN_DOCUMENT_CHARACTERS = 1200
# Minimum share of code-like lines in a prompt classified as code, and of digits in one classified as numbers.
# The shares were chosen so that a few such lines or digits make no difference.
CODE_SHARE, DIGIT_SHARE = 0.25, 0.06
