"""Trees of what followed, scored by how often: the rule of SuffixDecoding (arXiv 2411.04975)."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.drafters.text import DEEPEST, SEPARATOR, Match, Tokens
from edgespec.engine.tree import TreeBuilder

__all__ = ["Guess", "Rule", "best_guess", "combined", "grow"]


@dataclass(frozen=True, slots=True)
class Rule:
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
class Guess:
    """A tree whose node 0 is the root; `probs[i]` is the probability of the path to node i by counting."""

    tokens: list[int]
    parents: list[int]
    probs: list[float]

    @property
    def score(self) -> float:
        """How many of the tokens are expected to be right."""
        return sum(self.probs[1:])


def best_guess(
    text: Tokens,
    matches: Sequence[Match],
    root: int,
    depth: int,
    rule: Rule,
    is_end: Callable[[int], bool],
) -> Guess:
    """The tree with the highest score over all matches (shortest first); of equals, the longest match's."""
    best = Guess([root], [-1], [1.0])
    for match in reversed(matches):
        # A level adds at most 1 to a score, and so does a node; a shorter match has no more of either.
        if best.score >= min(depth, rule.nodes(match.length)):
            break
        guess = grow(text, match, root, depth, rule, is_end)
        if guess.score > best.score:
            best = guess
    return best


def grow(
    text: Tokens, match: Match, root: int, depth: int, rule: Rule, is_end: Callable[[int], bool]
) -> Guess:
    """The most probable continuations of a match, best first, as many as it earns."""
    wanted = rule.nodes(match.length)
    depth = min(depth, wanted, DEEPEST)
    rows: list[list[int]] = text[match.after[:, None] + np.arange(depth)].tolist()
    guess = Guess([root], [-1], [1.0])
    # (-probability, when found, parent, token, depth of the token, rows that go there)
    frontier: list[tuple[float, int, int, int, int, list[list[int]]]] = []
    found = 0

    def look(node: int, at: int, rows: list[list[int]]) -> None:
        nonlocal found
        seen = [row[at] for row in rows if row[at] != SEPARATOR]
        counts = Counter(seen).most_common() if len(seen) > 1 else [(token, 1) for token in seen]
        for token, count in counts if rule.can_branch else counts[:1]:
            probability = guess.probs[node] * count / len(seen)
            if probability < rule.min_probability:
                break
            there = rows if count == len(rows) else [row for row in rows if row[at] == token]
            heapq.heappush(frontier, (-probability, found, node, token, at, there))
            found += 1

    if depth:
        look(0, 0, rows)
    while frontier and len(guess.tokens) <= wanted:
        negative, _, parent, token, at, there = heapq.heappop(frontier)
        guess.tokens.append(token)
        guess.parents.append(parent)
        guess.probs.append(-negative)
        if at + 1 < depth and not is_end(token):
            look(len(guess.tokens) - 1, at + 1, there)
    return guess


def combined(guesses: Sequence[Guess], rule: Rule) -> Guess:
    """The best-scoring guess with what the others know of its open ends; of equals, the first.

    Where a node's children have less than all of its probability, another guess's children share the
    rest, if that leaves them probable enough.
    """
    first, *others = sorted(guesses, key=lambda guess: -guess.score)
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
    return Guess(built.tokens, built.parents, probs)
