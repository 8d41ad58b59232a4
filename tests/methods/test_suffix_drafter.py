"""The suffix drafter: what it drafts from and when, its notes, and that replies stay identical."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.engine.acceptance import Invariant
from edgespec.engine.sampling import Sampler
from edgespec.engine.sampling_params import SamplingParams
from edgespec.engine.tree import TokenTree
from edgespec.methods.suffix.drafter import SuffixConfig, SuffixCorpus, SuffixDrafter
from edgespec.methods.suffix.indexes import SuffixArray
from tests.cases import first
from tests.methods.exhaustive_search import Text, index_of, letters
from tests.tables import VOCAB, table, with_drafter


def tree(drafter: SuffixDrafter, draft_length: int) -> TokenTree:
    return drafter.propose(Sampler(SamplingParams(), 0, [0]), Invariant(), draft_length)


class Kept:
    """Records prompts and replies in lists."""

    def __init__(self) -> None:
        self.prompts: list[Text] = []
        self.replies: list[Text] = []
        self.notice = ""

    def add(self, reply: Sequence[int], prompt: Sequence[int]) -> list[Text]:
        self.prompts.append(list(prompt))
        self.replies.append(list(reply))
        return [[*prompt, *reply]]


class TestSeveralChats:
    @pytest.mark.long
    @settings(max_examples=100)
    @given(st.lists(st.tuples(st.integers(0, 2), st.lists(letters, min_size=1, max_size=6)), max_size=8))
    def test_alternating_chats_draft_like_single_chats(self, turns: list[tuple[int, Text]]) -> None:
        chats: list[Text] = [[0, 1], [1, 2, 1], [2]]
        drafter = SuffixDrafter()
        for chat, emitted in turns:
            drafter.begin(chats[chat])
            drafter.commit(tuple(emitted))
            chats[chat] = [*chats[chat], *emitted]
            fresh = SuffixDrafter()
            fresh.begin(chats[chat])
            assert tree(drafter, 5) == tree(fresh, 5)

    def test_other_chats_are_used_only_with_a_recorder(self) -> None:
        for replies, guessed in ((Kept(), (3, 4, 5)), (None, (3,))):
            drafter = SuffixDrafter(partial(SuffixCorpus, None, replies))
            drafter.begin([7, 8])
            drafter.commit((1, 2, 3, 4, 5))
            drafter.begin([9, 1, 2, 3])
            assert tree(drafter, 4).tokens == guessed

    def test_a_reply_is_recorded_when_the_next_begins(self) -> None:
        kept = Kept()
        drafter = SuffixDrafter(lambda: SuffixCorpus(recorder=kept))
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
        assert kept.prompts == [[1, 2], [7]]

    def test_prompts_of_other_chats_are_used_like_replies(self) -> None:
        kept = Kept()
        drafter = SuffixDrafter(lambda: SuffixCorpus(recorder=kept))
        drafter.begin([1, 2, 3, 4, 5])
        drafter.commit((6,))
        drafter.begin([1, 2, 3, 4, 5, 6, 7])
        drafter.begin([9, 2, 3])
        assert tree(drafter, 2).tokens == (3, 4, 5)
        drafter.begin([9, 5])
        assert tree(drafter, 2).tokens == (5, 6)


def test_the_corpus_is_drafted_from() -> None:
    drafter = SuffixDrafter(lambda: SuffixCorpus(index_of(list(range(10, 40)), list(range(50, 90)))))
    drafter.begin([1, 2, 60, 61, 62, 63])
    assert tree(drafter, 8).tokens == (63, 64, 65, 66, 67)
    assert tree(drafter, 2).tokens == (63, 64, 65)


def test_the_corpus_is_loaded_by_the_first_reply_only() -> None:
    asked: list[int] = []

    def known() -> SuffixCorpus:
        asked.append(1)
        return SuffixCorpus(index_of([1, 2, 3, 4, 5]))

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


def test_the_note_reports_problems_of_the_recorder() -> None:
    kept = Kept()
    drafter = SuffixDrafter(lambda: SuffixCorpus(recorder=kept))
    kept.notice = "replies are not remembered"
    assert drafter.note() == ""
    drafter.begin([1])
    assert drafter.note() == "replies are not remembered"


def test_the_note_reports_the_index_size() -> None:
    index = index_of(list(range(1000)))
    drafter = SuffixDrafter(lambda: SuffixCorpus(index))
    drafter.begin([1, 2, 3])
    assert drafter.note() == "searches 1,000 tokens of files and earlier chats for repeated text"
    assert index.size_bytes < 9_000
    assert 100 < drafter.memory_use.other_bytes - index.size_bytes < 3_000


def half_known(seed: int) -> SuffixArray:
    """Return random texts, some of them longer than a reply."""
    random = np.random.default_rng(seed)
    return index_of(*(random.integers(0, VOCAB, 200).tolist() for _ in range(5)))


RULES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "wide": {"length_factor": 4.0, "length_offset": 4.0, "min_probability": 0.02},
    "chains": {"can_branch": False, "length_factor": 4.0},
}


@pytest.mark.long
@pytest.mark.parametrize("branching", [True, False], ids=["trees", "a target without trees"])
@pytest.mark.parametrize("temperature", first([0.8, 0.0, 1.2]))
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_replies_are_identical(temperature: float, rule: dict[str, Any], branching: bool) -> None:
    drafted = 0
    for seed in range(6):
        target = table(seed, spread=3.0, tree=branching)
        known = partial(SuffixCorpus, half_known(seed), Kept())
        config = SuffixConfig(**rule, is_end=target.vocabulary.is_end)
        drafter = SuffixDrafter(known, config=config)
        with with_drafter(target, drafter) as runtime:
            for prompt in ("abcab", "dddd", "a"):
                options: dict[str, Any] = {"temperature": temperature, "seed": seed, "max_tokens": 60}
                plain = runtime.generate(prompt, method="none", raw=True, **options)
                got = runtime.generate(prompt, method="suffix", draft_length=6, raw=True, **options)
                assert (got.tokens, got.finish_reason) == (plain.tokens, plain.finish_reason)
                drafted += got.stats.accepted_tokens
    assert drafted > 50, "too few drafted tokens, so the test checks too little"


def test_after_reset_the_prompt_is_indexed_again() -> None:
    drafter = SuffixDrafter()
    drafter.begin([0, 1, 2, 0, 1, 2])
    drafter.reset()
    assert tuple(drafter._chat.tokens) == ()
    drafter.begin([0, 1, 2, 0, 1, 2])
    assert tree(drafter, 2).drafted


def test_warm_up_loads_the_corpus() -> None:
    asked: list[int] = []

    def known() -> SuffixCorpus:
        asked.append(1)
        return SuffixCorpus()

    drafter = SuffixDrafter(known)
    drafter.warm_up()
    assert asked == [1]
    drafter.begin([1, 2, 3])
    assert asked == [1]


def test_a_session_records_the_prompt_without_the_reply() -> None:
    recorder = Kept()
    drafter = SuffixDrafter(lambda: SuffixCorpus(recorder=recorder))
    with with_drafter(table(1), drafter) as runtime:
        reply = runtime.stream_tokens([0, 1, 2], max_tokens=6, seed=1).wait()
    drafter.close()
    assert (recorder.prompts, recorder.replies) == ([[0, 1, 2]], [list(reply.tokens)])
