"""Store the KV states of earlier sequences, and restore them for prompts that share a prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import ceil, inf
from time import perf_counter as now
from typing import Protocol

import numpy as np

from edgespec.errors import BackendError, CapabilityError, EdgespecError
from edgespec.memory.budget import available_bytes
from edgespec.memory.constants import (
    DEFAULT_RESERVE_BYTES,
    MAX_MERGED_TOKENS,
    MAX_SEQUENCE_SHARE,
    MIN_SEGMENT_TOKENS,
)
from edgespec.memory.prefix_cache.disk import PrefixCacheDisk, Tokens
from edgespec.memory.prefix_cache.store import (
    ReuseCosts,
    Segment,
    SegmentStore,
    name_of,
    reusable_tokens,
    shared_tokens,
)
from edgespec.model.base import LanguageModel
from edgespec.model.image_tokens import whole_images

__all__ = ["HeadState", "PrefixCache", "PrefixCacheUsage"]


@dataclass(frozen=True, slots=True)
class PrefixCacheUsage:
    """Statistics on the size and use of the prefix cache.

    Attributes:
        sequences: Number of token sequences that can be resumed from the cache.
        memory_bytes: Memory currently used by segments.
        memory_limit_bytes: Size limit in memory.
        disk_bytes: Disk space currently used by this model's segments, including those also held in memory.
        disk_limit_bytes: Size limit on disk, shared by all models.
        hits: Number of prompts that reused a cached prefix.
        reused_tokens: Total number of prompt tokens reused instead of prefilled.
        notice: User-facing reason why something is not cached, or an empty string.
    """

    sequences: int = 0
    memory_bytes: int = 0
    memory_limit_bytes: int = 0
    disk_bytes: int = 0
    disk_limit_bytes: int = 0
    hits: int = 0
    reused_tokens: int = 0
    notice: str = ""


class PrefixCache:
    """The prefix cache of one model. Copies KV states out of the model's cache and back into it.

    Use only on the thread that runs the model. Other threads can use `store`. A failure to store or restore a
    state raises no error, because the model can always reprocess the tokens.

    Args:
        model: The target whose KV states to cache.
        max_bytes: Size limit in memory.
        disk: Storage for segments on disk. If None, segments are kept only in memory.
        heads: The heads that draft for the model. Their states are stored together with the KV states.
        reuse_costs: Determines whether a copy saves time.
        max_copied_bytes: Maximum size of one copy, or None for no limit. Larger KV states are split into
            several segments, or not stored if the model can copy them only as a whole.
        available, reserve_bytes: See `SegmentStore`.
        notice: User-facing reason why the cache differs from what was requested, or an empty string.
    """

    def __init__(
        self,
        model: LanguageModel,
        max_bytes: int,
        disk: PrefixCacheDisk | None = None,
        *,
        heads: Sequence[HeadState] = (),
        reuse_costs: ReuseCosts,
        max_copied_bytes: int | None = None,
        available: Callable[[], int] = available_bytes,
        reserve_bytes: int = DEFAULT_RESERVE_BYTES,
        notice: str = "",
    ) -> None:
        self.reuse_costs = reuse_costs
        self._model, self._heads = model, heads
        self._can_truncate = model.facts.capabilities.partial_truncate
        self._max_copied_bytes = max_copied_bytes
        self.store = SegmentStore(max_bytes, disk, available, reuse_costs, reserve_bytes)
        self._notice = notice
        self._is_off = False
        # Tokens that were in the model's KV cache when the user deleted all cached prefixes, and which must
        # not be stored again.
        self._deleted: Tokens | None = None
        # The store's number of deletions when `_deleted` was set. Each reply's cache keeps its own number,
        # because only the first cache to notice a deletion sees it on disk.
        self._known_deletions = 0

    def for_model(self, model: LanguageModel, heads: Sequence[HeadState] = ()) -> PrefixCache:
        """Return a cache that shares the stored prefixes, for another context of the same model.

        Args:
            model: The other context.
            heads: The heads that draft for it.
        """
        other = copy(self)
        other._model, other._heads = model, heads
        return other

    @property
    def saves_to_disk(self) -> bool:
        """Whether cached prefixes are also stored on disk."""
        return self.store.disk is not None and not self._is_off

    def add(self, tokens: Sequence[int], shared: int = 0) -> None:
        """Store the model's KV state before it is truncated, if that is likely to save time later.

        Args:
            tokens: All tokens in the model's cache.
            shared: Number of leading tokens that stay in the model's cache.
        """
        sequence = np.array(tokens, np.int32)
        with self.store.lock:
            if self._is_off or self._was_deleted(sequence):
                return
            longest = self._max_tokens()
            if longest is not None:
                sequence = sequence[: whole_images(sequence, longest)]
            base, stored = self.store.tree.longest_match(sequence, whole=True)
            if base:
                self.store.touch(base)
            lost = len(sequence) - (max(stored, shared) if self._can_truncate else stored)
            if self._is_worth_storing(lost, len(sequence) - stored):
                try:
                    self._add(sequence, base, shared)
                except (EdgespecError, MemoryError) as error:
                    self._handle_failure(error)
            self.store.enforce_limits()

    def _is_worth_storing(self, lost_tokens: int, copied_tokens: int) -> bool:
        size_bytes = copied_tokens * self._bytes_per_token()
        least_tokens = min(copied_tokens, MIN_SEGMENT_TOKENS) if self._can_truncate else copied_tokens
        return (
            self.reuse_costs.saves_time(lost_tokens, size_bytes)
            and least_tokens * self._bytes_per_token() <= self._max_segment_bytes
            and self.store.has_room_for(min(size_bytes, self._max_segment_bytes))
        )

    @property
    def _max_segment_bytes(self) -> float:
        limit = inf if self._max_copied_bytes is None else self._max_copied_bytes
        return min(limit, inf if self.store.disk else self.store.max_bytes)

    def _max_tokens(self) -> int | None:
        """Return the maximum length of a stored sequence. A longer one would evict all others."""
        size_bytes, disk = self._bytes_per_token(), self.store.disk
        if not (self._can_truncate and size_bytes):
            return None
        room_bytes = self.store.max_bytes + (disk.quota_bytes if disk else 0)
        return int(MAX_SEQUENCE_SHARE * room_bytes / size_bytes)

    def _bytes_per_token(self) -> float:
        sizes = [(segment.size_bytes, len(segment.tokens)) for segment in self.store.tree]
        if sizes:
            return sum(size for size, _ in sizes) / sum(count for _, count in sizes)
        facts = self._model.facts
        head_bytes = sum(head.token_bytes for head in self._heads)
        return facts.max_kv_bytes / facts.max_context_tokens + head_bytes

    def _add(self, sequence: Tokens, base: Segment | None, shared: int) -> None:
        end = len(sequence)
        replaced: list[Segment] = []
        if not self._can_truncate:
            if base and not base.is_branch_point:
                replaced.append(base)
            self._copy_segment(sequence, None)
        else:
            while (
                base
                and base.children == replaced[-1:]
                and not (base.is_branch_point or base.end <= shared)
                and len(base.tokens) <= max(MAX_MERGED_TOKENS, end - base.end)
                and self._segments_for(end - base.start) == 1
            ):
                replaced.append(base)
                base = base.parent
            start = base.end if base else 0
            if start + MIN_SEGMENT_TOKENS <= shared <= end - MIN_SEGMENT_TOKENS:
                base = self._copy_segments(sequence[:shared], base)
                if base:
                    base.is_branch_point = True
                    self._copy_segments(sequence, base)
            else:
                self._copy_segments(sequence, base)
        for segment in replaced:
            self.store.remove(segment)

    def _segments_for(self, tokens: int) -> int:
        return max(1, ceil(tokens * self._bytes_per_token() / max(1, self._max_segment_bytes)))

    def _copy_segments(self, sequence: Tokens, parent: Segment | None) -> Segment | None:
        """Copy the KV state of the tokens after `parent` into one or more segments.

        Returns:
            The last segment, or None if there was not enough memory.
        """
        start = parent.end if parent else 0
        count = self._segments_for(len(sequence) - start)
        even = (start + (len(sequence) - start) * i // count for i in range(1, count + 1))
        ends = dict.fromkeys(whole_images(sequence, end) for end in even)
        last = parent
        for end in ends:
            if end == start:
                continue
            self.store.enforce_limits()
            if last and last not in self.store.tree:
                return None
            last = self._copy_segment(sequence[:end], last)
        return last

    def _copy_segment(self, sequence: Tokens, parent: Segment | None) -> Segment:
        began = now()
        snapshot = self._model.snapshot(parent.end if parent else 0, len(sequence))
        self.reuse_costs.record_copy(snapshot.size_bytes, now() - began)
        if self._heads:
            tokens = sequence.tolist()
            heads = {head.name: head.copy(tokens, snapshot.start) for head in self._heads}
            snapshot = replace(snapshot, heads=heads)
        name = name_of(sequence, snapshot.start)
        segment = self.store.tree.find_name(name)
        if segment is None:
            own_tokens = sequence[snapshot.start :].copy()
            segment = Segment(name, parent, own_tokens, snapshot.size_bytes, snapshot)
            self.store.tree.add(segment)
        segment.snapshot = segment.snapshot or snapshot
        self.store.touch(segment)
        return segment

    def branch_point(self, prompt: Sequence[int], cached: int) -> int:
        """Return the position during a prefill at which to store the model's cache, or 0 if there is none.

        This is where the prompt diverges from a stored sequence. Models that can truncate their cache do not
        need this, because they can restore the longer sequence and truncate it.

        Args:
            prompt: The tokens about to be prefilled.
            cached: Number of prompt tokens that are already in the model's cache.

        Returns:
            The number of prompt tokens before that position, or 0.
        """
        if self._can_truncate or self._is_off:
            return 0
        _, shared = self.store.tree.longest_match(np.array(prompt[:-1], np.int32))
        lost = shared - cached
        return shared if lost >= MIN_SEGMENT_TOKENS and self._is_worth_storing(lost, shared) else 0

    def add_branch_point(self, tokens: Sequence[int]) -> None:
        """Store the model's KV state for `tokens`, so that several prompts can continue from it."""
        sequence = np.array(tokens, np.int32)
        with self.store.lock:
            try:
                self._copy_segment(sequence, None).is_branch_point = True
            except (EdgespecError, MemoryError) as error:
                self._handle_failure(error)
            self.store.enforce_limits()

    def find(self, prompt: Sequence[int], cached: int) -> Segment | None:
        """Return the cached segment that saves the most prefill time for a prompt, or None if none does.

        Args:
            prompt: The tokens to prefill. The last one is always reprocessed to compute its logits.
            cached: Number of prompt tokens that are already in the model's cache.
        """
        sequence = np.array(prompt[:-1], np.int32)
        with self.store.lock:
            if self._is_off:
                return None
            self.store.enforce_limits()
            segment, shared = self.store.tree.longest_match(sequence, whole=not self._can_truncate)
            while segment and segment.end > self._model.facts.context_tokens:
                segment = segment.parent
            if segment is None:
                return None
            shared = self._reusable(segment.sequence(), min(shared, segment.end))
            # The estimate in `saves_time` covers both storing and restoring a KV state. Halve the size to
            # count only the time to restore it.
            size_bytes = sum(part.size_bytes for part in segment.chain()) / 2
            return segment if self.reuse_costs.saves_time(shared - cached, size_bytes) else None

    def restore(self, segment: Segment, prompt: Sequence[int], cached: int) -> int:
        """Load the longest prefix shared by a prompt and a stored sequence into the model's cache.

        Args:
            segment: The result of `find`.
            prompt: The tokens to prefill.
            cached: Number of prompt tokens that are already in the model's cache.

        Returns:
            The number of prompt tokens now in the model's cache.
        """
        sequence = np.array(prompt[:-1], np.int32)
        with self.store.lock:
            chain = segment.chain()
            stored = segment.sequence()
            common = self._reusable(stored, shared_tokens(stored, sequence))
            # Ends of the segments that are still in the model's KV cache.
            ends = [part.end for part in chain if self._can_truncate and part.end <= min(cached, common)]
            length = max(ends, default=0)
            self._model.truncate(length)
            if self._model.length != length:
                self._model.truncate(0)
                length = 0
            self.store.touch(segment)
            for part in chain:
                if length <= part.start < common and not self._restore_segment(part):
                    break
            if self._can_truncate and self._model.length == segment.end and segment in self.store.tree:
                self._split(segment, common)
            self._model.truncate(whole_images(stored, min(common, self._model.length)))
            restored = self._model.length
            if restored > cached:
                self.store.hits += 1
                self.store.reused_tokens += restored - cached
            self.store.enforce_limits()
            return restored

    def _reusable(self, tokens: Tokens, length: int) -> int:
        return reusable_tokens(self._model.facts.capabilities, tokens, length)

    def _restore_segment(self, segment: Segment) -> bool:
        """Append a cached segment to the model's KV cache, or delete the segment if that fails."""
        began = now()
        snapshot = self.store.read(segment)
        if snapshot is None or snapshot.start != self._model.length or snapshot.length != segment.end:
            self.store.remove(segment)
            return False
        try:
            self._model.restore(snapshot)
        except (EdgespecError, MemoryError):
            self.store.remove(segment)
            return False
        for head in self._heads:
            if head.name in snapshot.heads:
                head.restore(segment.sequence().tolist(), snapshot.heads[head.name])
        self.reuse_costs.record_copy(segment.size_bytes, now() - began)
        self.store.keep_in_memory(segment, snapshot)
        self.store.enforce_limits()
        return True

    def _split(self, segment: Segment, at: int) -> None:
        """Split a segment where another sequence diverges. The whole segment must be in the model's cache."""
        if segment.start + MIN_SEGMENT_TOKENS > at or at > segment.end - MIN_SEGMENT_TOKENS:
            return
        sequence, children = segment.sequence(), segment.children
        try:
            copy = self._copy_segment if self._segments_for(len(segment.tokens)) == 1 else self._copy_segments
            first = copy(sequence[:at], segment.parent)
            last = first and copy(sequence, first)
        except (EdgespecError, MemoryError) as error:
            self._handle_failure(error)
            return
        if not (first and last and segment in self.store.tree):
            return
        first.is_branch_point = True
        last.children += children
        segment.children = []
        for child in children:
            child.parent = last
        self.store.remove(segment)

    def _was_deleted(self, sequence: Tokens) -> bool:
        disk = self.store.disk
        if disk and disk.was_cleared:
            disk.acknowledge_clear()
            self.store.clear()
            self.store.deletions += 1
        if self._known_deletions != self.store.deletions:
            self._known_deletions, self._deleted = self.store.deletions, sequence
        return self._deleted is not None and np.array_equal(sequence, self._deleted)

    def _handle_failure(self, error: Exception) -> None:
        """Disable the prefix cache if the model cannot copy its KV state. Ignore temporary failures."""
        self._is_off = isinstance(error, BackendError | CapabilityError)
        self._notice = f"not caching earlier chats: {error}" if self._is_off else self._notice

    def sequences(self) -> list[Tokens]:
        """Return the distinct token sequences in the prefix cache."""
        with self.store.lock:
            return [segment.sequence() for segment in self.store.tree if not segment.children]

    def usage(self) -> PrefixCacheUsage:
        """Return statistics on the size and use of the prefix cache."""
        disk = self.store.disk
        with self.store.lock:
            segments = list(self.store.tree)
            return PrefixCacheUsage(
                sequences=sum(not segment.children for segment in segments),
                memory_bytes=sum(segment.size_bytes for segment in segments if segment.snapshot),
                memory_limit_bytes=self.store.max_bytes,
                disk_bytes=sum(segment.size_bytes for segment in segments if segment.on_disk),
                disk_limit_bytes=disk.quota_bytes if disk else 0,
                hits=self.store.hits,
                reused_tokens=self.store.reused_tokens,
                notice=" · ".join(filter(None, (self._notice, disk.notice if disk else ""))),
            )


class HeadState(Protocol):
    """The state of a head that drafts from its target's hidden states. Implemented by `HeadCache`.

    The methods never raise, because a head without its state can still draft, just less accurately.
    """

    name: str

    @property
    def token_bytes(self) -> float:
        """Size of the head's state per token in bytes."""

    def copy(self, tokens: Sequence[int], start: int) -> bytes:
        """Return a copy of the state for `tokens[start:]`. `tokens` is a prefix of the target's cache."""

    def restore(self, tokens: Sequence[int], copy: bytes) -> None:
        """Load a copy once the target has restored the same tokens. `tokens` is the target's whole cache."""

    def needs_last_state(self, tokens: Sequence[int]) -> bool:
        """Return whether the head needs the target to reprocess the last of `tokens`."""
