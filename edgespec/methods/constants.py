"""Drafter constants: draft lengths and widths, and assumptions about drafters that have not run yet.

Constants for when to draft are in `methods/auto/constants.py`, and constants for measuring passes in
`methods/costs/constants.py`. The constants for training between replies are in `model/online.py`.
"""

from __future__ import annotations

from edgespec.store.constants import MAX_ASSUMED_RATE

__all__ = [
    "ACCEPTANCE_DECAY",
    "AGREEMENT_TOKENS",
    "ASSUMED_DRAFT_PASS_COST",
    "DEFAULT_MAX_BRANCHES",
    "DEFAULT_MAX_WIDTH",
    "DRAFT_PROB_EDGES",
    "DRAFT_PROB_PRIOR",
    "FIXED_DRAFT_LENGTH",
    "LONG_ACCEPTANCE_DECAY",
    "LOOKAHEAD_DRAFT_LENGTH",
    "LOOKAHEAD_PASSES_PER_HIT",
    "LOOKAHEAD_PROMPT_TOKENS",
    "LOOKAHEAD_RECENT_TOKENS",
    "LOOKAHEAD_TOKEN_PROBABILITY",
    "MAX_CONTINUATION_TOKENS",
    "MAX_COPY_SHARE",
    "MAX_DRAFT_LENGTH",
    "MAX_EXIT_DRAFT_LENGTH",
    "MAX_FORCED_TOKENS",
    "MAX_LOOKAHEAD_LEVELS",
    "MAX_MATCH_TOKENS",
    "MAX_NGRAMS_PER_TOKEN",
    "MAX_RESTORED_COUNT",
    "MAX_SAMPLED_OCCURRENCES",
    "MAX_TREE_WIDTH",
    "MEAN_VALUES",
    "MIN_GOOD_FRACTION",
    "MIN_TRAINED_AGREEMENT",
    "MIN_TRANSLATED_FRACTION",
    "OTHER_CHATS_TOKENS",
    "PRIOR_WEIGHT",
    "SINK_TOKENS",
    "STEEP_COST",
    "SUFFIX_LENGTH_FACTOR",
    "SUFFIX_MIN_PROBABILITY",
    "TOP_TOKENS",
    "TREE_BRANCHES",
    "TYPICAL_PRIOR",
    "WARM_UP_TOKENS",
    "WEIGHT_AFTER_PAUSE",
    "WINDOW_TOKENS",
    "WINDOW_TREE_TOKENS",
]

# --- Draft lengths and widths ---

# Maximum draft length, in tokens, for drafters that choose the length themselves. It also limits the pass
# widths that are tested for exactness, and the draft lengths that `edgespec tune` recommends. It was chosen
# because longer drafts rarely help: even if each token is accepted with a probability of 0.9, only one
# 16-token draft in five is accepted in full.
MAX_DRAFT_LENGTH = 16
# Draft length, in tokens, for drafters that do not choose their own, chosen to be small so that a rejected
# draft costs little.
FIXED_DRAFT_LENGTH = 4
# Maximum number of tokens in an adaptive tree, including its root. The limit was chosen to bound the time for
# planning a tree. Most trees stay smaller because of the measured pass costs.
MAX_TREE_WIDTH = 64
# Default maximum numbers of tokens and leaves in a verify pass. They were chosen to bound passes on targets
# that support larger ones.
DEFAULT_MAX_WIDTH, DEFAULT_MAX_BRANCHES = 64, 8
# Minimum number of leaves that a target must be able to verify for methods that draft trees. The number was
# chosen as twice `DEFAULT_MAX_BRANCHES`.
TREE_BRANCHES = 16
# Maximum number of consecutive constraint-determined tokens to draft. The number was chosen to match the
# maximum draft length of other drafters.
MAX_FORCED_TOKENS = 16

# --- Adaptive trees (`tree_growth.py`) ---

# Maximum number of tree levels to plan ahead, chosen because estimates for deeper levels are too uncertain.
MAX_LOOKAHEAD_LEVELS = 4
# If a two-token pass takes at least this many times as long as a single-token pass, `force_draft` drafts two
# tokens instead of one. The value was chosen because a single drafted token cannot save time if the ratio is
# 2.
STEEP_COST = 1.9
# Assumed duration of a draft model pass, in single-token target passes, until it is measured. It was chosen
# for a draft model a fifth the size of the target. `auto` measures draft models and heads when they are first
# used (`Drafter.warm_up`).
ASSUMED_DRAFT_PASS_COST = 0.2
# Bin edges for counting acceptance by draft probability. They were chosen to be closer together near 0 and 1,
# where small differences matter more.
DRAFT_PROB_EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
# Assumed acceptance probability in each bin of `DRAFT_PROB_EDGES`, before any tokens have been counted.
# Values near the middle of each bin were chosen, which assumes that the draft model is well calibrated.
DRAFT_PROB_PRIOR = (0.01, 0.035, 0.07, 0.15, 0.27, 0.42, 0.57, 0.72, 0.85, 0.93, 0.98)
# Assumed acceptance probability of the draft model's most likely token, until tokens have been counted. A
# high value was chosen, so that untested draft models are tried.
TYPICAL_PRIOR = 0.7

# --- Running statistics (`running_stats.py`, `auto/drafter_stats.py`) ---

# Number of recent values in a running mean, chosen so that the mean follows changes within a reply.
MEAN_VALUES = 10
# A mean restored from an earlier run counts as at most this many values. The number was chosen so that new
# values soon outweigh it.
MAX_RESTORED_COUNT = 5
# Each new token multiplies the earlier acceptance counts by this factor. It was chosen so that a token loses
# half of its weight after 34 more tokens.
ACCEPTANCE_DECAY = 0.98
# Decay factor for long-term acceptance counts, chosen so that a token loses half of its weight after 346 more
# tokens.
LONG_ACCEPTANCE_DECAY = 0.998
# Weight of assumed acceptance probabilities, as a number of drafted tokens. It was chosen so that
# measurements soon outweigh them.
PRIOR_WEIGHT = 4.0
# When drafting resumes after a pause, earlier results count as at most this many drafted tokens. A low number
# was chosen, because the text may have changed.
WEIGHT_AFTER_PAUSE = 2.0

# --- Draft models (`draft_cache.py`, `model/`) ---

# Number of tokens at the beginning of a sequence that a draft model always keeps ("attention sinks"). Four
# were chosen because they suffice in StreamingLLM (arXiv 2309.17453).
SINK_TOKENS = 4
# Draft probabilities are computed only for this many of the most likely tokens. The number was chosen to
# avoid sorting the whole vocabulary, which is slow.
TOP_TOKENS = 64
# Default number of recent tokens that a draft model with an attention window sees, chosen to keep its KV
# cache small.
WINDOW_TOKENS = 1024
# Number of tokens reserved for draft trees in a windowed draft model's context, chosen as twice
# `MAX_TREE_WIDTH`.
WINDOW_TREE_TOKENS = 128
# Number of prompt tokens used to measure a draft model's speed on first use, chosen to keep the delay short.
WARM_UP_TOKENS = 16
# Translate token ids only if the draft model shares at least this fraction of the target's tokens. Otherwise,
# retokenize the draft model's text for the target. The fraction was chosen so that most tokens can be
# drafted.
MIN_TRANSLATED_FRACTION = 0.5
# Warn the user if the draft model has less than this fraction of the target's tokens, because then fewer
# drafted tokens are accepted. The fraction was chosen so that a few missing tokens cause no warning.
MIN_GOOD_FRACTION = 0.9

# --- Text lookup (`suffix/`) ---

# Maximum number of tokens at the end of the chat to match against earlier text, chosen to limit the lookup
# time.
MAX_MATCH_TOKENS = 32
# Maximum number of tokens to draft after a match, chosen to match `max_tokens` in ArcticInference's suffix
# decoding.
MAX_CONTINUATION_TOKENS = 32
# Number of drafted tokens per matched token, and the minimum estimated probability of a drafted token and all
# its ancestors. Both were chosen to match ArcticInference's suffix decoding.
SUFFIX_LENGTH_FACTOR, SUFFIX_MIN_PROBABILITY = 1.0, 0.1
# Maximum number of occurrences of a match to examine. If there are more, an evenly spaced sample is used. The
# limit was chosen to keep lookups fast.
MAX_SAMPLED_OCCURRENCES = 64
# Number of recent tokens from other chats to search, chosen to limit the index's memory use.
OTHER_CHATS_TOKENS = 1 << 13

# --- Lookahead decoding (`lookahead/`) ---

# Maximum draft length assumed when the size of the lookahead window is selected at load time. It was chosen
# to match the maximum draft length of other drafters.
LOOKAHEAD_DRAFT_LENGTH = MAX_DRAFT_LENGTH
# Initial guesses for future tokens are drawn at random from this many recent tokens. The number was chosen so
# that guesses fit the current text.
LOOKAHEAD_RECENT_TOKENS = 512
# Number of tokens at the end of the prompt whose n-grams are indexed for drafting, chosen to limit the
# indexing time.
LOOKAHEAD_PROMPT_TOKENS = 1 << 14
# Assumed probability that a drafted token is accepted, and assumed number of verify passes per useful draft.
# Both were chosen rather than measured, because the window size is needed before anything has been drafted.
LOOKAHEAD_TOKEN_PROBABILITY, LOOKAHEAD_PASSES_PER_HIT = 0.4, 3.0
# Maximum number of n-grams to remember for each first token. Derived from the largest window, which verifies
# this many.
MAX_NGRAMS_PER_TOKEN = 16

# --- Drafting with the target itself (`layerskip/`, `lowbit/`) ---

# Maximum draft length to consider when selecting the exit layer. It was chosen to limit the number of widths
# to measure.
MAX_EXIT_DRAFT_LENGTH = 12
# A model was probably trained for early exit if its lower layers predict the same token as the full model at
# least this often. The threshold was chosen as a clear majority. It affects only the message shown if early
# exit is not faster.
MIN_TRAINED_AGREEMENT = 0.6
# Number of reply tokens on which the agreement of an exit layer is measured, chosen to keep the measurement
# short.
AGREEMENT_TOKENS = 96
# A pass of the low-bit copy must read less than this fraction of the model's bytes. Derived from the best
# case on any machine, because the limit also decides whether to make a copy before anything can be measured:
# even if checking drafted tokens took no time, and the share `MAX_ASSUMED_RATE` of them were accepted,
# drafting with a larger copy would be less than 5 % faster. `auto` decides by measured times whether to draft
# with a copy.
MAX_COPY_SHARE = (1.0 + MAX_ASSUMED_RATE) / 1.05 - 1.0
