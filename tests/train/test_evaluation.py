"""The figures of a drafter: tokens per pass in chains and in trees, and vocabulary coverage."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.errors import CancelledError
from edgespec.model.drafter_training import TrainingBatch
from edgespec.train.conversations import Conversation
from edgespec.train.evaluation import measure_drafter
from tests.train.conftest import no_progress

# Four drafts in one conversation: the ranks of the target's tokens among the drafter's choices.
RANKS = np.array([[0, 0, 0, 0], [2, 1, 0, 1], [0, 2, 0, 0], [3, 0, 0, 0]])


class FakeGuesser:
    draft_tokens = np.array([1, 2, 3])

    def ranks(self, _batch: TrainingBatch, depth: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        assert depth == RANKS.shape[1]
        return RANKS, np.zeros(len(RANKS), np.int64)


def held_out() -> list[Conversation]:
    # The reply consists of the last five tokens, one of which the drafter cannot propose.
    return [Conversation(np.array([9, 9, 1, 2, 3, 1, 9], np.int32), 2, "talk")]


def test_tokens_per_pass_in_chains_and_in_trees() -> None:
    figures = measure_drafter(FakeGuesser(), held_out(), 100, no_progress)
    # In chains, only the first choices count: 4, 0, 1 and 0 tokens are accepted.
    assert figures.tokens_per_pass == 1 + 5 / 4
    assert figures.acceptance_per_depth == (0.5, 0.5, 1.0, 1.0)
    # In trees, the first three choices count at the first depth, and two at the second: 4, 3, 1 and 0.
    assert figures.tokens_per_pass_in_trees == 1 + 8 / 4
    assert (figures.draft_tokens, figures.coverage) == (3, 0.8)
    assert figures.tokens_per_pass_by_kind == {"talk": figures.tokens_per_pass}
    assert figures.to_json()["tokens_per_pass_in_trees"] == 3.0


def test_an_evaluation_is_cancelled() -> None:
    with pytest.raises(CancelledError):
        measure_drafter(FakeGuesser(), held_out(), 100, lambda _text, _fraction: False)
