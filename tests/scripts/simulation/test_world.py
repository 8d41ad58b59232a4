"""The simulated clock and the best fixed draft length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from edgespec.methods.tree_growth import FixedShape
from scripts.simulation import (
    MACHINES,
    PLAIN,
    Fixed,
    SimulatedMachine,
    World,
    best_fixed,
    fixed_seconds,
    flips,
    passages,
    recorded,
    stationary,
)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_curves_begin_with_a_target_step(machine: SimulatedMachine) -> None:
    assert machine.curve.target_step_seconds == 1.0
    assert machine.curve.v(1) == 1.0


def test_plain_decoding_takes_one_target_step_per_token() -> None:
    text = stationary(0.5, 50, 1)
    world = World(MACHINES[0])
    assert world.reply(None, text) == pytest.approx(50.0)
    assert fixed_seconds(MACHINES[0], text, PLAIN) == pytest.approx(50.0)


@pytest.mark.parametrize("length", [1, 3, 8])
@pytest.mark.parametrize("prompt_tokens", [1, 40])
def test_fixed_seconds_matches_the_decode_loop(length: int, prompt_tokens: int) -> None:
    for machine in MACHINES:
        text = stationary(0.6, 80, 2).after(prompt_tokens)
        world = World(machine)
        took = world.reply(world.model(FixedShape()), text, length)
        assert took == pytest.approx(fixed_seconds(machine, text, Fixed(length)))
        assert world.stats.generated_tokens == 80


def test_lookups_cost_only_their_rows() -> None:
    text = passages(stationary(0.3, 120, 3), 0.5, 20, 4)
    for machine in MACHINES:
        world = World(machine)
        took = world.reply(world.lookup(), text, 6)
        assert took == pytest.approx(fixed_seconds(machine, text, Fixed(6, lookup=True)))


def test_slowness_applies_from_its_start() -> None:
    text = stationary(0.5, 100, 5)
    world = World(MACHINES[0], lambda now: 3.0 if now >= 40.0 else 1.0)
    assert world.reply(None, text) == pytest.approx(40.0 + 3.0 * 60.0)


def test_truncated_prefill_lowers_the_acceptance_rate() -> None:
    text = stationary(0.9, 400, 6).after(300)
    world = World(MACHINES[0])
    model = world.model(FixedShape())
    world.reply(model, text, 1)
    whole = world.stats.acceptance_rate
    begin = model.begin

    def begin_truncated(tokens: Sequence[int]) -> None:
        begin(tokens)
        model.prefill(64)

    model.begin = begin_truncated  # type: ignore[method-assign]
    before = world.seconds
    world.reply(model, text, 1)
    assert whole is not None
    assert world.stats.acceptance_rate is not None
    assert world.stats.acceptance_rate < whole - 0.05
    assert world.seconds > before


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.95])
def test_acceptance_rates_of_generated_replies(rate: float) -> None:
    for informed in (True, False):
        text = stationary(rate, 20_000, 7, informed=informed)
        assert text.model.is_right.mean() == pytest.approx(rate, abs=0.02)
    high, low = np.split(flips(0.85, 0.05, 5_000, 10_000, 8).model.is_right, 2)
    assert (high.mean(), low.mean()) == pytest.approx((0.85, 0.05), abs=0.03)


def test_confidence_matches_the_acceptance_rate() -> None:
    text = stationary(0.6, 20_000, 9).model
    for low, high in ((0.0, 0.3), (0.3, 0.7), (0.7, 1.0)):
        among = (text.confidence >= low) & (text.confidence < high)
        assert text.is_right[among].mean() == pytest.approx(text.confidence[among].mean(), abs=0.03)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_recorded_replies_cover_every_skill(temperature: float) -> None:
    texts = recorded(temperature)
    assert len(texts) == 9
    for text in texts:
        assert 0.4 < text.model.is_right.mean() < 1.0
        assert ((text.model.confidence >= 0.0) & (text.model.confidence <= 1.0)).all()
    right = np.concatenate([text.model.is_right for text in texts])
    sure = np.concatenate([text.model.confidence for text in texts])
    assert right[sure > 0.9].mean() > right[sure < 0.5].mean() + 0.2


def test_no_fixed_choice_beats_the_best_one() -> None:
    for machine in MACHINES:
        text = passages(stationary(0.6, 100, 10), 0.3, 20, 11)
        best, seconds = best_fixed(machine, text)
        assert fixed_seconds(machine, text, best) == pytest.approx(seconds)
        for other in (PLAIN, Fixed(1), Fixed(4), Fixed(16), Fixed(4, lookup=True)):
            assert seconds <= fixed_seconds(machine, text, other) + 1e-9
