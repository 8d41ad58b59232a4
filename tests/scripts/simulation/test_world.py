"""The simulated clock: what a reply takes is what its passes cost, and the best fixed choice is the best."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.drafters.tree_growth import FixedShape
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
def test_v_of_a_machine_begins_with_a_plain_step(machine: SimulatedMachine) -> None:
    assert machine.curve.target_step_seconds == 1.0
    assert machine.curve.v(1) == 1.0


def test_plain_decoding_takes_a_plain_step_a_token() -> None:
    text = stationary(0.5, 50, 1)
    world = World(MACHINES[0])
    assert world.reply(None, text) == pytest.approx(50.0)
    assert fixed_seconds(MACHINES[0], text, PLAIN) == pytest.approx(50.0)


@pytest.mark.parametrize("length", [1, 3, 8])
@pytest.mark.parametrize("prompt_tokens", [1, 40])
def test_a_fixed_choice_takes_what_the_loop_takes_with_it(length: int, prompt_tokens: int) -> None:
    for machine in MACHINES:
        text = stationary(0.6, 80, 2).after(prompt_tokens)
        world = World(machine)
        took = world.reply(world.model(FixedShape()), text, length)
        assert took == pytest.approx(fixed_seconds(machine, text, Fixed(length)))
        assert world.stats.generated_tokens == 80


def test_a_lookup_costs_nothing_but_its_rows() -> None:
    text = passages(stationary(0.3, 120, 3), 0.5, 20, 4)
    for machine in MACHINES:
        world = World(machine)
        took = world.reply(world.lookup(), text, 6)
        assert took == pytest.approx(fixed_seconds(machine, text, Fixed(6, lookup=True)))


def test_slowness_counts_from_when_it_begins() -> None:
    text = stationary(0.5, 100, 5)
    world = World(MACHINES[0], lambda now: 3.0 if now >= 40.0 else 1.0)
    assert world.reply(None, text) == pytest.approx(40.0 + 3.0 * 60.0)


def test_a_draft_that_saw_the_end_only_is_right_less_often() -> None:
    text = stationary(0.9, 400, 6).after(300)
    world = World(MACHINES[0])
    model = world.model(FixedShape())
    world.reply(model, text, 1)
    whole = world.stats.acceptance_rate
    begin = model.begin
    model.begin = lambda tokens: (begin(tokens), model.prefill(64))[0]  # type: ignore[method-assign]
    before = world.seconds
    world.reply(model, text, 1)
    assert whole is not None
    assert world.stats.acceptance_rate is not None
    assert world.stats.acceptance_rate < whole - 0.05
    assert world.seconds > before


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.95])
def test_texts_have_the_rates_they_are_made_with(rate: float) -> None:
    for informed in (True, False):
        text = stationary(rate, 20_000, 7, informed=informed)
        assert text.model.is_right.mean() == pytest.approx(rate, abs=0.02)
    high, low = np.split(flips(0.85, 0.05, 5_000, 10_000, 8).model.is_right, 2)
    assert (high.mean(), low.mean()) == pytest.approx((0.85, 0.05), abs=0.03)


def test_a_draft_that_is_surer_is_right_more_often() -> None:
    text = stationary(0.6, 20_000, 9).model
    for low, high in ((0.0, 0.3), (0.3, 0.7), (0.7, 1.0)):
        among = (text.confidence >= low) & (text.confidence < high)
        assert text.is_right[among].mean() == pytest.approx(text.confidence[among].mean(), abs=0.03)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_was_recorded_is_of_every_skill_and_worth_guessing(temperature: float) -> None:
    texts = recorded(temperature)
    assert len(texts) == 9
    for text in texts:
        assert 0.4 < text.model.is_right.mean() < 1.0
        assert ((text.model.confidence >= 0.0) & (text.model.confidence <= 1.0)).all()
    right = np.concatenate([text.model.is_right for text in texts])
    sure = np.concatenate([text.model.confidence for text in texts])
    assert right[sure > 0.9].mean() > right[sure < 0.5].mean() + 0.2


def test_hindsight_is_never_beaten_by_a_fixed_choice() -> None:
    for machine in MACHINES:
        text = passages(stationary(0.6, 100, 10), 0.3, 20, 11)
        best, seconds = best_fixed(machine, text)
        assert fixed_seconds(machine, text, best) == pytest.approx(seconds)
        for other in (PLAIN, Fixed(1), Fixed(4), Fixed(16), Fixed(4, lookup=True)):
            assert seconds <= fixed_seconds(machine, text, other) + 1e-9
