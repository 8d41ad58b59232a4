"""Reference implementation of suffix decoding by exhaustive search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from edgespec.methods.constants import MAX_MATCH_TOKENS
from edgespec.methods.suffix.drafter import SuffixConfig
from edgespec.methods.suffix.indexes import SEPARATOR, SuffixArray, SuffixAutomaton

Text = list[int]
Paths = dict[tuple[int, ...], float]

letters = st.integers(0, 2)
texts = st.lists(letters, min_size=1, max_size=60)
rules = st.builds(
    SuffixConfig,
    length_factor=st.sampled_from([0.5, 1.0, 2.0]),
    length_offset=st.sampled_from([0.0, 1.0]),
    min_probability=st.sampled_from([0.1, 0.3]),
    max_tokens=st.integers(1, 12),
    can_branch=st.booleans(),
)


def automaton_of(text: Sequence[int]) -> SuffixAutomaton:
    grown = SuffixAutomaton()
    grown.set_tokens(text)
    return grown


def index_of(*documents: Text) -> SuffixArray:
    return SuffixArray(np.array(document, np.int32) for document in documents)


def places(documents: Sequence[Text], recent: Text, length: int) -> list[Text]:
    """Return the text after every occurrence of the last `length` tokens, by exhaustive search."""
    pattern = recent[len(recent) - length :]
    return [
        document[at:]
        for document in documents
        for at in range(length, len(document))
        if document[at - length : at] == pattern
    ]


def count_continuations(text: Sequence[int], pattern: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (count, last position, token) of each continuation of a pattern, by exhaustive search."""
    size = len(pattern)
    ends = [at + 1 for at in range(size, len(text)) if list(text[at - size : at]) == list(pattern)]
    counts = Counter(text[end - 1] for end in ends)
    latest = {text[end - 1]: end for end in ends}
    found = [(count, latest[token], token) for token, count in counts.items() if token != SEPARATOR]
    return sorted(found, reverse=True)


def probabilities(following: Sequence[Text], depth: int) -> Paths:
    """Return each path's probability: at each level, a child's share among all children."""
    paths: Paths = {(): 1.0}
    for after in sorted({tuple(text[:d]) for text in following for d in range(1, depth + 1)}, key=len):
        parent = [text for text in following if tuple(text[: len(after) - 1]) == after[:-1]]
        going_on = [text for text in parent if len(text) >= len(after)]
        there = sum(text[len(after) - 1] == after[-1] for text in going_on)
        if there:
            paths[after] = paths[after[:-1]] * there / len(going_on)
    return paths


def best_score(documents: Sequence[Text], recent: Text, depth: int, rule: SuffixConfig) -> float:
    """Return the highest score over all match lengths."""
    best = 0.0
    for length in range(1, min(len(recent), MAX_MATCH_TOKENS) + 1):
        following = places(documents, recent, length)
        wanted = rule.max_draft_tokens(length)
        probs = probabilities(following, min(depth, wanted))
        probs.pop(())
        probable = sorted((p for p in probs.values() if p >= rule.min_probability - 1e-12), reverse=True)
        if rule.can_branch:
            best = max(best, sum(probable[:wanted]))
    return best


def expected_matches(documents: Sequence[Text], recent: Text) -> dict[int, list[Text]]:
    found: dict[int, list[Text]] = {}
    for length in range(1, min(len(recent), MAX_MATCH_TOKENS) + 1):
        following = sorted(places(documents, recent, length))
        if following:
            # If several lengths have the same occurrences, only the longest is expected.
            found = {known: those for known, those in found.items() if len(those) > len(following)}
            found[length] = following
    return found
