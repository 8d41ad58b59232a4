"""Trees of what followed, scored by how often: the rule of SuffixDecoding (arXiv 2411.04975)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from edgespec.drafters.token_buffer import MAX_CONTINUATION_TOKENS
from edgespec.engine.tree import TreeBuilder

__all__ = [
    "Continuation",
    "ContinuationLookup",
    "ScoredDraft",
    "SuffixConfig",
    "best_draft",
    "combined",
    "grow",
]

Place = TypeVar("Place")
# How often, what decides between equals (the greater first), which token, and the place after it.
Continuation: TypeAlias = tuple[int, int, int, Place]
# How often anything follows a place, and each token that does, the most frequent first.
ContinuationLookup: TypeAlias = Callable[[Place], tuple[int, list[Continuation[Place]]]]


@dataclass(frozen=True, slots=True)
class SuffixConfig:
    """How much a match is believed, as ArcticInference has it.

    A match of m tokens earns factor * m + offset guesses, `most_nodes` at most and none below `shortest`.
    A path less probable than `min_probability` is not followed. can_branch: False for chains only.
    """

    factor: float = 1.0
    offset: float = 0.0
    min_probability: float = 0.1
    shortest: int = 1
    most_nodes: int = 32
    can_branch: bool = True

    def nodes(self, length: int) -> int:
        """How many tokens to guess after a match of `length`."""
        if length < self.shortest:
            return 0
        return max(0, min(self.most_nodes, int(self.factor * length + self.offset)))


@dataclass(frozen=True, slots=True)
class ScoredDraft:
    """A tree whose node 0 is the root; `probs[i]` is the probability of the path to node i by counting."""

    tokens: list[int]
    parents: list[int]
    probs: list[float]

    @property
    def score(self) -> float:
        """How many of the tokens are expected to be right."""
        return sum(self.probs[1:])


def best_draft(
    matches: Iterable[tuple[int, Place]],
    grown: Callable[[int, Place], ScoredDraft],
    root: int,
    depth: int,
    rule: SuffixConfig,
) -> ScoredDraft:
    """The tree with the highest score over all matches (longest first); of equals, the longest match's.

    matches: the length of each, and where it is. grown: makes the tree of one.
    """
    best, score = ScoredDraft([root], [-1], [1.0]), 0.0
    for length, place in matches:
        guess = grown(length, place)
        if (its_score := guess.score) > score:
            best, score = guess, its_score
        # A level adds at most 1 to a score, and so does a node; a shorter match has no more of either.
        if score >= min(depth, rule.nodes(length - 1)):
            break
    return best


def grow(
    following: ContinuationLookup[Place],
    place: Place,
    root: int,
    depth: int,
    nodes: int,
    rule: SuffixConfig,
    is_end: Callable[[int], bool],
) -> ScoredDraft:
    """The most probable continuations of a place, best first: up to `nodes` tokens on `depth` levels."""
    depth = min(depth, nodes, MAX_CONTINUATION_TOKENS)
    tokens, parents, probs = [root], [-1], [1.0]
    # (-probability, when found, parent, token, depth of the token, the place after it)
    frontier: list[tuple[float, int, int, int, int, Place]] = []
    node = at = found = 0
    while True:
        if at < depth and not (node and is_end(tokens[node])):
            total, branches = following(place)
            for count, _, token, there in branches if rule.can_branch else branches[:1]:
                probability = probs[node] * count / total
                if probability < rule.min_probability:
                    break
                heapq.heappush(frontier, (-probability, found, node, token, at + 1, there))
                found += 1
        if not frontier or len(tokens) > nodes:
            return ScoredDraft(tokens, parents, probs)
        negative, _, parent, token, at, place = heapq.heappop(frontier)
        node = len(tokens)
        tokens.append(token)
        parents.append(parent)
        probs.append(-negative)


def combined(guesses: Sequence[ScoredDraft], rule: SuffixConfig) -> ScoredDraft:
    """The best-scoring guess with what the others know of its open ends; of equals, the first.

    Where a node's children have less than all of its probability, another guess's children share the
    rest, if that leaves them probable enough.
    """
    first, *others = sorted(guesses, key=lambda guess: -guess.score)
    others = [other for other in others if len(other.tokens) > 1]
    if not others or not rule.can_branch:
        return first
    built, probs = TreeBuilder(), list(first.probs)
    for parent, token in zip(first.parents, first.tokens, strict=True):
        built.add(parent, token)
    for other in others:
        left = list(probs)
        for parent, prob in zip(built.parents[1:], probs[1:], strict=True):
            left[parent] -= prob
        places: dict[int, int] = {0: 0}
        for node in range(1, len(other.tokens)):
            parent = places.get(other.parents[node], -1)
            if parent < 0:
                continue
            place = built.child(parent, other.tokens[node])
            if place is None:
                share = other.probs[node] / other.probs[other.parents[node]]
                probability = share * (left[parent] if parent < len(left) else probs[parent])
                if probability < rule.min_probability or len(built) > rule.most_nodes:
                    continue
                place = built.add(parent, other.tokens[node])
                probs.append(probability)
            places[node] = place
    return ScoredDraft(built.tokens, built.parents, probs)
