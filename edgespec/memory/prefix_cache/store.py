"""Keep cached prefixes in memory, on disk or both, and choose which to evict.

A tree of token sequences stores a prefix that several sequences share only once. This module also decides how
many tokens of a cached prefix can be reused, and whether copying them saves time.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgespec.memory.constants import (
    COPIES_AT_ONCE,
    COPY_BYTES_PER_SECOND,
    DEFAULT_RESERVE_BYTES,
    FRESH_SEGMENT_SECONDS,
    MAX_PREFIX_CACHE_BYTES,
    MIN_CACHED_TOKENS,
    MIN_TIMED_BYTES,
    NEW_REUSE_WEIGHT,
    PREFILL_SPEEDUP,
    PREFIX_CACHE_KV_CACHES,
    PREFIX_CACHE_SHARE,
)
from edgespec.memory.prefix_cache.disk import PrefixCacheDisk, Tokens
from edgespec.model.base import Snapshot
from edgespec.model.image_tokens import end_of_images, whole_images
from edgespec.model.model_facts import Capabilities

__all__ = [
    "ReuseCosts",
    "Segment",
    "SegmentStore",
    "SegmentTree",
    "default_memory_bytes",
    "max_copy_bytes",
    "name_of",
    "reusable_tokens",
    "shared_tokens",
    "tokens_digest",
]


def shared_tokens(a: Tokens, b: Tokens) -> int:
    """Return the length of the common prefix of two sequences."""
    count = min(len(a), len(b))
    differing = np.flatnonzero(a[:count] != b[:count])
    return int(differing[0]) if len(differing) else count


def tokens_digest(tokens: Tokens) -> str:
    """Return a digest that identifies a token sequence, or an empty string for an empty sequence."""
    if not len(tokens):
        return ""
    return hashlib.blake2b(np.ascontiguousarray(tokens, "<i4").tobytes(), digest_size=16).hexdigest()


def name_of(tokens: Tokens, start: int) -> str:
    """Return the name of the cached segment `tokens[start:]`, which contains a digest of all `tokens`."""
    return f"{tokens_digest(tokens)}-{start}"


@dataclass(eq=False, slots=True)
class Segment:
    """A run of consecutive tokens in a sequence, with their KV state.

    Attributes:
        name: See `name_of`.
        parent: The preceding segment. None at the start of a sequence.
        tokens: int32 [n], the tokens that follow the parent's.
        size_bytes: Size of the KV state in bytes, including the states of heads.
        snapshot: The KV state, or None if it is only on disk.
        on_disk: Whether the KV state is on disk.
        is_branch_point: Whether sequences are known to diverge after this segment.
        last_used: Time of last use, in seconds since the epoch.
        children: The segments that directly follow this one.
    """

    name: str
    parent: Segment | None
    tokens: Tokens
    size_bytes: int
    snapshot: Snapshot | None
    on_disk: bool = False
    is_branch_point: bool = False
    last_used: float = 0.0
    children: list[Segment] = field(default_factory=list)

    @property
    def start(self) -> int:
        """Number of tokens in the sequence before this segment."""
        return self.parent.end if self.parent else 0

    @property
    def end(self) -> int:
        """Number of tokens in the sequence up to the end of this segment."""
        return self.start + len(self.tokens)

    def chain(self) -> list[Segment]:
        """Return all segments from the start of the sequence to this one, in order."""
        chain: list[Segment] = []
        segment: Segment | None = self
        while segment:
            chain.append(segment)
            segment = segment.parent
        return chain[::-1]

    def sequence(self) -> Tokens:
        """Return all tokens from the start of the sequence to the end of this segment."""
        return np.concatenate([segment.tokens for segment in self.chain()])

    def subtree(self) -> list[Segment]:
        """Return this segment and all its descendants."""
        found = [self]
        for segment in found:
            found += segment.children
        return found

    def value(self, own_value: Callable[[Segment], float]) -> float:
        """Return the highest `own_value` among this segment and its descendants."""
        return max(map(own_value, self.subtree()))


class SegmentTree:
    """A tree of one model's cached token sequences.

    Each segment is a run of consecutive tokens with their KV state. Sequences with a common prefix share
    segments.
    """

    def __init__(self) -> None:
        self._roots: list[Segment] = []

    def __iter__(self) -> Iterator[Segment]:
        for root in self._roots:
            yield from root.subtree()

    def __contains__(self, segment: Segment) -> bool:
        """Return whether a segment and all segments before it are in the tree."""
        chain = segment.chain()
        lists = (self._roots, *(part.children for part in chain))
        return all(part in following for part, following in zip(chain, lists, strict=False))

    def add(self, segment: Segment) -> None:
        """Add a segment to the tree. Its parent must already be in the tree."""
        (segment.parent.children if segment.parent else self._roots).append(segment)

    def remove(self, segment: Segment) -> list[Segment]:
        """Remove a segment and all its descendants, and return them."""
        if segment not in self:
            return []
        (segment.parent.children if segment.parent else self._roots).remove(segment)
        return segment.subtree()

    def find_name(self, prefix: str) -> Segment | None:
        """Return a segment whose name starts with `prefix`, or None if there is none."""
        return next((segment for segment in self if segment.name.startswith(prefix)), None)

    def longest_match(self, tokens: Tokens, *, whole: bool = False) -> tuple[Segment | None, int]:
        """Find the segment whose sequence shares the longest prefix with `tokens`.

        Args:
            tokens: The sequence to look up.
            whole: Whether to consider only segments that match completely.

        Returns:
            The segment or None, and the length of the shared prefix. On a tie, the segment that ends first
            wins.
        """
        best: Segment | None = None
        longest, shortest_end = 0, 0
        for segment, shared in self._matches(self._roots, tokens, 0):
            end = segment.end
            if whole and shared < end:
                continue
            if shared > longest or (shared == longest and best and end < shortest_end):
                best, longest, shortest_end = segment, shared, end
        return best, longest

    def _matches(self, segments: list[Segment], tokens: Tokens, start: int) -> Iterator[tuple[Segment, int]]:
        for segment in segments:
            shared = shared_tokens(segment.tokens, tokens[start:])
            if shared:
                yield segment, start + shared
            if shared == len(segment.tokens):
                yield from self._matches(segment.children, tokens, start + shared)


def default_memory_bytes(free_bytes: int, kv_bytes: int) -> int:
    """Return the default size limit of the prefix cache in bytes.

    Args:
        free_bytes: Memory left free by the models.
        kv_bytes: Size of the target's KV cache, with a full context for every concurrent reply.
    """
    return min(
        MAX_PREFIX_CACHE_BYTES,
        max(0, int(free_bytes * PREFIX_CACHE_SHARE)),
        PREFIX_CACHE_KV_CACHES * kv_bytes,
    )


def max_copy_bytes(free_bytes: int) -> int:
    """Return the maximum size of a KV cache copy in bytes, given the memory left free by the models."""
    return max(0, free_bytes) // COPIES_AT_ONCE


class SegmentStore:
    """Stores one model's cached prefixes in memory and on disk, divided into segments.

    Thread-safe. `lock` guards `tree`, which contains the segments.

    Args:
        max_bytes: Size limit in memory. Segments beyond it are moved to disk, or evicted if `disk` is None.
        disk: Storage for segments on disk. If None, segments are kept only in memory.
        available: Returns the currently free system memory in bytes.
        reuse_costs: Estimates the prefill time that a segment saves, which determines what stays on disk.
        reserve_bytes: Memory to leave for other programs, regardless of `max_bytes`.

    Attributes:
        hits: Number of prompts that reused a cached prefix.
        reused_tokens: Total number of prompt tokens reused instead of prefilled.
        deletions: How often the user has deleted all cached prefixes.
    """

    def __init__(
        self,
        max_bytes: int,
        disk: PrefixCacheDisk | None,
        available: Callable[[], int],
        reuse_costs: ReuseCosts,
        reserve_bytes: int = DEFAULT_RESERVE_BYTES,
    ) -> None:
        self.tree = SegmentTree()
        self.lock = threading.RLock()
        self.hits = self.reused_tokens = self.deletions = 0
        self.max_bytes = max_bytes
        self.disk = disk
        self.available = available
        self._reserve_bytes = reserve_bytes
        self._reuse_costs = reuse_costs
        for stored in disk.list_segments() if disk else ():
            parent = self.tree.find_name(f"{stored.after}-") if stored.after else None
            segment = Segment(stored.name, parent, stored.tokens, stored.data_bytes, None, on_disk=True)
            segment.last_used = stored.last_used
            self.tree.add(segment)

    @property
    def memory_bytes(self) -> int:
        """Memory currently used by cached prefixes, in bytes."""
        with self.lock:
            return sum(segment.size_bytes for segment in self.tree if segment.snapshot)

    def has_room_for(self, size_bytes: float) -> bool:
        """Return whether `size_bytes` are free in addition to the memory reserved for other programs."""
        return size_bytes < self.available() - self._reserve_bytes

    def read(self, segment: Segment) -> Snapshot | None:
        """Return the KV state of a cached segment, or None if it is damaged or missing."""
        return segment.snapshot or (self.disk.read(segment.name) if self.disk else None)

    def keep_in_memory(self, segment: Segment, snapshot: Snapshot) -> None:
        """Keep a segment in memory after reading it from disk, if the size limit allows."""
        if self.max_bytes >= segment.size_bytes:
            segment.snapshot = snapshot

    def touch(self, segment: Segment) -> None:
        """Mark a cached segment and all its ancestors as just used."""
        clock = time.time()
        for part in segment.chain():
            part.last_used = clock

    def remove(self, segment: Segment) -> None:
        """Remove a cached segment and all its descendants, both from memory and from disk."""
        names = [one.name for one in self.tree.remove(segment) if one.on_disk]
        if self.disk and names:
            self.disk.remove(names)

    def clear(self) -> None:
        """Remove all cached prefixes from memory. Files stay on disk, but this store no longer reads them."""
        with self.lock:
            self.tree = SegmentTree()

    def write(self, should_continue: Callable[[], bool] = lambda: True) -> None:
        """Write cached segments that are not on disk yet, for as long as `should_continue` returns True."""
        with self.lock:
            waiting = [segment for segment in self.tree if segment.snapshot and not segment.on_disk]
        for segment in waiting:
            if not should_continue():
                return
            self._write(segment)

    def _write(self, segment: Segment) -> bool:
        """Write a segment and all its ancestors. Return whether the segment is now on disk."""
        disk, snapshot = self.disk, segment.snapshot
        if segment.on_disk:
            return True
        if disk is None or snapshot is None:
            return False
        if segment.parent and not segment.parent.on_disk and not self._write(segment.parent):
            return False
        after = tokens_digest(segment.parent.sequence()) if segment.parent else ""
        seconds = len(segment.tokens) * self._reuse_costs.prefill_seconds
        written = disk.write(segment.name, after, segment.tokens, snapshot, seconds)
        with self.lock:
            segment.on_disk = written
            if written and segment not in self.tree:
                disk.remove([segment.name])
            self._sync_with_disk(disk)
        return written

    def _sync_with_disk(self, disk: PrefixCacheDisk) -> None:
        """Update the segments after files have been deleted from disk, for example by another process."""
        for segment in list(self.tree):
            if segment.on_disk and not disk.has(segment.name):
                segment.on_disk = False
                if segment.snapshot is None:
                    self.remove(segment)

    def reclaim(self, *, write: bool = True) -> int:
        """Evict cached prefixes from memory until enough memory is free for other programs.

        Args:
            write: Whether to write segments to disk before evicting them. If False, segments that are already
                on disk are evicted first.

        Returns:
            The number of bytes freed.
        """
        with self.lock:
            before = self.memory_bytes
            self.enforce_limits(write)
            return before - self.memory_bytes

    def enforce_limits(self, write: bool = True) -> None:
        """Evict the least valuable segments until the size limit is met and enough memory is free."""
        in_memory = [segment for segment in self.tree if segment.snapshot]
        if not in_memory:
            return
        total = sum(segment.size_bytes for segment in in_memory)
        limit = min(self.max_bytes, total + self.available() - self._reserve_bytes)
        if total <= limit:
            return
        clock = time.time()

        def own_value(segment: Segment) -> float:
            tokens_per_byte = len(segment.tokens) / (segment.size_bytes + 1)
            return tokens_per_byte / (max(0.0, clock - segment.last_used) + FRESH_SEGMENT_SECONDS)

        def eviction_order(segment: Segment) -> tuple[bool, float, int]:
            return not (write or segment.on_disk), segment.value(own_value), -segment.start

        for segment in sorted(in_memory, key=eviction_order):
            if total <= limit:
                return
            if segment.snapshot is None:
                continue
            if segment.on_disk or (write and self._write(segment)):
                segment.snapshot = None
                total -= segment.size_bytes
            else:
                total -= sum(one.size_bytes for one in segment.subtree() if one.snapshot)
                self.remove(segment)


def reusable_tokens(
    capabilities: Capabilities, tokens: Sequence[int] | NDArray[np.int32], length: int
) -> int:
    """Return how many of the first `length` cached tokens can be reused without changing the logits.

    Images are reused only as a whole. After the last image, some models can reuse only a multiple of
    `capabilities.reuse_block_tokens` tokens, and others none.
    """
    length = whole_images(tokens, length)
    if capabilities.prefix_reuse_exact:
        return length
    if not capabilities.partial_truncate:
        return 0
    return length - (length - end_of_images(tokens[:length])) % capabilities.reuse_block_tokens


class ReuseCosts:
    """Moving averages of the prefill time per token and the copy time per byte of KV state.

    Args:
        prefill_seconds: Prefill time per token to assume until `assume_target_step` is called or a
            prefill has been timed. With 0, no copy saves time.
    """

    def __init__(self, prefill_seconds: float = 0.0) -> None:
        self.prefill_seconds = prefill_seconds
        self._is_measured = False
        self._copy_seconds = 1.0 / COPY_BYTES_PER_SECOND

    def assume_target_step(self, seconds: float) -> None:
        """Estimate the prefill time from the duration of a single-token pass, until a prefill is timed."""
        if not self._is_measured:
            self.prefill_seconds = seconds / PREFILL_SPEEDUP

    def record_prefill(self, tokens: int, seconds: float) -> None:
        """Record the duration of a prefill. Short prefills are ignored."""
        if tokens >= MIN_CACHED_TOKENS:
            weight = NEW_REUSE_WEIGHT if self._is_measured else 1.0
            self.prefill_seconds += weight * (seconds / tokens - self.prefill_seconds)
            self._is_measured = True

    def record_copy(self, size_bytes: int, seconds: float) -> None:
        """Record the time taken to copy KV state. Small copies are ignored."""
        if size_bytes >= MIN_TIMED_BYTES:
            self._copy_seconds += NEW_REUSE_WEIGHT * (seconds / size_bytes - self._copy_seconds)

    def saves_time(self, tokens: int, size_bytes: float) -> bool:
        """Return whether prefilling `tokens` takes longer than storing and restoring their KV state."""
        is_worth_it = tokens * self.prefill_seconds > 2.0 * size_bytes * self._copy_seconds
        return tokens >= MIN_CACHED_TOKENS and is_worth_it
