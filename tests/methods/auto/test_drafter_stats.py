"""AcceptanceStats and AcceptanceCounts: counting, decay and streaks, and the classification of prompts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.engine.tree import TokenTree
from edgespec.methods.auto.drafter_stats import TEXT_KINDS, AcceptanceStats, text_kind
from edgespec.methods.constants import ACCEPTANCE_DECAY
from edgespec.methods.running_stats import AcceptanceCounts

CHAIN = TokenTree.chain(9, [1, 2, 3])
FORK = TokenTree((9, 1, 2, 3, 4), (-1, 0, 0, 1, 1), (None,) * 5)
CODE = "Rename `total` here:\n\ndef mean(xs):\n    total = sum(xs)\n    return total / len(xs)\n"
SUM = "What is 17 * 23 + 4096 / 64 - 12.5?"


class TestAcceptanceCounts:
    @given(st.lists(st.booleans(), max_size=30))
    def test_newer_tokens_weigh_more(self, hits: list[bool]) -> None:
        tally = AcceptanceCounts(np.array([2.0, 1.0]), np.array([4.0, 4.0]))
        for hit in hits:
            tally.record((0,), hit)
        weights = ACCEPTANCE_DECAY ** np.arange(len(hits))[::-1]
        first = ACCEPTANCE_DECAY ** len(hits)
        assert tally.drafted[0] == pytest.approx(weights.sum() + 4.0 * first)
        assert tally.accepted[0] == pytest.approx(weights[np.array(hits, bool)].sum() + 2.0 * first)
        assert (tally.accepted[1], tally.drafted[1]) == (1.0, 4.0)

    def test_decay_returns_to_the_prior(self) -> None:
        first = np.array([2.0])
        tally = AcceptanceCounts(first, np.array([4.0]))
        for _ in range(50):
            tally.record((0,), True)
        seen = float(tally.accepted[0])
        tally.decay(0.5)
        assert tally.accepted[0] == pytest.approx((seen + 2.0) / 2)
        for _ in range(60):
            tally.decay(0.5)
        assert (tally.accepted[0], tally.drafted[0]) == pytest.approx((2.0, 4.0))
        assert first[0] == 2.0


class TestAcceptanceStats:
    def test_only_siblings_on_the_emitted_path_are_counted(self) -> None:
        """Children of a rejected node say nothing about acceptance."""
        record, before = AcceptanceStats(is_lookup=False), AcceptanceStats(is_lookup=False).node_probs(FORK)
        record.record_outcome(FORK, [1, 4, 7])
        after = record.node_probs(FORK)
        assert after[1] > before[1]
        assert after[2] < before[2]
        assert after[3] < before[3]
        assert after[4] > before[4]

    def test_nodes_after_the_end_of_a_reply_are_not_counted(self) -> None:
        record, before = AcceptanceStats(is_lookup=False), AcceptanceStats(is_lookup=False).node_probs(CHAIN)
        record.record_outcome(CHAIN, [1])
        after = record.node_probs(CHAIN)
        assert after[1] > before[1]
        assert after[2:] == before[2:]

    def test_a_streak_raises_a_lookups_probability(self) -> None:
        record = AcceptanceStats(is_lookup=True)
        chances = [record.node_probs(CHAIN)[2]]
        for _ in range(2):
            record.record_outcome(CHAIN, [1, 2, 3, 4])
            chances.append(record.node_probs(CHAIN)[2])
        assert chances[0] < chances[1] < chances[2]
        record.record_outcome(CHAIN, [5])
        assert record.node_probs(CHAIN)[2] < chances[2], "the streak is over"

    def test_reach_probs_fall_with_the_level(self) -> None:
        record = AcceptanceStats(is_lookup=False)
        record.record_draft(FORK, 0.1)
        record.record_outcome(FORK, [1, 4, 7])
        survival = record.reach_probs(8)
        assert len(survival) == 8
        assert 1.0 > survival[0] > survival[7] > 0.0
        assert survival == sorted(survival, reverse=True)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("How do I list files by size?", "talk"),
        (CODE, "code"),
        ("```\nls -l\n```\nWhat does this do?", "code"),
        (SUM, "numbers"),
        ("The harbour was quiet in the morning. " * 50 + "Summarise this.", "document"),
        ("", "talk"),
    ],
)
def test_kind_of_examples(text: str, kind: str) -> None:
    assert text_kind(text) == kind


@given(st.text())
def test_every_text_has_a_kind(text: str) -> None:
    assert text_kind(text) in TEXT_KINDS
