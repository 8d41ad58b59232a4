"""A reply's statistics: every moment of a round belongs to a phase, and overlapped time to verify passes."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.engine import loop
from edgespec.engine.acceptance import Acceptance, Invariant
from edgespec.engine.logits import HostLogits, Logits
from edgespec.engine.sampling import Sampler
from edgespec.engine.sampling_params import SamplingParams
from edgespec.engine.stats import Phase, RoundTimer, Stats
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError

LAPS: tuple[Phase, ...] = ("draft", "verify", "sampling", "draft", "overhead", "rollback", "overhead")


class Hand:
    """A clock that only advances when told to."""

    def __init__(self) -> None:
        self.seconds = 5.0

    def __call__(self) -> float:
        return self.seconds


class Slow:
    """A target and a drafter that always give token 1. Each step takes a different time."""

    free_tokens = 100

    def __init__(self, hand: Hand) -> None:
        self._hand = hand
        self.cancelled = False

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        self._hand.seconds += 1.0
        return TokenTree.chain(1, [1] * draft_length)

    def verify(self, tree: TokenTree) -> HostLogits:
        self._hand.seconds += 2.0
        if self.cancelled:
            raise CancelledError("the reply was cancelled")
        logits = HostLogits(np.tile(np.array([0.0, 1.0], np.float32), (tree.width, 1)))
        logits.overlapped_seconds, logits.waited_seconds = 0.25, 0.5
        return logits

    def observe(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> None:
        self._hand.seconds += 4.0

    def commit(self, tokens: tuple[int, ...]) -> None:
        self._hand.seconds += 8.0

    def is_stop(self, token: int) -> bool:
        self._hand.seconds += 32.0
        return False


def phases(stats: Stats) -> tuple[float, ...]:
    return (
        stats.draft_seconds,
        stats.verify_seconds,
        stats.sampling_seconds,
        stats.rollback_seconds,
        stats.overhead_seconds,
    )


def test_every_step_of_a_round_is_timed_as_its_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand()
    monkeypatch.setattr(loop, "RoundTimer", lambda: RoundTimer(hand))
    slow, stats = Slow(hand), Stats()
    steps = loop.decode(
        slow,
        slow,
        Invariant(),
        Sampler(SamplingParams(temperature=0.0), 0, [1]),
        1,
        vocab_size=2,
        draft_length=3,
        max_tokens=100,
        is_stop=slow.is_stop,
        is_cancelled=lambda: False,
        stats=stats,
    )
    one = (1.0 + 4.0 - 0.25, 2.0 + 0.25 + 0.5, -0.5, 16.0, 4 * 32.0)
    for count in (1, 2):
        assert next(steps).tokens == (1, 1, 1, 1)
        assert phases(stats) == tuple(count * seconds for seconds in one)
        hand.seconds += 1000.0  # the reader's own time is nobody's
    slow.cancelled = True
    assert next(steps).finish_reason == "cancelled"
    assert phases(stats) == tuple(2 * seconds for seconds in one), "an unfinished round is not counted"


def test_phases_sum_to_the_round_and_unfinished_rounds_are_dropped() -> None:
    hand, stats = Hand(), Stats()
    clock = RoundTimer(hand)
    hand.seconds += 50.0
    clock.lap("draft")
    clock.start()
    began = hand.seconds
    for i, phase in enumerate(LAPS):
        hand.seconds += 2.0**i
        clock.lap(phase)
    assert phases(stats) == (0.0,) * 5
    clock.finish(stats, overlapped_seconds=0.5, waited_seconds=1.0)
    assert phases(stats) == (8.5, 3.5, 3.0, 32.0, 80.0)
    assert stats.decode_seconds == hand.seconds - began


def test_the_token_of_the_prompt_pass_is_not_decoded() -> None:
    stats = Stats(generated_tokens=5, prompt_pass_tokens=1)
    assert stats.decoded_tokens == 4
