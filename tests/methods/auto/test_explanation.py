"""The report on a reply at several stages, and the reasons that it gives to the user."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.engine.acceptance import Invariant
from edgespec.engine.logits import HostLogits
from edgespec.engine.sampling import Sampler
from edgespec.engine.sampling_params import SamplingParams
from edgespec.methods.auto.combined_drafter import CombinedDrafter
from edgespec.methods.auto.controller import AutoController, ControllerReport, DraftingStatus
from edgespec.methods.auto.live_costs import LiveCosts
from edgespec.methods.auto.loss_limit import LossTracker
from edgespec.methods.costs.curve import CostCurve
from tests.tables import Saying

# A large target in the middle of a reply, with nothing drafted yet.
START = DraftingStatus(
    name="model+suffix",
    is_drafting=False,
    is_faster=False,
    tokens=20,
    has_drafted=False,
    asked_rounds=0,
    unaffordable_rounds=0,
    draft_cost_steps=1.5,
    allowance_steps=2.4,
    round_gain_steps=0.0,
    target_step_seconds=0.05,
)
GUESSED = replace(START, is_drafting=True, has_drafted=True, asked_rounds=6, round_gain_steps=-0.2)


@pytest.mark.parametrize(
    ("standing", "reason"),
    [
        (replace(GUESSED, is_faster=True), "drafting saves time here"),
        (replace(GUESSED, is_faster=True, replies=3), "drafting saves time here (with 3 replies at once)"),
        (GUESSED, "drafting is being tried, but has not saved time so far"),
        (
            replace(GUESSED, is_drafting=False),
            "drafting does not save time: each recent draft cost 20% of the time that one token takes",
        ),
        (
            replace(GUESSED, is_drafting=False, is_faster=True, round_gain_steps=-1.3),
            "drafting no longer saves time: each recent draft cost as much time as 1.3 tokens",
        ),
        (replace(START, tokens=0), "first measuring the speed without drafting"),
        (replace(START, tokens=1), "first measuring the speed without drafting"),
        (
            replace(START, round_gain_steps=-0.2),
            "drafting has not saved time lately, so it is retried only now and then",
        ),
        (
            replace(START, asked_rounds=4),
            "in 4 tries, no draft was likely to save time (tried: model+suffix)",
        ),
        (
            replace(START, asked_rounds=1),
            "in 1 try, no draft was likely to save time (tried: model+suffix)",
        ),
        (
            replace(START, unaffordable_rounds=9, draft_cost_steps=3.25),
            "a wrong draft could take as long as generating 3.2 tokens; the limit is 2.4 (see --max-loss)",
        ),
        (
            replace(GUESSED, is_drafting=False, unaffordable_rounds=9, allowance_steps=-0.1),
            "drafting has already used up the extra time that a reply may take (see --max-loss)",
        ),
        (
            replace(START, unaffordable_rounds=9, allowance_steps=0.0),
            "preparing drafts has already used up the extra time that a reply may take (see --max-loss)",
        ),
        (
            replace(GUESSED, target_step_seconds=0.00061),
            "this model is so fast that drafting would take more time than it saves",
        ),
        (replace(GUESSED, target_step_seconds=0.00061, is_faster=True), "drafting saves time here"),
    ],
)
def test_reason(standing: DraftingStatus, reason: str) -> None:
    assert standing.reason == reason


@pytest.mark.parametrize(
    ("standing", "reason"),
    [
        (GUESSED, "guessing is being tried, but has not saved time so far"),
        (
            replace(GUESSED, is_drafting=False),
            "guessing does not save time: each recent guess cost 20% of the time that one token takes",
        ),
        (
            replace(START, round_gain_steps=-0.2),
            "guessing has not saved time lately, so it is retried only now and then",
        ),
        (
            replace(START, asked_rounds=4),
            "in 4 tries, no guess was likely to save time (tried: draft model + repeated text)",
        ),
        (
            replace(START, unaffordable_rounds=9, draft_cost_steps=3.25),
            "a wrong guess could take as long as generating 3.2 tokens; the limit is 2.4",
        ),
    ],
)
def test_the_chat_calls_a_draft_a_guess_and_names_the_sources(standing: DraftingStatus, reason: str) -> None:
    assert standing.chat_reason == reason


@given(
    st.builds(
        DraftingStatus,
        name=st.just("suffix"),
        tokens=st.integers(0, 100),
        asked_rounds=st.integers(0, 20),
        unaffordable_rounds=st.integers(0, 20),
        draft_cost_steps=st.floats(0, 1e3),
        allowance_steps=st.floats(-1e3, 1e3),
        round_gain_steps=st.floats(-1e3, 1e3),
        target_step_seconds=st.floats(1e-6, 10),
    )
)
def test_reason_is_never_empty_and_fits_a_line(standing: DraftingStatus) -> None:
    assert 0 < len(standing.reason) < 100
    assert "\n" not in standing.reason
    assert "draft" in standing.reason
    assert "draft" not in standing.chat_reason


class Reply:
    """A reply under the controller, on its own clock. Wide passes take `wide` target steps."""

    def __init__(
        self,
        guesses_at: int,
        *,
        wide: float,
        right: bool,
        plain_seconds: float = 1.0,
        draft_seconds: float | None = None,
    ) -> None:
        self.now = 0.0
        self._plain, self._wide, self._right = plain_seconds, wide * plain_seconds, right

        def say(tokens: list[int], _: int) -> list[int]:
            self.now += draft_seconds or 0.0
            return [0] if len(tokens) >= guesses_at else []

        saying = Saying(say)
        saying.is_lookup = draft_seconds is None
        costs = LiveCosts(CostCurve((1, 2, 3), (plain_seconds, 1.1 * plain_seconds, 1.2 * plain_seconds)))
        both = CombinedDrafter([saying], v=costs.v, clock=self.clock)
        self._drafter = AutoController(both, LossTracker(), costs, clock=self.clock)
        self._drafter.begin([0])

    def clock(self) -> float:
        return self.now

    def begin(self) -> None:
        """Begin another reply with the same drafters."""
        self._drafter.begin([0])

    def goes_on(self, rounds: int) -> ControllerReport:
        """Return the report after further rounds."""
        nothing: Any = None
        for _ in range(rounds):
            tree = self._drafter.propose(Sampler(SamplingParams(), 0, [0]), Invariant(), 1)
            self.now += self._wide if tree.drafted else self._plain
            self._drafter.observe(tree, HostLogits(np.zeros((tree.width, 2), np.float32)), nothing)
            self._drafter.commit((0, 1) if tree.drafted and self._right else (1,))
        account = self._drafter.report()
        assert account is not None
        return account


def test_a_new_reply_reports_that_it_measures() -> None:
    account = Reply(1, wide=1.1, right=True).goes_on(0)
    assert account.drafters == ()
    assert account.speed_up is None
    assert account.reason == "first measuring the speed without drafting"


def test_successful_drafters_are_reported() -> None:
    account = Reply(1, wide=1.1, right=True).goes_on(30)
    assert account.drafters == ("saying",)
    assert account.reason == "drafting saves time here"
    assert account.speed_up is not None
    assert account.speed_up > 1.5


def test_a_failed_retry_is_reported_as_plain_decoding() -> None:
    reply = Reply(20, wide=2.9, right=False)
    reply.goes_on(22)
    assert reply._drafter.loss_tracker.credit_seconds < 0.0
    account = reply.goes_on(100)
    assert account.drafters == ()
    assert account.reason != "drafting saves time here"


@pytest.mark.parametrize(("plain_seconds", "small"), [(0.0005, True), (0.05, False)])
def test_reason_names_targets_that_are_too_fast(plain_seconds: float, small: bool) -> None:
    account = Reply(2, wide=2.9, right=False, plain_seconds=plain_seconds).goes_on(60)
    assert ("this model is so fast" in account.reason) == small


def test_a_model_that_drafted_nothing_is_reported_with_its_measured_cost() -> None:
    reply = Reply(2, wide=1.1, right=False, draft_seconds=0.5)
    assert reply.goes_on(40).unused == ()
    reply.begin()
    (unused,) = reply.goes_on(3).unused
    assert unused.name == "saying"
    assert unused.token_cost == pytest.approx(0.5, rel=0.1)
    assert unused.acceptance_rate is not None
    assert unused.acceptance_rate < 0.5
    assert unused.speed_up == pytest.approx((1 + unused.acceptance_rate) / (0.5 + 1.1), rel=0.1)
    (unmeasured,) = Reply(99, wide=1.1, right=False, draft_seconds=0.5).goes_on(3).unused
    assert (unmeasured.acceptance_rate, unmeasured.speed_up) == (None, None)
    assert Reply(99, wide=1.1, right=True).goes_on(3).unused == ()
