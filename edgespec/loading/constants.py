"""Constants for loading models: pass widths to test and use, recommendations, and assumptions."""

from __future__ import annotations

from edgespec.memory.constants import SHORT_CONTEXT_TOKENS
from edgespec.methods.constants import DEFAULT_MAX_WIDTH, FIXED_DRAFT_LENGTH, MAX_DRAFT_LENGTH

# --- Bit-exact passes (`exact.py`) ---

# `auto` accepts bit-exact passes if their expected speed is at least this fraction of the speed with
# `--exactness off`. The value was chosen as an acceptable price for identical replies (docs/exactness.md).
MIN_EXACT_SPEED = 0.97
# `auto` pads plain decoding to wider passes, or does without repacking, only if single-token passes then take
# at most this fraction longer. Like `MIN_EXACT_SPEED`, the value was chosen as an acceptable price for
# identical replies.
MAX_PLAIN_LOSS = 0.03
# Pass widths to measure and compare, up to the pass over the longest draft. They were chosen so that wide
# passes are sampled more sparsely.
COMPARED_WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, MAX_DRAFT_LENGTH, MAX_DRAFT_LENGTH + 1)
# Time budget in seconds for measuring `COMPARED_WIDTHS`, and number of additional passes per width. Both were
# chosen to keep the first load of a model short.
COMPARED_SECONDS, COMPARED_REPEATS = 1.5, 7
# Assumed acceptance rates of drafts from earlier text: the average over all kinds of text, and the rate in
# repetitive text. They were chosen rather than measured, because passes are selected before any acceptance
# rate is known.
TEXT_RATE, REPEATING_RATE = 0.5, 0.9
# Assumed cost of a head per drafted token, in single-token passes. The value was chosen to reflect that a
# head has only one or a few layers, while the target has dozens.
HEAD_COST = 0.05
# Configurations whose expected speeds differ by less than this fraction count as equally fast. The one that
# is fastest in repetitive text is then used. The value was chosen to be below the measurement noise.
EQUALLY_FAST = 0.02

# --- Speed of the attention kernels (`attention_speed.py`) ---

# Number of prompt tokens and of single-token passes to time after `LONGEST_CONTEXT`. llama.cpp's attention
# has another kernel for at least 64 tokens. Both were chosen to be as small as possible, because a pass of a
# large model can take a second.
TIMED_PROMPT_TOKENS, TIMED_STEPS = 64, 3
# Number of tokens to process and then repeat to fill the context. The number was chosen to be small, because
# the contents of the cache hardly matter for the speed.
FILLING_TOKENS = 8
# Maximum number of comparisons of the kernels. They are compared again while their relative speed is below
# `MIN_EXACT_SPEED`, and the highest counts. The number was chosen because other programs rarely disturb the
# same kernels this often in a row.
MAX_COMPARISONS = 3

# --- Bit-exactness trial (`bit_exactness.py`) ---

# Width in tokens of the widest pass to test. Derived from the longest draft of `--method auto`.
MAX_TESTED_WIDTH = MAX_DRAFT_LENGTH + 1
# Passes wider than `SURELY_TESTED_WIDTH` are tested only if the next narrower pass agrees and they could save
# time. The time criterion is waived if a single-token pass takes less than `FAST_STEP_SECONDS`, because the
# trial is quick anyway. Both values were chosen to keep the trial short.
SURELY_TESTED_WIDTH, FAST_STEP_SECONDS = 8, 0.002
# Maximum ratio of an m-token pass's time to that of m single-token passes. Above it, the pass saves no time.
# Derived from the fact that such a pass generates at most m tokens.
MAX_SHARE_OF_SINGLE_PASSES = 1.0
# Lengths in tokens of the contexts before the tested passes. They were chosen to cover different kernels:
# llama.cpp uses a different attention kernel for passes of more than 63 tokens and splits contexts of more
# than 256 tokens between threads, and MLX switches its attention kernel at 1024 tokens. The longest context
# is tested only if the short one can be repeated, or if processing it takes less than `LONGEST_SECONDS`.
SHORT_CONTEXT, LONG_CONTEXT, LONGEST_CONTEXT = 72, 264, 1100
LONGEST_SECONDS = 0.2
# Number of positions to compare (logits and KV cells) after each context: in most models, and in models whose
# single-token pass takes at least `SLOW_STEP_SECONDS`. The numbers were chosen to find rare differences
# without a long trial. All widths are tested on the same positions, but compute them in different rows of a
# pass.
POSITIONS, FEWER_POSITIONS, SLOW_STEP_SECONDS = 36, 24, 0.015
# Maximum number of positions to compare after contexts other than the first, where only the attention kernels
# can differ. The number was chosen to be half of `POSITIONS`.
POSITIONS_AGAIN = 18
# Number of positions to compare in passes over all layers, if all other passes ran only a few layers. The
# number was chosen to keep the trial short, because a difference appears at nearly every position.
CONFIRMED_POSITIONS = 4
# Widths to compare, besides the largest, after contexts other than the first, if passes run only a few layers
# of a model on the CPU. They were chosen to lie on both sides of powers of two, where kernels usually change.
WIDTHS_AGAIN = (1, 2, 3, 4, 5, 8, 9, 16)
# Time limit of a trial: this many seconds, or the time of this many single-token passes if that is longer, as
# in models that are read from disk. Once it runs out, only widths that have been fully tested are used. The
# limits were chosen as the longest acceptable wait at the first load, where each token in a pass takes almost
# as long as a pass of its own, as with MLX on a CPU, so that wide passes save little time.
TRIAL_SECONDS, TRIAL_STEPS = 15.0, 150
# The trial tests widths after the first context, then widths after the others, and then trees and splits of
# prompts. It stops each of these steps once this share of the time limit has passed, to leave time for the
# passes over all layers that confirm the classes. The shares were chosen from the number of passes per step.
PHASE_SHARES = (0.5, 0.75, 0.9)
# If a single-token pass takes longer than `SLOW_PASS_SECONDS`, only the widths in `SLOW_PASS_WIDTHS` are run
# over all layers in a trial. If the first layers cannot run on their own, the trial compares only these
# widths, at `SLOW_PASS_POSITIONS` positions, after the short context and, if it can be repeated, the longest
# one. Each context takes about 40 passes. The values were chosen to limit the wait at the first load, and to
# include a wide pass, which takes little longer than a single-token pass if most of the time is spent reading
# from disk.
SLOW_PASS_SECONDS, SLOW_PASS_POSITIONS, SLOW_PASS_WIDTHS = 0.5, 16, (1, 2, 3, 4, 8, 16)
# Number of single-token passes to compare after each split of the prompt, if KV cells cannot be copied. The
# number was chosen to keep the trial short.
STEPS_AFTER = 2
# Number of test passes per width: after the first context, after other contexts, and, for widths above
# `SURELY_TESTED_WIDTH`, after any context. The numbers were chosen from measurements of Q4_K_M files of
# SmolLM2 and Gemma (x86 CPU with AVX-512): where a kernel differed, passes of 4 to 7 tokens revealed it in at
# least 6 of 8 places, regardless of the context, and passes of 8 to 12 tokens in 542 of 544. The hidden
# states after the first 6 layers revealed it in 576 of 576 passes, so trials of the first layers need only
# `FEWER_PASSES`.
PASSES, FEWER_PASSES, WIDE_PASSES = 4, 2, 1
# Number of passes to repeat, to check whether even identical passes agree. The number was chosen to keep the
# trial short.
EQUAL_PASSES = 4
# The KV cells of this many prompt tokens are compared after processing the prompt in passes of the sizes in
# `ANY_SPLIT` and `BLOCK_SPLIT`. The sizes were chosen so that each split covers these tokens exactly once,
# and those in `BLOCK_SPLIT` are multiples of `BLOCK_TOKENS`. If passes of `BLOCK_TOKENS` tokens differ from
# wider ones, or were not tested, prompts are split into blocks of `READ_TOKENS` (`memory/constants.py`).
SPLIT_TOKENS = 48
# Number of tokens in two prefill passes that are compared if widths are missing from a class. The first pass
# has a missing width. The number was chosen to divide `SPLIT_TOKENS` and to exceed `MAX_TESTED_WIDTH`.
UNPADDED_TOKENS = 24
ANY_SPLIT, BLOCK_SPLIT, BLOCK_TOKENS = (5, 17, 1, 3, 22), (16, 32), 16

# --- Recommendations (`recommendation.py`, `speed_prediction.py`, `model_list.py`, `planning.py`) ---

# Maximum share of a model's file that can be read from disk in every pass. The value was chosen to be
# slightly below the share of the feed-forward weights in common models, because those of the first layer stay
# in memory.
STREAMED_SHARE = 0.6
# Comfortable and minimum acceptable speeds for reading along, in tokens per second. They were chosen to be
# about twice the usual reading speed and about equal to it.
COMFORTABLE_SPEED, ACCEPTABLE_SPEED = 8.0, 4.0
# Recommend a draft model only if its expected speed-up is at least this. The threshold was chosen to match
# the typical difference between predicted and measured speeds in `scripts/bench_recommend.py`
# (docs/benchmarks.md).
MIN_DRAFT_SPEEDUP = 1.05
# Suggest another quantisation only if it is faster by at least this factor. The value was chosen because a
# smaller gain does not justify another download.
MIN_QUANTISATION_GAIN = 1.15
# Do not suggest quantisations with fewer bits per weight than this. The limit was chosen because fewer bits
# degrade replies.
MIN_BITS = 4.5
# Prompt length in tokens for predicting the time to first token. The length was chosen to match a page or two
# of text.
PREDICTED_PROMPT_TOKENS = 1000
# Approximate layer counts to assume for models that are not on this machine, as (maximum number of
# parameters, layers) pairs. The counts were chosen as typical of published models.
TYPICAL_LAYERS = ((7e8, 26), (2e9, 26), (5e9, 32), (1e10, 34), (2e10, 44), (4e10, 62), (float("inf"), 80))
# Memory in bytes that must be free to measure the speed of this machine. The value was chosen as an upper
# limit on the memory that the measurement uses.
MEASURING_BYTES = 1 << 30
# Suggest a model for download only if its file takes at most this fraction of the memory. The value was
# chosen to leave room for the KV cache and buffers.
MAX_WEIGHTS_SHARE = 0.85
# Suggest a model only if it fits in memory with a context of this many tokens, unless the user chose another
# context length. The length was chosen to fit a short question.
MIN_SUGGESTED_CONTEXT_TOKENS = 512

# --- Workers (`workers.py`) ---

# Rows of logits per pass to assume when deciding where to put the output layer. Derived from passes over
# drafts of `FIXED_DRAFT_LENGTH` tokens, because the actual draft length changes with the text.
OUTPUT_ROWS = FIXED_DRAFT_LENGTH + 1

# --- Models larger than memory (`planning.py`) ---

# `auto` drafts with low-bit copies of streamed blocks only if each pass then reads at most this many times as
# much from disk as without the copies. The value was chosen to lie between two measured cases: an F16 model
# that read 1.5 times as much generated its first reply 1.24 times as fast with `auto`, and a Q8_0 model that
# read 2.7 times as much generated a reply 0.75 times as fast with `lowbit`.
MAX_READS_WITH_COPIES = 1.6
# Maximum number of tokens per pass for which a streamed model computes logits. The number was chosen to equal
# the default maximum width of a verify pass, because memory for more logits leaves room for fewer layers.
STREAMED_ROWS = DEFAULT_MAX_WIDTH
# Numbers of prompt tokens per pass, and maximum context sizes in tokens, to try for a streamed model. The
# first pair that fits without reducing anything else is used. They were chosen because each pass reads the
# model from disk, so that a prompt is processed faster in wide passes, while their buffers take memory from
# the layers. No pass is narrower than `READ_TOKENS` (`memory/constants.py`), so that prompts are split as
# they are with enough memory.
STREAMED_SIZES = ((512, SHORT_CONTEXT_TOKENS), (256, SHORT_CONTEXT_TOKENS), (256, 1024))

# --- Draft models (`pair_loading.py`, `pairing.py`) ---

# Minimum initial context size, in tokens, of a draft model whose vocabulary differs from the target's. The
# size was chosen so that the context rarely needs to be resized.
FOREIGN_CONTEXT_TOKENS = 8192
# Maximum number of draft model tokens per target token if the vocabularies differ. The ratio was chosen as a
# conservative upper limit.
TOKEN_RATIO = 4
# Maximum number of tokens per forward pass for which a draft model computes logits, unless the user has set
# the shape of draft trees. The number was chosen to limit the memory for logits.
DRAFT_ROWS = 96
