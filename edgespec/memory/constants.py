"""Constants for memory management: how much to hold back, how large contexts are, and what to cache."""

from __future__ import annotations

__all__ = [
    "CHECK_SECONDS",
    "COPIES_AT_ONCE",
    "COPY_BYTES_PER_SECOND",
    "DEFAULT_RESERVE_BYTES",
    "DISK_CACHE_SHARE",
    "DRAFT_READS",
    "FRESH_FILE_SECONDS",
    "FRESH_SEGMENT_SECONDS",
    "HEADROOM_SHARE",
    "IDLE_READ_TOKENS",
    "INITIAL_CONTEXT_TOKENS",
    "MAIN_MEMORY_COST",
    "MAX_DISK_CACHE_BYTES",
    "MAX_MERGED_TOKENS",
    "MAX_PREFIX_CACHE_BYTES",
    "MAX_SEQUENCE_SHARE",
    "MIN_CACHED_TOKENS",
    "MIN_CONTEXT_TOKENS",
    "MIN_DRAFT_TOKENS",
    "MIN_HEADROOM_BYTES",
    "MIN_ROOM_TOKENS",
    "MIN_SEGMENT_TOKENS",
    "MIN_TIMED_BYTES",
    "NEW_REUSE_WEIGHT",
    "PLANNING_BYTES",
    "PREFILL_SPEEDUP",
    "PREFIX_CACHE_KV_CACHES",
    "PREFIX_CACHE_SHARE",
    "PRESSURE_SHARE",
    "READ_TOKENS",
    "RESERVE_SHARE",
    "SAVING_WINDOW_TOKENS",
    "SCORED_TOKENS",
    "SHORT_CONTEXT_TOKENS",
    "SLOW_DISK_BYTES_PER_SECOND",
    "TOKENS_PER_DRAFT",
]

# --- Budget and plan (`budget.py`, `plan.py`, `fitting.py`) ---

# Default amount of memory to leave to other programs: a fraction of the free memory, up to a limit in bytes.
# The values were chosen so that small machines keep enough memory for models.
RESERVE_SHARE, DEFAULT_RESERVE_BYTES = 0.05, 512 * 2**20
# Free memory in bytes required before llama.cpp reads a model's metadata. The value was chosen with a wide
# margin, because llama.cpp aborts the process if it runs out of memory.
PLANNING_BYTES = 64 * 2**20
# Memory to add to a plan for what it does not model, such as fragmentation: a fraction of the models' memory
# and a minimum in bytes. The values were chosen rather than measured. `scripts/bench_memory.py` compares
# plans with the memory actually used.
HEADROOM_SHARE, MIN_HEADROOM_BYTES = 0.05, 64 * 2**20
# Context sizes in tokens to fall back to if memory is low: one for a chat of a few turns and, as a last
# resort, one for a short question. Both were chosen rather than measured.
SHORT_CONTEXT_TOKENS, MIN_CONTEXT_TOKENS = 2048, 512
# The draft model's window in tokens if memory is low. The value was chosen to match a draft model's default
# window.
SAVING_WINDOW_TOKENS = 1024
# How many times as long a pass takes to read a byte of weights from main memory as from a GPU's memory. The
# value was chosen from the data sheets of common machines, because it is needed before a model is loaded: two
# channels of DDR4 or DDR5 read 40 to 90 GB/s, and GPUs 300 to 1,000 GB/s.
MAIN_MEMORY_COST = 10
# Assumed number of draft passes per target pass, and number of tokens that each target pass then generates.
# The first was chosen as a common draft length, the second as what a mediocre draft model achieves with it.
DRAFT_READS, TOKENS_PER_DRAFT = 4, 2
# Speed in bytes per second below which a disk is reported as slow. The value was chosen to lie between hard
# disks (up to 0.25 GB/s) and SATA SSDs (0.5 GB/s).
SLOW_DISK_BYTES_PER_SECOND = 0.3e9

# --- Context size (`context_resize.py`) ---

# Initial context size in tokens. The size was chosen so that most chats never need a resize.
INITIAL_CONTEXT_TOKENS = 2048
# Grow the context when fewer tokens than this are free. The value was chosen so that any verify pass fits.
MIN_ROOM_TOKENS = 256
# Size in tokens to which the draft model's context shrinks when the target needs memory. It was chosen as the
# smallest useful context.
MIN_DRAFT_TOKENS = 256

# --- Memory pressure (`pressure.py`) ---

# Minimum time in seconds between checks of the free memory during a reply. It was chosen to keep the overhead
# of these checks low.
CHECK_SECONDS = 1.0
# A model that runs from disk reads less ahead, or keeps fewer experts, if less than this share of the reserve
# is free. A value below 1 was chosen, because its plan fills the memory up to the reserve, so that it would
# otherwise slow down whenever something takes slightly more memory than planned.
PRESSURE_SHARE = 0.5

# --- Prefilling and scoring prompts (`target_cache.py`) ---

# Number of tokens per pass over a prompt if KV cells depend on how it is split into passes. Only the last
# pass over whole blocks, and the pass over the tokens after them, can be shorter. Also the size of a block if
# no smaller one is known to give the same KV cells. The number was chosen to limit the number of passes over
# a prompt.
READ_TOKENS = 256
# Number of tokens per pass when reprocessing a reply in idle time. The value was chosen to be small, because
# a new request may have to wait for one such pass.
IDLE_READ_TOKENS = 64
# Maximum number of tokens per pass when scoring a prompt. It was chosen to limit the memory for logits.
SCORED_TOKENS = 64

# --- Prefix cache (`prefix_cache/`) ---

# Default size limit of the prefix cache: a fraction of the memory that the loaded models leave free, up to a
# limit in bytes. The limits were chosen so that other programs can use the rest.
PREFIX_CACHE_SHARE, MAX_PREFIX_CACHE_BYTES = 0.25, 4 * 2**30
# Upper limit on the prefix cache's default size, as a multiple of the size of the target's KV cache. Without
# it, a server with a small model would fill gigabytes with the prompts of thousands of requests. The value
# was chosen rather than measured.
PREFIX_CACHE_KV_CACHES = 8
# Default size limit of cached prefixes on disk: a fraction of the free disk space, up to a limit in bytes.
# The limits were chosen so that the cache does not fill the disk.
DISK_CACHE_SHARE, MAX_DISK_CACHE_BYTES = 0.1, 4 * 2**30
# Maximum memory needed to copy a KV cache, as a multiple of the size of the copy. The value was chosen to err
# on the high side.
COPIES_AT_ONCE = 3
# Seconds to add to the age of segments in memory, and of files on disk, when choosing which ones to evict.
# The values were chosen so that, for recently used ones, age matters less than the prefill time saved.
FRESH_SEGMENT_SECONDS, FRESH_FILE_SECONDS = 60.0, 600.0
# Minimum length in tokens of the segments into which cached sequences are split. The limit was chosen because
# each segment has a fixed cost.
MIN_SEGMENT_TOKENS = 64
# Segments of up to this many tokens are merged with the next one. The limit was chosen so that a chat with
# many short turns does not become many segments.
MAX_MERGED_TOKENS = 256
# Maximum size of a cached sequence, as a fraction of the cache's size limit. The value was chosen to leave a
# margin, because copies can be slightly larger than estimated.
MAX_SEQUENCE_SHARE = 0.95
# Minimum length of cached prefixes in tokens. The limit was chosen because shorter ones are fast to prefill.
MIN_CACHED_TOKENS = 16
# Minimum size in bytes of copies that are timed. The limit was chosen because most of the time of a smaller
# copy is overhead.
MIN_TIMED_BYTES = 1 << 16
# Assumed speed of copying a KV cache in bytes per second, until a copy has been timed. The value was chosen
# to be conservative.
COPY_BYTES_PER_SECOND = 2e9
# Assumed speed of prefill per token relative to a measured single-token pass, until a prefill has been timed.
# The value was chosen as a conservative estimate.
PREFILL_SPEEDUP = 4.0
# Weight of the latest measurement in the moving averages of prefill and copy times. The value was chosen to
# average over about three measurements.
NEW_REUSE_WEIGHT = 0.3
