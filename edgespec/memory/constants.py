"""Constants of memory management: how much to hold back, how large contexts are, and what to cache."""

from __future__ import annotations

__all__ = [
    "CHECK_SECONDS",
    "COPIES_AT_ONCE",
    "COPY_BYTES_PER_SECOND",
    "DEFAULT_RESERVE_BYTES",
    "DISK_CACHE_SHARE",
    "FRESH_FILE_SECONDS",
    "FRESH_SEGMENT_SECONDS",
    "HEADROOM_SHARE",
    "IDLE_READ_TOKENS",
    "INITIAL_CONTEXT_TOKENS",
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
    "READ_TOKENS",
    "RESERVE_SHARE",
    "SAVING_WINDOW_TOKENS",
    "SCORED_TOKENS",
    "SHORT_CONTEXT_TOKENS",
]

# --- Budget and plan (`budget.py`, `plan.py`, `fitting.py`) ---

# By default, leave this share of the free memory to other programs, but at most this many bytes. Chosen so
# that small machines keep enough memory for models.
RESERVE_SHARE, DEFAULT_RESERVE_BYTES = 0.05, 512 * 2**20
# Free memory in bytes that llama.cpp needs to read a model's metadata. Chosen as an upper limit, because
# llama.cpp aborts the process if it has less than it needs.
PLANNING_BYTES = 64 * 2**20
# Memory to add to a plan for what it does not model, such as fragmentation: a fraction of the models' memory
# and a minimum in bytes. Chosen, not measured. `scripts/bench_memory.py` compares plans with the memory used.
HEADROOM_SHARE, MIN_HEADROOM_BYTES = 0.05, 64 * 2**20
# Context sizes in tokens to fall back to if memory is low: one for a chat of a few turns and, as a last
# resort, one for a short question. Chosen, not measured.
SHORT_CONTEXT_TOKENS, MIN_CONTEXT_TOKENS = 2048, 512
# Window of the draft model in tokens if memory is low. Chosen to match the default window of a draft model.
SAVING_WINDOW_TOKENS = 1024

# --- Context size (`context_resize.py`) ---

# Initial context size in tokens. Chosen because most chats fit and never need a resize.
INITIAL_CONTEXT_TOKENS = 2048
# Grow the context when it has room for fewer tokens than this. Chosen as enough for any verify pass.
MIN_ROOM_TOKENS = 256
# Reduce the draft model's context to this size in tokens when the target needs memory. Chosen as the smallest
# useful context.
MIN_DRAFT_TOKENS = 256

# --- Memory pressure (`pressure.py`) ---

# Minimum seconds between checks of the free memory during a reply. Chosen because a check takes time.
CHECK_SECONDS = 1.0

# --- Reading prompts (`target_cache.py`) ---

# If KV cells depend on how a prompt is split into passes, prompts are read in passes of this many tokens.
# Only the last pass over whole blocks, and the pass over the tokens after them, can be shorter. Derived: the
# same as `UNTESTED_BLOCK_TOKENS` (`loading/constants.py`).
READ_TOKENS = 256
# Tokens per pass that reads a reply in idle time. Chosen to keep the wait short. A new request waits for at
# most one such pass.
IDLE_READ_TOKENS = 64
# Maximum number of tokens per pass that scores a prompt. Chosen to limit the memory for logits.
SCORED_TOKENS = 64

# --- Prefix cache (`prefix_cache/`) ---

# By default, the prefix cache uses up to this share of the memory that the loaded models leave free, and at
# most this many bytes. Chosen so that other programs can use the rest.
PREFIX_CACHE_SHARE, MAX_PREFIX_CACHE_BYTES = 0.25, 4 * 2**30
# The default limit is also at most this many times the size of the target's KV cache. Chosen, not measured.
# Otherwise, a server with a small model would fill gigabytes with the prompts of thousands of requests.
PREFIX_CACHE_KV_CACHES = 8
# By default, cached prefixes take up to this share of the free disk space, and at most this many bytes.
# Chosen so that the disk does not become full.
DISK_CACHE_SHARE, MAX_DISK_CACHE_BYTES = 0.1, 4 * 2**30
# Maximum memory needed to copy a KV cache, as a multiple of the size of the copy. Chosen as an upper limit.
COPIES_AT_ONCE = 3
# Segments in memory, and files on disk, that were used within this many seconds count as about equally old
# when choosing which ones to drop. Chosen so that among recently used ones, the prefill time that they save
# decides.
FRESH_SEGMENT_SECONDS, FRESH_FILE_SECONDS = 60.0, 600.0
# Do not split cached sequences into segments of fewer tokens than this. Chosen because each segment has a
# fixed cost.
MIN_SEGMENT_TOKENS = 64
# A segment of up to this many tokens is merged with the next one. Chosen so that a chat of many short turns
# does not become many segments.
MAX_MERGED_TOKENS = 256
# Maximum size of a cached sequence as a fraction of the cache's size limit. Chosen because copies can be
# slightly larger than estimated.
MAX_SEQUENCE_SHARE = 0.95
# The prefix cache ignores prefixes of fewer tokens than this. Chosen because prefilling them is fast.
MIN_CACHED_TOKENS = 16
# Do not time copies of fewer bytes than this. Chosen because most of their time is overhead.
MIN_TIMED_BYTES = 1 << 16
# Assumed speed of copying a KV cache in bytes per second, until a copy has been timed. Chosen on the safe
# side.
COPY_BYTES_PER_SECOND = 2e9
# Assume that prefill is this many times faster per token than a measured single-token pass, until a prefill
# has been timed. Chosen as a cautious estimate.
PREFILL_SPEEDUP = 4.0
# Weight of the latest measurement in the moving averages of prefill and copy times. Chosen to give a mean
# over about three measurements.
NEW_REUSE_WEIGHT = 0.3
