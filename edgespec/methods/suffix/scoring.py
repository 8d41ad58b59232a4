"""Build and score draft trees from continuation counts, as in SuffixDecoding (arXiv 2411.04975)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

from edgespec.engine.tree import TreeBuilder
from edgespec.methods.constants import MAX_CONTINUATION_TOKENS, SUFFIX_LENGTH_FACTOR, SUFFIX_MIN_PROBABILITY

__all__ = ["Continuation", "ScoredDraft", "SuffixConfig", "best_draft", "grow_draft", "merge_drafts"]

# Position of a match in an index. The type depends on the kind of index.
Place = TypeVar("Place")
# A token that follows a match: (number of occurrences, tie-breaker, token, position in the index).
Continuation: TypeAlias = tuple[int, int, int, Place]
ContinuationLookup: TypeAlias = Callable[[Place], tuple[int, list[Continuation[Place]]]]


@dataclass(frozen=True, slots=True)
class SuffixConfig:
    """Limits for suffix drafts. The default sizes match ArcticInference's suffix decoding.

    After a match of m tokens, at most `length_factor * m + length_offset` tokens are drafted.

    Attributes:
        length_factor: Number of drafted tokens per matched token.
        length_offset: Number of additional drafted tokens, regardless of the match length.
        min_probability: Minimum probability that a drafted token and all its ancestors are accepted,
            estimated from counts.
        max_tokens: Maximum number of drafted tokens.
        can_branch: Whether to draft trees. If False, only chains are drafted, for targets that cannot verify
            trees.
        is_end: Returns whether a token ends the reply. A draft never continues past such a token.
    """

    length_factor: float = SUFFIX_LENGTH_FACTOR
    length_offset: float = 0.0
    min_probability: float = SUFFIX_MIN_PROBABILITY
    max_tokens: int = MAX_CONTINUATION_TOKENS
    can_branch: bool = True
    is_end: Callable[[int], bool] = lambda _: False

    def max_draft_tokens(self, match_tokens: int) -> int:
        """Return the maximum number of tokens to draft if `match_tokens` tokens match earlier text."""
        if not match_tokens:
            return 0
        return min(self.max_tokens, int(self.length_factor * match_tokens + self.length_offset))


class ScoredDraft(NamedTuple):
    """A draft tree with the estimated acceptance probability of each node. Node 0 is the root."""

    tokens: list[int]
    parents: list[int]
    probs: list[float]

    @property
    def score(self) -> float:
        """Expected number of accepted tokens in the draft."""
        return sum(self.probs[1:])


def best_draft(
    matches: Iterable[tuple[int, Place]],
    grow: Callable[[int, Place], ScoredDraft],
    root: int,
    depth: int,
    config: SuffixConfig,
) -> ScoredDraft:
    """Build a draft tree for each match, and return the one with the most expected accepted tokens.

    Args:
        matches: The length and the index position of each match with the last tokens, longest first.
        grow: Builds a draft tree, given the maximum number of drafted tokens and an index position.
        root: Last token of the sequence.
        depth: Maximum depth of the draft tree.
        config: Limits for the draft tree.
    """
    best, best_score = ScoredDraft([root], [-1], [1.0]), 0.0
    for length, place in matches:
        draft = grow(config.max_draft_tokens(length), place)
        if (score := draft.score) > best_score:
            best, best_score = draft, score
        # No shorter match can score higher.
        if best_score >= min(depth, config.max_draft_tokens(length - 1)):
            break
    return best


def grow_draft(
    lookup: ContinuationLookup[Place],
    place: Place,
    root: int,
    depth: int,
    max_tokens: int,
    config: SuffixConfig,
) -> ScoredDraft:
    """Build a draft tree from the tokens that most often followed earlier occurrences of the last tokens.

    Args:
        lookup: Returns the tokens that follow a position in the index, with their counts.
        place: The index position after the matched tokens.
        root: Last token of the sequence.
        depth: Maximum depth of the tree.
        max_tokens: Maximum number of drafted tokens.
        config: Further limits.
    """
    depth = min(depth, max_tokens, MAX_CONTINUATION_TOKENS)
    tokens, parents, probs = [root], [-1], [1.0]
    # Heap of candidate nodes: (-path probability, insertion order, parent, token, depth, place).
    frontier: list[tuple[float, int, int, int, int, Place]] = []
    node = level = inserted = 0
    while True:
        if level < depth and not (node and config.is_end(tokens[node])):
            total, continuations = lookup(place)
            for count, _, token, after in continuations if config.can_branch else continuations[:1]:
                probability = probs[node] * count / total
                if probability < config.min_probability:
                    break
                heapq.heappush(frontier, (-probability, inserted, node, token, level + 1, after))
                inserted += 1
        if not frontier or len(tokens) > max_tokens:
            return ScoredDraft(tokens, parents, probs)
        negative, _, parent, token, level, place = heapq.heappop(frontier)
        node = len(tokens)
        tokens.append(token)
        parents.append(parent)
        probs.append(-negative)


def merge_drafts(drafts: Sequence[ScoredDraft], config: SuffixConfig) -> ScoredDraft:
    """Add likely branches from the other drafts to the draft with the highest score.

    A branch is added only if its estimated probability reaches `config.min_probability`.
    """
    first, *others = sorted(drafts, key=lambda draft: -draft.score)
    others = [other for other in others if len(other.tokens) > 1]
    if not others or not config.can_branch:
        return first
    merged, probs = TreeBuilder(), list(first.probs)
    for parent, token in zip(first.parents, first.tokens, strict=True):
        merged.add(parent, token)
    for other in others:
        unassigned = list(probs)
        for parent, prob in zip(merged.parents[1:], probs[1:], strict=True):
            unassigned[parent] -= prob
        merged_nodes: dict[int, int] = {0: 0}
        for node in range(1, len(other.tokens)):
            parent = merged_nodes.get(other.parents[node], -1)
            if parent < 0:
                continue
            merged_node = merged.child(parent, other.tokens[node])
            if merged_node is None:
                share = other.probs[node] / other.probs[other.parents[node]]
                probability = share * (unassigned[parent] if parent < len(unassigned) else probs[parent])
                if probability < config.min_probability or len(merged) > config.max_tokens:
                    continue
                merged_node = merged.add(parent, other.tokens[node])
                probs.append(probability)
            merged_nodes[node] = merged_node
    return ScoredDraft(merged.tokens, merged.parents, probs)
