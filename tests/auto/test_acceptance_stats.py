"""What a drafter's guesses have been worth: counted as they came true, forgotten in time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.auto.acceptance_stats import AcceptanceStats
from edgespec.drafters.running_stats import AcceptanceCounts
from edgespec.engine.tree import TokenTree

CHAIN = TokenTree.chain(9, [1, 2, 3])
FORK = TokenTree((9, 1, 2, 3, 4), (-1, 0, 0, 1, 1), (None,) * 5)


class TestTally:
    @given(st.lists(st.booleans(), max_size=30))
    def test_a_newer_try_weighs_more(self, hits: list[bool]) -> None:
        tally = AcceptanceCounts(np.array([2.0, 1.0]), np.array([4.0, 4.0]))
        for hit in hits:
            tally.count((0,), hit)
        weights = AcceptanceCounts.REMEMBERED ** np.arange(len(hits))[::-1]
        first = AcceptanceCounts.REMEMBERED ** len(hits)
        assert tally.tries[0] == pytest.approx(weights.sum() + 4.0 * first)
        assert tally.hits[0] == pytest.approx(weights[np.array(hits, bool)].sum() + 2.0 * first)
        assert (tally.hits[1], tally.tries[1]) == (1.0, 4.0)

    def test_it_goes_back_to_how_it_began(self) -> None:
        first = np.array([2.0])
        tally = AcceptanceCounts(first, np.array([4.0]))
        for _ in range(50):
            tally.count((0,), True)
        seen = float(tally.hits[0])
        tally.fade(0.5)
        assert tally.hits[0] == pytest.approx((seen + 2.0) / 2)
        for _ in range(60):
            tally.fade(0.5)
        assert (tally.hits[0], tally.tries[0]) == pytest.approx((2.0, 4.0))
        assert first[0] == 2.0


class TestRecord:
    def test_only_what_stood_where_the_text_went_is_judged(self) -> None:
        """The second child of the root was wrong, and below it nothing is known."""
        record, before = AcceptanceStats(lookup=False), AcceptanceStats(lookup=False).chances(FORK)
        record.learn(FORK, [1, 4, 7])
        after = record.chances(FORK)
        assert after[1] > before[1]
        assert after[2] < before[2]
        assert after[3] < before[3]
        assert after[4] > before[4]

    def test_after_an_end_of_the_reply_the_rest_is_not_judged(self) -> None:
        record, before = AcceptanceStats(lookup=False), AcceptanceStats(lookup=False).chances(CHAIN)
        record.learn(CHAIN, [1])
        after = record.chances(CHAIN)
        assert after[1] > before[1]
        assert after[2:] == before[2:]

    def test_a_lookup_that_goes_on_being_right_is_believed_more(self) -> None:
        record = AcceptanceStats(lookup=True)
        chances = [record.chances(CHAIN)[2]]
        for _ in range(2):
            record.learn(CHAIN, [1, 2, 3, 4])
            chances.append(record.chances(CHAIN)[2])
        assert chances[0] < chances[1] < chances[2]
        record.learn(CHAIN, [5])
        assert record.chances(CHAIN)[2] < chances[2], "the streak is over"

    def test_survival_never_grows_with_the_level(self) -> None:
        record = AcceptanceStats(lookup=False)
        record.asked(FORK, 0.1)
        record.learn(FORK, [1, 4, 7])
        survival = record.survival(8)
        assert len(survival) == 8
        assert 1.0 > survival[0] > survival[7] > 0.0
        assert survival == sorted(survival, reverse=True)
