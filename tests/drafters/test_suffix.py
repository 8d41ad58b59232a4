"""Suffix decoding: every count and every choice is what looking at every place gives."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.drafters.suffix import Known, Rule, SuffixDrafter, TextIndex
from edgespec.drafters.suffix.guess import Guess, best_guess, combined, grow
from edgespec.drafters.text import LONGEST, SAMPLE, SEPARATOR, GrowingText, Match
from edgespec.engine.acceptance import Invariant
from edgespec.engine.chain import SamplingParams
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree
from tests.tables import VOCAB, table, with_drafter

Text = list[int]
Paths = dict[tuple[int, ...], float]

letters = st.integers(0, 2)
texts = st.lists(letters, min_size=1, max_size=60)
rules = st.builds(
    Rule,
    factor=st.sampled_from([0.5, 1.0, 2.0]),
    offset=st.sampled_from([0.0, 1.0]),
    min_probability=st.sampled_from([0.1, 0.3]),
    most_nodes=st.integers(1, 12),
    can_branch=st.booleans(),
)


def never(token: int) -> bool:
    return False


def growing(text: Sequence[int]) -> GrowingText:
    grown = GrowingText()
    grown.restart(text)
    return grown


def index_of(*documents: Text) -> TextIndex:
    return TextIndex(np.array(document, np.int32) for document in documents)


def places(documents: Sequence[Text], recent: Text, length: int) -> list[Text]:
    """What follows every occurrence of the last `length` tokens, found by looking everywhere."""
    pattern = recent[len(recent) - length :]
    return [
        document[at:]
        for document in documents
        for at in range(length, len(document))
        if document[at - length : at] == pattern
    ]


def probabilities(following: Sequence[Text], depth: int) -> Paths:
    """The share of each path among the occurrences, level by level: child / all children."""
    paths: Paths = {(): 1.0}
    for after in sorted({tuple(text[:d]) for text in following for d in range(1, depth + 1)}, key=len):
        parent = [text for text in following if tuple(text[: len(after) - 1]) == after[:-1]]
        going_on = [text for text in parent if len(text) >= len(after)]
        there = sum(text[len(after) - 1] == after[-1] for text in going_on)
        if there:
            paths[after] = paths[after[:-1]] * there / len(going_on)
    return paths


def by_searching(documents: Sequence[Text], recent: Text, depth: int, rule: Rule) -> float:
    """The highest score any match length earns."""
    best = 0.0
    for length in range(1, min(len(recent), LONGEST) + 1):
        following = places(documents, recent, length)
        wanted = rule.nodes(length)
        probs = probabilities(following, min(depth, wanted))
        probs.pop(())
        probable = sorted((p for p in probs.values() if p >= rule.min_probability - 1e-12), reverse=True)
        if rule.can_branch:
            best = max(best, sum(probable[:wanted]))
    return best


def paths_of(guess: Guess) -> Paths:
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, len(guess.tokens)):
        paths[node] = (*paths[guess.parents[node]], guess.tokens[node])
    return {paths[node]: guess.probs[node] for node in range(1, len(guess.tokens))}


def lengths_and_places(matches: Sequence[Match], text: GrowingText | TextIndex) -> dict[int, list[Text]]:
    found = {}
    for match in matches:
        following = []
        for at in match.after.tolist():
            rest = text.text[at:].tolist()
            following.append(rest[: rest.index(SEPARATOR)])
        found[match.length] = sorted(following)
    return found


def expected_matches(documents: Sequence[Text], recent: Text) -> dict[int, list[Text]]:
    found: dict[int, list[Text]] = {}
    for length in range(1, min(len(recent), LONGEST) + 1):
        following = sorted(places(documents, recent, length))
        if following:
            # Of lengths with the same occurrences the longest stands for all.
            found = {known: those for known, those in found.items() if len(those) > len(following)}
            found[length] = following
    return found


class TestMatches:
    """Every occurrence of every match length is found, and nothing else."""

    @settings(max_examples=100, deadline=None)
    @given(texts)
    def test_in_this_chat(self, text: Text) -> None:
        chat = growing(text)
        matches = chat.matches(chat.recent())
        assert lengths_and_places(matches, chat) == expected_matches([text], text)

    @settings(max_examples=100, deadline=None)
    @given(st.lists(texts, max_size=5), texts)
    def test_in_texts_known_beforehand(self, documents: list[Text], text: Text) -> None:
        index = index_of(*documents)
        matches = index.matches(growing(text).recent())
        assert lengths_and_places(matches, index) == expected_matches(documents, text)

    def test_where_there_are_too_many_the_longest_are_still_found(self) -> None:
        random = np.random.default_rng(1)
        text = random.integers(0, 3, 6000).tolist()
        needle = random.integers(0, 3, 40).tolist()
        whole = [*needle, *text, *needle[:25]]
        for matches, source in (
            ((chat := growing(whole)).matches(chat.recent()), chat),
            ((index := index_of([*needle, *text])).matches(chat.recent()), index),
        ):
            assert matches[-1].length >= 25
            assert source.text[int(matches[-1].after[0]) :][:15].tolist() == needle[25:]
            expected = expected_matches([whole if source is chat else [*needle, *text]], whole[-LONGEST:])
            few = {length: those for length, those in expected.items() if len(those) <= SAMPLE}
            found = lengths_and_places(matches, source)
            assert {length: found[length] for length in few} == few
            assert set(found) == set(expected)

    @pytest.mark.parametrize("recent", [[9], [7, 9], [8, 9], [6, 7, 9]])
    @pytest.mark.parametrize("since", [0, 1000, 9000])
    def test_of_too_many_places_the_latest_are_kept_however_long_ago(
        self, recent: list[int], since: int
    ) -> None:
        text = [*[6, 7, 9, 1, 8, 9] * 300, *[0, 1, 2, 3] * (since // 4), 5, *recent]
        chat = growing(text)
        matches = chat.matches(chat.recent())
        assert matches
        for match in matches:
            ending = recent[-match.length :]
            ends = [at for at in range(len(ending), len(text)) if text[at - len(ending) : at] == ending]
            assert match.after.tolist() == [LONGEST + at for at in ends[::-1][:SAMPLE]]
        assert {match.length for match in matches} == {len(recent)} | ({1} if len(recent) > 1 else set())

    def test_long_phrases_that_occur_everywhere(self) -> None:
        random = np.random.default_rng(2)
        phrase = [5, 6, 7, 8, 9] * 4
        text = [token for _ in range(900) for token in (*random.integers(0, 3, 4).tolist(), *phrase)]
        recent = growing([1, 2, 1, *phrase]).recent()
        back = recent.tolist()
        index = index_of(text)
        matches = index.matches(recent)
        counts = {length: len(places([text], back[::-1], length)) for length in range(1, 24)}
        distinct = {length for length in counts if counts[length] > counts.get(length + 1, 0)}
        assert {match.length for match in matches} == distinct
        assert max(distinct) == 23
        assert counts[21] > 256
        for match in matches:
            assert min(counts[match.length], SAMPLE // 2) <= len(set(match.after.tolist())) <= SAMPLE
            for at in match.after.tolist():
                assert index.text[at - match.length : at][::-1].tolist() == back[: match.length]

    def test_of_equal_matches_the_latest_comes_first(self) -> None:
        chat = growing([5, 1, 5, 2, 5, 3, 5])
        (match,) = chat.matches(chat.recent())
        assert chat.text[match.after].tolist() == [3, 2, 1]

    def test_a_loop_is_followed(self) -> None:
        for period in (1, 2, 3):
            chat = growing([7, *(list(range(period)) * 400)])
            matches = chat.matches(chat.recent())
            guess = best_guess(chat.text, matches, period - 1, 9, Rule(), never)
            assert guess.tokens[1:] == [i % period for i in range(9)]
            assert [match.length for match in matches] == [LONGEST]

    @settings(max_examples=100, deadline=None)
    @given(texts, st.lists(st.lists(letters, min_size=1, max_size=9), max_size=8), st.integers(1, 20))
    def test_bit_by_bit_is_at_once_and_the_end_of_a_long_text_is_kept(
        self, start: Text, rounds: list[Text], most: int
    ) -> None:
        grown = GrowingText(most)
        grown.restart(start)
        tokens = start[-most:]
        for emitted in rounds:
            grown.append(emitted)
            tokens = [*tokens, *emitted] if len(tokens) + len(emitted) <= 2 * most else []
            tokens = tokens or grown.text[LONGEST : grown.end].tolist()
        everything = [*start, *(token for emitted in rounds for token in emitted)]
        assert tokens == everything[len(everything) - len(tokens) :]
        assert len(tokens) >= min(most, len(everything))
        assert grown.text.nbytes <= grown.most_bytes
        assert lengths_and_places(grown.matches(grown.recent()), grown) == expected_matches([tokens], tokens)


class TestTrees:
    """Scores are counts, the best score wins, and the rule's bounds hold."""

    @settings(max_examples=100, deadline=None)
    @given(texts, rules, st.integers(1, 8))
    def test_every_probability_is_a_count(self, text: Text, rule: Rule, depth: int) -> None:
        chat = growing(text)
        for match in chat.matches(chat.recent()):
            guess = grow(chat.text, match, text[-1], depth, rule, never)
            probs = probabilities(places([text], text, match.length), depth)
            for path, prob in paths_of(guess).items():
                assert prob == pytest.approx(probs[path])
                assert prob >= rule.min_probability
                assert len(path) <= depth
            assert len(guess.tokens) - 1 <= rule.nodes(match.length)
            assert rule.can_branch or guess.parents == list(range(-1, len(guess.parents) - 1))

    @settings(max_examples=100, deadline=None)
    @given(texts, rules, st.integers(1, 8))
    def test_no_match_length_scores_higher(self, text: Text, rule: Rule, depth: int) -> None:
        chat = growing(text)
        guess = best_guess(chat.text, chat.matches(chat.recent()), text[-1], depth, rule, never)
        if rule.can_branch:
            assert guess.score == pytest.approx(by_searching([text], text, depth, rule))

    @settings(max_examples=100, deadline=None)
    @given(st.lists(texts, max_size=4), texts, rules, st.integers(1, 8))
    def test_nor_in_an_index(self, documents: list[Text], text: Text, rule: Rule, depth: int) -> None:
        index = index_of(*documents)
        guess = best_guess(index.text, index.matches(growing(text).recent()), text[-1], depth, rule, never)
        if rule.can_branch:
            assert guess.score == pytest.approx(by_searching(documents, text, depth, rule))

    def test_nothing_is_guessed_after_an_end(self) -> None:
        chat = growing([1, 2, 9, 4, 5, 1, 2])
        matches = chat.matches(chat.recent())
        assert best_guess(chat.text, matches, 2, 4, Rule(factor=4), lambda t: t == 9).tokens == [2, 9]

    def test_of_equal_scores_the_longest_match_wins(self) -> None:
        # After 1 2 came 7, after 2 alone 7 or 8: with one token to guess, both matches are tried.
        chat = growing([1, 2, 7, 2, 8, 1, 2])
        guess = best_guess(chat.text, chat.matches(chat.recent()), 2, 1, Rule(), never)
        assert paths_of(guess) == {(7,): 1.0}

    def test_of_equal_uncertain_scores_too(self) -> None:
        # After 1 2 came 7 or 8, after any 2 mostly 9: half of the time each.
        chat = growing([1, 2, 7, 1, 2, 8, 5, 2, 9, 6, 2, 9, 1, 2])
        rule = Rule(can_branch=False)
        guess = best_guess(chat.text, chat.matches(chat.recent()), 2, 1, rule, never)
        assert paths_of(guess) == {(8,): 0.5}

    def test_a_path_just_probable_enough_is_followed(self) -> None:
        chat = growing([2, 7, 2, 8, 2])
        for least, followed in ((0.5, {(8,): 0.5, (7,): 0.5}), (0.51, {})):
            rule = Rule(factor=2, min_probability=least)
            assert paths_of(best_guess(chat.text, chat.matches(chat.recent()), 2, 1, rule, never)) == followed

    def test_the_draft_grows_with_the_match(self) -> None:
        text = list(range(30))
        for length in range(1, 12):
            drafter = SuffixDrafter()
            drafter.begin([*text, 99, *text[:length]])
            assert tree(drafter, 16).tokens == tuple(text[length - 1 : 2 * length])


class TestCombining:
    """The best-scoring source first; others fill what it leaves open."""

    def guess(self, paths: Paths) -> Guess:
        nodes: dict[tuple[int, ...], int] = {(): 0}
        tokens, parents, probs = [9], [-1], [1.0]
        for path, prob in sorted(paths.items(), key=lambda item: len(item[0])):
            nodes[path] = len(tokens)
            tokens.append(path[-1])
            parents.append(nodes[path[:-1]])
            probs.append(prob)
        return Guess(tokens, parents, probs)

    def test_a_certain_guess_is_not_widened(self) -> None:
        sure = self.guess({(1,): 1.0, (1, 2): 1.0})
        assert paths_of(combined([self.guess({(3,): 0.9}), sure], Rule())) == paths_of(sure)

    def test_what_is_open_is_shared(self) -> None:
        first = self.guess({(1,): 0.6, (1, 2): 0.6})
        other = self.guess({(3,): 0.5, (3, 4): 0.5})
        assert paths_of(combined([other, first], Rule())) == pytest.approx(
            {(1,): 0.6, (1, 2): 0.6, (3,): 0.2, (3, 4): 0.2}
        )

    def test_a_longer_path_of_another_goes_on(self) -> None:
        first = self.guess({(1,): 0.8, (2,): 0.2})
        other = self.guess({(1,): 0.45, (1, 5): 0.45})
        assert paths_of(combined([first, other], Rule()))[1, 5] == pytest.approx(0.8)

    def test_chains_stay_chains(self) -> None:
        first, other = self.guess({(1,): 0.6}), self.guess({(3,): 0.5})
        assert paths_of(combined([first, other], Rule(can_branch=False))) == {(1,): 0.6}

    @settings(max_examples=100, deadline=None)
    @given(st.lists(texts, max_size=3), st.lists(texts, max_size=3), texts, rules, st.integers(1, 8))
    def test_the_merged_tree_is_one_of_paths_that_occurred(
        self, some: list[Text], more: list[Text], text: Text, rule: Rule, depth: int
    ) -> None:
        sources: list[GrowingText | TextIndex] = [growing(text), index_of(*some), index_of(*more)]
        recent = growing(text).recent()
        guesses = [
            best_guess(source.text, source.matches(recent), text[-1], depth, rule, never)
            for source in sources
        ]
        merged = combined(guesses, rule)
        paths = paths_of(merged)
        assert len(paths) == len(merged.tokens) - 1, "a path stands there twice"
        assert len(paths) <= rule.most_nodes
        assert merged.score >= max(guess.score for guess in guesses) - 1e-9
        for path in paths:
            assert len(path) <= depth
            assert any(
                following[: len(path)] == list(path)
                for documents in ([text], some, more)
                for following in places(documents, text, 1)
            )


def tree(drafter: SuffixDrafter, draft_length: int) -> TokenTree:
    return drafter.propose(Sampler(SamplingParams(), 0, [0]), Invariant(), draft_length)


class Kept:
    """Keeps replies in a list."""

    def __init__(self) -> None:
        self.replies: list[Text] = []
        self.notice = ""

    def add(self, tokens: Sequence[int]) -> None:
        self.replies.append(list(tokens))


class TestSeveralChats:
    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 2), st.lists(letters, min_size=1, max_size=6)), max_size=8))
    def test_alternating_chats_are_each_like_a_first_one(self, turns: list[tuple[int, Text]]) -> None:
        chats: list[Text] = [[0, 1], [1, 2, 1], [2]]
        drafter = SuffixDrafter()
        for chat, emitted in turns:
            drafter.begin(chats[chat])
            drafter.commit(tuple(emitted))
            chats[chat] = [*chats[chat], *emitted]
            fresh = SuffixDrafter()
            fresh.begin(chats[chat])
            assert tree(drafter, 5) == tree(fresh, 5)

    def test_replies_help_other_chats_only_where_they_are_remembered(self) -> None:
        for replies, guessed in ((Kept(), (3, 4, 5)), (None, (3,))):
            drafter = SuffixDrafter(partial(Known, None, replies))
            drafter.begin([7, 8])
            drafter.commit((1, 2, 3, 4, 5))
            drafter.begin([9, 1, 2, 3])
            assert tree(drafter, 4).tokens == guessed

    def test_a_reply_is_kept_when_it_is_over(self) -> None:
        kept = Kept()
        drafter = SuffixDrafter(lambda: Known(replies=kept))
        drafter.begin([1, 2])
        drafter.commit((3,))
        drafter.commit((4, 5))
        assert kept.replies == []
        drafter.begin([1, 2, 3, 4, 5, 6])
        drafter.begin([7])
        drafter.commit((8,))
        drafter.close()
        drafter.close()
        assert kept.replies == [[3, 4, 5], [8]]


def test_texts_given_beforehand_are_guessed_from() -> None:
    drafter = SuffixDrafter(lambda: Known(index_of(list(range(10, 40)), list(range(50, 90)))))
    drafter.begin([1, 2, 60, 61, 62, 63])
    assert tree(drafter, 8).tokens == (63, 64, 65, 66, 67)
    assert tree(drafter, 2).tokens == (63, 64, 65)


def test_other_texts_are_asked_for_once_and_not_before_a_reply() -> None:
    asked: list[int] = []

    def known() -> Known:
        asked.append(1)
        return Known(index_of([1, 2, 3, 4, 5]))

    drafter = SuffixDrafter(known)
    assert (asked, drafter.note()) == ([], "")
    for _ in range(2):
        drafter.begin([9, 2, 3])
        assert asked == [1]
        assert tree(drafter, 4).tokens == (3, 4, 5)
    drafter.close()
    unused = SuffixDrafter(known)
    unused.close()
    assert asked == [1]


def test_what_is_wrong_with_remembering_is_told() -> None:
    kept = Kept()
    drafter = SuffixDrafter(lambda: Known(replies=kept))
    kept.notice = "replies are not remembered"
    assert drafter.note() == ""
    drafter.begin([1])
    assert drafter.note() == "replies are not remembered"
    drafter.commit((2,))
    drafter.cost.seconds = 5e-6
    assert drafter.note() == "suffix costs 5 µs a token; replies are not remembered"


def test_what_it_costs_and_holds_is_told() -> None:
    index = index_of(list(range(1000)))
    drafter = SuffixDrafter(lambda: Known(index))
    assert SuffixDrafter().cost.microseconds_per_token is None
    drafter.begin([1, 2, 3])
    tree(drafter, 4)
    drafter.commit((4, 5))
    assert drafter.cost.microseconds_per_token == 1e6 * drafter.cost.seconds / 2 > 0
    drafter.cost.seconds = 2 * 37e-6
    assert drafter.note() == "suffix costs 37 µs a token and knows 1,000 tokens of other texts"
    assert index.bytes < 9_000
    assert drafter.extra_kv_bytes == index.bytes + GrowingText().most_bytes


def half_known(seed: int) -> TextIndex:
    """Random texts, some longer than a reply."""
    random = np.random.default_rng(seed)
    return index_of(*(random.integers(0, VOCAB, 200).tolist() for _ in range(5)))


RULES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "wide": {"factor": 4.0, "offset": 4.0, "min_probability": 0.02},
    "chains": {"can_branch": False, "factor": 4.0},
}


@pytest.mark.parametrize("branching", [True, False], ids=["trees", "a target without trees"])
@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.2])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_replies_are_those_of_plain_decoding(
    temperature: float, rule: dict[str, Any], branching: bool
) -> None:
    drafted = 0
    for seed in range(6):
        target = table(seed, spread=3.0, tree=branching)
        known = partial(Known, half_known(seed), Kept())
        drafter = SuffixDrafter(known, rule=Rule(**rule), is_end=target.vocabulary.is_end)
        with with_drafter(target, drafter) as runtime:
            for prompt in ("abcab", "dddd", "a"):
                options: dict[str, Any] = {"temperature": temperature, "seed": seed, "max_tokens": 60}
                plain = runtime.generate(prompt, method="none", raw=True, **options)
                got = runtime.generate(prompt, method="suffix", draft_length=6, raw=True, **options)
                assert (got.tokens, got.finish_reason) == (plain.tokens, plain.finish_reason)
                drafted += got.stats.accepted_tokens
    assert drafted > 50, "nothing was guessed right: this shows little"
