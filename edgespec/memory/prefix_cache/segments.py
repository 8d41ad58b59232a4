"""Texts in pieces: one that several begin with is there once, and each goes on from it in its own piece."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Snapshot

__all__ = ["Segment", "SegmentTree", "Tokens", "digest_of", "name_of", "shared_tokens"]

Tokens: TypeAlias = NDArray[np.int32]


def shared_tokens(a: Tokens, b: Tokens) -> int:
    """How many tokens both begin with."""
    count = min(len(a), len(b))
    differing = np.flatnonzero(a[:count] != b[:count])
    return int(differing[0]) if len(differing) else count


def digest_of(text: Tokens) -> str:
    """Tells a text from others; empty for none."""
    if not len(text):
        return ""
    return hashlib.blake2b(np.ascontiguousarray(text, "<i4").tobytes(), digest_size=16).hexdigest()


def name_of(text: Tokens, start: int) -> str:
    """The name of the piece from `start` to the end of a text: it begins with the text's digest."""
    return f"{digest_of(text)}-{start}"


@dataclass(eq=False, slots=True)
class Segment:
    """`tokens` after those of `parent`, and the copy of a cache that holds them.

    tokens: int32 [n]. snapshot: None where the copy is on disk only. parting: texts are known to go different
    ways after it. used: when, in seconds of the wall clock. The copy starts where the parent ends.
    """

    name: str
    parent: Segment | None
    tokens: Tokens
    size_bytes: int
    snapshot: Snapshot | None
    on_disk: bool = False
    parting: bool = False
    used: float = 0.0
    children: list[Segment] = field(default_factory=list)

    @property
    def start(self) -> int:
        """How many tokens come before it."""
        return self.parent.end if self.parent else 0

    @property
    def end(self) -> int:
        """How many tokens there are with it."""
        return self.start + len(self.tokens)

    def chain(self) -> list[Segment]:
        """The pieces of the text that ends with this one, from the first on."""
        chain: list[Segment] = []
        piece: Segment | None = self
        while piece:
            chain.append(piece)
            piece = piece.parent
        return chain[::-1]

    def text(self) -> Tokens:
        """All tokens up to its end."""
        return np.concatenate([piece.tokens for piece in self.chain()])

    def family(self) -> list[Segment]:
        """It and all that goes on from it."""
        found = [self]
        for piece in found:
            found += piece.children
        return found

    def value(self, own: Callable[[Segment], float]) -> float:
        """What it is worth: as much as anything that goes on from it, which is of no use without it."""
        return max(map(own, self.family()))


class SegmentTree:
    """All pieces. Two that follow the same one may still begin alike."""

    def __init__(self) -> None:
        self._roots: list[Segment] = []

    def __iter__(self) -> Iterator[Segment]:
        for root in self._roots:
            yield from root.family()

    def __contains__(self, piece: Segment) -> bool:
        """Whether it is here, and all that comes before it."""
        chain = piece.chain()
        lists = (self._roots, *(part.children for part in chain))
        return all(part in following for part, following in zip(chain, lists, strict=False))

    def add(self, piece: Segment) -> None:
        """Take in a piece whose parent is here."""
        (piece.parent.children if piece.parent else self._roots).append(piece)

    def remove(self, piece: Segment) -> list[Segment]:
        """Take out a piece, and what goes on from it."""
        if piece not in self:
            return []
        (piece.parent.children if piece.parent else self._roots).remove(piece)
        return piece.family()

    def named(self, begin: str) -> Segment | None:
        """The piece whose name is that, or begins so."""
        return next((piece for piece in self if piece.name.startswith(begin)), None)

    def longest(self, text: Tokens, *, whole: bool = False) -> tuple[Segment | None, int]:
        """The piece whose text shares most with this one, and how many tokens that is.

        whole: only pieces that the text has to their end. Of two that share as much the shorter one.
        """
        best: Segment | None = None
        most, shortest = 0, 0
        for piece, shared in self._meeting(self._roots, text, 0):
            end = piece.end
            if whole and shared < end:
                continue
            if shared > most or (shared == most and best and end < shortest):
                best, most, shortest = piece, shared, end
        return best, most

    def _meeting(self, pieces: list[Segment], text: Tokens, start: int) -> Iterator[tuple[Segment, int]]:
        """Pieces that share something of their own with the text, and how far."""
        for piece in pieces:
            shared = shared_tokens(piece.tokens, text[start:])
            if shared:
                yield piece, start + shared
            if shared == len(piece.tokens):
                yield from self._meeting(piece.children, text, start + shared)
