"""Suffix decoding gives the counts and drafts of an exhaustive search."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.methods.constants import MAX_MATCH_TOKENS
from edgespec.methods.suffix.drafter import (
    IndexedSource,
    ScoredDraft,
    SuffixConfig,
    draft_from_automaton,
    grow_draft,
    merge_drafts,
)
from edgespec.methods.suffix.indexes import SEPARATOR, SuffixAutomaton
from tests.methods.exhaustive_search import (
    Paths,
    Text,
    automaton_of,
    best_score,
    count_continuations,
    index_of,
    places,
    probabilities,
    rules,
    texts,
)


def guess_of(text: Sequence[int], depth: int, rule: SuffixConfig) -> ScoredDraft:
    """Return the draft from this chat alone."""
    chat = SuffixAutomaton(rule.min_probability)
    chat.set_tokens(text)
    return draft_from_automaton(chat, chat.longest_repeated_suffix(), text[-1], depth, rule)


def guess_from_others(documents: Sequence[Text], text: Text, depth: int, rule: SuffixConfig) -> ScoredDraft:
    """Return the draft for this chat from other chats."""
    others = SuffixAutomaton(rule.min_probability)
    for document in documents:
        others.extend([*document, SEPARATOR])
    match = others.follow(others.follow((0, 0), text[:1]), text[1:])
    return draft_from_automaton(others, match, text[-1], depth, rule)


def paths_of(guess: ScoredDraft) -> Paths:
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, len(guess.tokens)):
        paths[node] = (*paths[guess.parents[node]], guess.tokens[node])
    return {paths[node]: guess.probs[node] for node in range(1, len(guess.tokens))}


def by_definition(text: Text, depth: int, rule: SuffixConfig) -> ScoredDraft:
    """Return the draft by exhaustive search over all match lengths and paths."""

    def following(pattern: tuple[int, ...]) -> tuple[int, list[tuple[int, int, int, tuple[int, ...]]]]:
        branches = [(*found, (*pattern, found[2])) for found in count_continuations(text, pattern)]
        return sum(branch[0] for branch in branches), branches

    best = ScoredDraft([text[-1]], [-1], [1.0])
    for length in range(min(len(text), MAX_MATCH_TOKENS), 0, -1):
        pattern = tuple(text[-length:])
        if following(pattern)[0]:
            guess = grow_draft(following, pattern, text[-1], depth, rule.max_draft_tokens(length), rule)
            best = guess if guess.score > best.score else best
    return best


class TestTrees:
    """Scores are based on counts, the best score wins, and the limits of the config hold."""

    @settings(max_examples=100)
    @given(texts, rules, st.integers(1, 8))
    def test_probabilities_are_shares_of_counts(self, text: Text, rule: SuffixConfig, depth: int) -> None:
        chat = automaton_of(text)
        for length, state in chat.suffixes(*chat.longest_repeated_suffix()):
            nodes = rule.max_draft_tokens(length)
            guess = grow_draft(chat.continuations, state, text[-1], depth, nodes, rule)
            probs = probabilities(places([text], text, length), depth)
            for path, prob in paths_of(guess).items():
                assert prob == pytest.approx(probs[path])
                assert prob >= rule.min_probability
                assert len(path) <= depth
            assert len(guess.tokens) - 1 <= nodes
            assert rule.can_branch or guess.parents == list(range(-1, len(guess.parents) - 1))

    @settings(max_examples=100)
    @given(texts, rules, st.integers(1, 8))
    def test_no_match_length_scores_higher(self, text: Text, rule: SuffixConfig, depth: int) -> None:
        guess = guess_of(text, depth, rule)
        if rule.can_branch:
            assert guess.score == pytest.approx(best_score([text], text, depth, rule))

    @pytest.mark.long
    @settings(max_examples=100)
    @given(st.lists(texts, max_size=4), texts, rules, st.integers(1, 8))
    def test_no_match_length_scores_higher_in_other_sources(
        self, documents: list[Text], text: Text, rule: SuffixConfig, depth: int
    ) -> None:
        source = IndexedSource(index_of(*documents), rule)
        guesses = [source.propose(text[-MAX_MATCH_TOKENS:], depth) for _ in range(2)]
        for guess in (*guesses, guess_from_others(documents, text, depth, rule)):
            if rule.can_branch:
                assert guess.score == pytest.approx(best_score(documents, text, depth, rule))

    @pytest.mark.long
    @settings(max_examples=150)
    @given(texts, rules, st.integers(1, 8))
    def test_drafts_match_an_exhaustive_search(self, text: Text, rule: SuffixConfig, depth: int) -> None:
        assert guess_of(text, depth, rule) == by_definition(text, depth, rule)

    def test_nothing_is_drafted_after_an_end_token(self) -> None:
        rule = SuffixConfig(length_factor=4, is_end=lambda token: token == 9)
        guess = guess_of([1, 2, 9, 4, 5, 1, 2], 4, rule)
        assert guess.tokens == [2, 9]

    def test_ties_go_to_the_longest_match(self) -> None:
        # The tokens 1 2 were followed by 7, and 2 alone by 7 or 8. With one token to draft, both matches are
        # tried.
        guess = guess_of([1, 2, 7, 2, 8, 1, 2], 1, SuffixConfig())
        assert paths_of(guess) == {(7,): 1.0}

    def test_ties_of_uncertain_scores_go_to_the_longest_match(self) -> None:
        # The tokens 1 2 were followed by 7 or 8, each half of the time, and 2 mostly by 9.
        guess = guess_of([1, 2, 7, 1, 2, 8, 5, 2, 9, 6, 2, 9, 1, 2], 1, SuffixConfig(can_branch=False))
        assert paths_of(guess) == {(8,): 0.5}

    def test_a_path_at_the_minimum_probability_is_drafted(self) -> None:
        for least, followed in ((0.5, {(8,): 0.5, (7,): 0.5}), (0.51, {})):
            rule = SuffixConfig(length_factor=2, min_probability=least)
            assert paths_of(guess_of([2, 7, 2, 8, 2], 1, rule)) == followed

    def test_longer_matches_give_longer_drafts(self) -> None:
        text = list(range(30))
        for length in range(1, 12):
            guess = guess_of([*text, 99, *text[:length]], 16, SuffixConfig())
            assert guess.tokens == text[length - 1 : 2 * length]

    @pytest.mark.parametrize("period", [1, 2, 3])
    def test_a_loop_is_continued(self, period: int) -> None:
        guess = guess_of([7, *(list(range(period)) * 400)], 9, SuffixConfig())
        assert guess.tokens[1:] == [i % period for i in range(9)]


class TestMerging:
    """The best-scoring draft comes first. Others share the remaining probability."""

    def guess(self, paths: Paths) -> ScoredDraft:
        nodes: dict[tuple[int, ...], int] = {(): 0}
        tokens, parents, probs = [9], [-1], [1.0]
        for path, prob in sorted(paths.items(), key=lambda item: len(item[0])):
            nodes[path] = len(tokens)
            tokens.append(path[-1])
            parents.append(nodes[path[:-1]])
            probs.append(prob)
        return ScoredDraft(tokens, parents, probs)

    def test_a_certain_draft_gets_no_branches(self) -> None:
        sure = self.guess({(1,): 1.0, (1, 2): 1.0})
        assert paths_of(merge_drafts([self.guess({(3,): 0.9}), sure], SuffixConfig())) == paths_of(sure)

    def test_unassigned_probability_is_shared(self) -> None:
        first = self.guess({(1,): 0.6, (1, 2): 0.6})
        other = self.guess({(3,): 0.5, (3, 4): 0.5})
        assert paths_of(merge_drafts([other, first], SuffixConfig())) == pytest.approx(
            {(1,): 0.6, (1, 2): 0.6, (3,): 0.2, (3, 4): 0.2}
        )

    def test_a_longer_path_of_another_draft_is_appended(self) -> None:
        first = self.guess({(1,): 0.8, (2,): 0.2})
        other = self.guess({(1,): 0.45, (1, 5): 0.45})
        assert paths_of(merge_drafts([first, other], SuffixConfig()))[1, 5] == pytest.approx(0.8)

    def test_chains_stay_chains(self) -> None:
        first, other = self.guess({(1,): 0.6}), self.guess({(3,): 0.5})
        assert paths_of(merge_drafts([first, other], SuffixConfig(can_branch=False))) == {(1,): 0.6}

    @pytest.mark.long
    @settings(max_examples=100)
    @given(st.lists(texts, max_size=3), st.lists(texts, max_size=3), texts, rules, st.integers(1, 8))
    def test_merged_trees_hold_only_paths_that_occurred(
        self, some: list[Text], more: list[Text], text: Text, rule: SuffixConfig, depth: int
    ) -> None:
        guesses = [
            guess_of(text, depth, rule),
            guess_from_others(some, text, depth, rule),
            IndexedSource(index_of(*more), rule).propose(text[-MAX_MATCH_TOKENS:], depth),
        ]
        merged = merge_drafts(guesses, rule)
        paths = paths_of(merged)
        assert len(paths) == len(merged.tokens) - 1, "a path occurs twice in the tree"
        assert len(paths) <= rule.max_tokens
        assert merged.score >= max(guess.score for guess in guesses) - 1e-9
        for path in paths:
            assert len(path) <= depth
            assert any(
                following[: len(path)] == list(path)
                for documents in ([text], some, more)
                for following in places(documents, text, 1)
            )
