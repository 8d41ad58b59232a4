"""A tree of cached token sequences, which stores a prefix shared by several sequences only once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.model.base import Snapshot

__all__ = ["Segment", "SegmentTree", "Tokens", "name_of", "shared_tokens", "tokens_digest"]

Tokens: TypeAlias = NDArray[np.int32]


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
