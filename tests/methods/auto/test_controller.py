"""The loss limit on a simulated clock, with adversarial replies and costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgespec.engine.sampling import Distribution
from edgespec.engine.tree import TokenTree
from edgespec.methods.auto.loss_limit import LossLimits
from edgespec.methods.base import Drafter
from edgespec.methods.costs.curve import CostCurve
from scripts.simulation import MACHINES, SimulatedMachine, Text, Trace, World, make_controller

LENGTH = 160
CURVES = st.sampled_from([machine.curve for machine in MACHINES]) | st.lists(
    st.floats(0.5, 6.0), min_size=1, max_size=4
).map(lambda costs: CostCurve((1, 2, 3, 5, 9)[: len(costs) + 1], (1.0, *costs)))


@st.composite
def texts(draw: st.DrawFn) -> Text:
    """Draw a reply with sections of adversarial acceptance and confidence."""
    columns: list[list[float]] = [[], [], [], []]
    for _ in range(draw(st.integers(1, 6))):
        length = draw(st.integers(1, 60))
        random = np.random.default_rng(draw(st.integers(0, 1 << 16)))
        for column in columns[:3]:
            column += (random.random(length) < draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))).tolist()
        columns[3] += [draw(st.sampled_from([0.01, 0.3, 0.6, 0.99]))] * length
    right, speaks, hits, sure = (np.array(column[:LENGTH]) for column in columns)
    model = Trace(right > 0.5, sure)
    lookup = Trace(hits > 0.5, sure, speaks > 0.5)
    return Text("adversary's", model, lookup, draw(st.sampled_from([1, 3, 40, 400])))


class Adversary(World):
    """A world whose drafts and wide passes have adversarial costs. A target step costs 1.

    Attributes:
        dearest: Maximum costs beyond a target step: of one round, and of the draft model's prefill at a time.
    """

    def __init__(
        self,
        machine: SimulatedMachine,
        passes: Sequence[float],
        drafts: Sequence[float],
        readings: Sequence[float],
    ) -> None:
        super().__init__(machine)
        self._factors = {"pass": list(passes), "draft": list(drafts), "reading": list(readings)}
        self._begun = self.dearest = 0.0

    def _factor(self, what: str) -> float:
        factors = self._factors[what]
        factors.append(factors.pop(0))
        return factors[-1]

    def pass_cost(self, rows: int) -> float:
        return super().pass_cost(rows) * self._factor("pass") if rows > 1 else 1.0

    def draft_cost(self) -> float:
        return super().draft_cost() * self._factor("draft")

    def prefill_cost(self) -> float:
        return super().prefill_cost() * self._factor("reading")

    def commit(self, path: tuple[int, ...]) -> None:
        super().commit(path)
        self.dearest = max(self.dearest, self.seconds - self._begun - 1.0)
        self._begun = self.seconds


def beyond(world: World, limits: LossLimits) -> float:
    """Return by how many target steps a reply exceeded the loss limit at its worst token."""
    tokens = np.arange(1, len(world.moments) + 1)
    return float((np.array(world.moments) - ((1.0 + limits.rate) * tokens + limits.steps)).max())


LIMITS = st.builds(LossLimits, st.sampled_from([0.0, 0.02, 0.1]), st.sampled_from([0.0, 1.0, 2.0, 8.0]))
STEADY: Any = st.lists(st.just(1.0), min_size=1, max_size=1)
WILD: Any = st.lists(st.floats(0.1, 8.0), min_size=1, max_size=7)


def test_a_draft_that_took_the_whole_allowance_is_not_verified() -> None:
    curve = CostCurve((1, 2, 3), (1.0, 1.5, 2.0))
    drafter = make_controller(World(SimulatedMachine("any", curve, 0.1, "none", 0.01)))
    draft = TokenTree.chain(1, (2, 3))
    assert drafter._cut(draft, 0.0).drafted == 0
    assert drafter._cut(draft, 0.6).drafted == 1
    assert drafter._cut(draft, 1.1).drafted == 2
    # Which sampled tokens are dropped would depend on the sampled values.
    sampled = TokenTree.chain(1, (2,), (Distribution(np.array([2]), np.array([1.0])),))
    assert drafter._cut(sampled, 0.0).drafted == 1


ALMOST_FREE_PREFILL = 5e-324
ONE_TEXT = Text("right", Trace(np.ones(24, np.bool_), np.full(24, 0.99)), None, 40)


@settings(max_examples=30)
@given(CURVES, st.floats(0.0, 0.3), st.floats(0.0, 0.03), st.lists(texts(), min_size=1, max_size=3), LIMITS)
@example(MACHINES[0].curve, 0.1, ALMOST_FREE_PREFILL, [ONE_TEXT], LossLimits())
def test_loss_limit_holds_after_every_token_with_true_costs(
    curve: CostCurve, draft_cost: float, reading_cost: float, said: list[Text], limits: LossLimits
) -> None:
    world = World(SimulatedMachine("any", curve, draft_cost, "an adversary", reading_cost))
    drafter = make_controller(world, limits=limits, lookup=True)
    for text in said:
        world.reply(drafter, text)
        assert beyond(world, limits) <= 1e-6


@settings(max_examples=30)
@given(CURVES, CURVES, WILD, WILD, WILD, st.lists(texts(), min_size=1, max_size=3), LIMITS)
def test_loss_limit_is_missed_by_one_round_at_most_with_adversarial_costs(
    curve: CostCurve,
    told: CostCurve,
    passes: list[float],
    drafts: list[float],
    readings: list[float],
    said: list[Text],
    limits: LossLimits,
) -> None:
    world = Adversary(SimulatedMachine("any", curve, 0.1, "an adversary", 0.02), passes, drafts, readings)
    drafter = make_controller(world, limits=limits, lookup=True, initial_curve=told)
    for text in said:
        world.reply(drafter, text)
        assert beyond(world, limits) <= world.dearest + 1e-6


class LinkWorld(World):
    """A world whose target is on workers, so changing the pass width has a cost."""

    _last_width = 0

    def pass_cost(self, rows: int) -> float:
        width, last = self.machine.curve.padded(rows), self._last_width
        self._last_width = width
        return super().pass_cost(rows) + (self.machine.curve.change_seconds if width != last else 0.0)

    def reply(self, drafter: Drafter | None, text: Text, draft_length: int = 16) -> float:
        # The prompt is a pass of another width.
        self._last_width = 0
        return super().reply(drafter, text, draft_length)


@settings(max_examples=30)
@given(
    st.lists(st.floats(1.0, 3.0), min_size=4, max_size=4).map(sorted),
    st.floats(0.0, 2.0),
    st.floats(0.0, 0.3),
    st.lists(texts(), min_size=1, max_size=3),
    LIMITS,
)
def test_loss_limit_holds_if_changes_of_the_width_cost_time(
    costs: list[float], change: float, draft_cost: float, said: list[Text], limits: LossLimits
) -> None:
    curve = CostCurve((1, 2, 3, 5, 9), (1.0, *costs), (1, 2, 3, 5, 9), change)
    world = LinkWorld(SimulatedMachine("link", curve, draft_cost, "any", 0.01))
    drafter = make_controller(world, limits=limits, lookup=True)
    for text in said:
        world.reply(drafter, text)
        # The first step of plain decoding changes the width too.
        assert beyond(world, limits) <= change + 1e-6


def test_drafts_keep_the_width_if_changes_cost_much() -> None:
    curve = CostCurve((1, 2, 3, 5, 9), (1.0, 1.02, 1.04, 1.08, 1.16), (1, 2, 3, 5, 9), 1.0)
    text = Text("right", Trace(np.ones(400, np.bool_), np.full(400, 0.99)), None, 40)
    world = LinkWorld(SimulatedMachine("link", curve, 0.02, "any", 0.001))
    assert world.reply(make_controller(world), text) < 400 / 4
