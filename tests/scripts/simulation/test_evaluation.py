"""The controller on every simulated machine: loss limit, speed and recovery."""

from __future__ import annotations

import numpy as np
import pytest

from scripts.simulation import (
    MACHINES,
    Case,
    SimulatedMachine,
    World,
    evaluate,
    flips,
    make_controller,
    passages,
    recorded,
    recovery_tokens,
    replies,
    stationary,
)
from tests.cases import covering, first

BY_NAME = {machine.name: machine for machine in MACHINES}
# Each test run tests one machine with a GPU and one without.
EVERY = pytest.mark.parametrize(
    "machine",
    [
        pytest.param(
            machine,
            id=machine.name,
            marks=[] if machine.name in ("M4 Pro", "2 CPU cores, Q8_0") else pytest.mark.long,
        )
        for machine in MACHINES
    ],
)
SEEDS = range(6)


@pytest.mark.parametrize(
    ("machine", "rate", "informed"), covering(MACHINES, (0.0, 0.05, 0.3, 0.6, 0.85, 0.95), (True, False))
)
def test_loss_limit_holds(machine: SimulatedMachine, rate: float, informed: bool) -> None:
    texts = [stationary(rate, 120, 0, informed=informed)]
    texts += [text.after(400) for text in texts]
    assert evaluate(machine, Case("any", texts, warm=1)).limit_left_steps >= -1e-6


# Texts for which either nothing or everything saves much time, so the mean speed is within 5 % of the best in
# hindsight. If only long drafts save time, or hardly any do, exploring costs more than that. Those cells are
# in docs/policy.md.
NEAR = [
    # Each test run uses the lowest rate of every second machine, and the highest rate of the others.
    pytest.param(name, rate, marks=[] if rate == rates[-(place % 2)] else pytest.mark.long)
    for place, (name, rates) in enumerate(
        {
            "M4 Pro": (0.05, 0.3, 0.5, 0.7, 0.85, 0.95),
            "M3 Ultra": (0.05, 0.3, 0.5, 0.7, 0.85, 0.95),
            "M5 Max": (0.05, 0.5, 0.7, 0.85, 0.95),
            "A100": (0.05, 0.3, 0.5, 0.7, 0.85, 0.95),
            "2 CPU cores, F16": (0.05, 0.3, 0.5, 0.7, 0.85, 0.95),
            "2 CPU cores, Q8_0": (0.05, 0.3, 0.5, 0.7),
            "2 CPU cores, Q4_0": (0.05, 0.3, 0.5, 0.95),
            "2 CPU cores, Q4_K_M": (0.05, 0.3, 0.5, 0.7),
        }.items()
    )
    for rate in rates
]


@pytest.mark.parametrize(("name", "rate"), NEAR)
def test_near_the_best_fixed_length_at_constant_acceptance(name: str, rate: float) -> None:
    texts = [stationary(rate, 200, seed) for seed in range(8)]
    assert evaluate(BY_NAME[name], Case("steady", texts)).share >= 0.945


@EVERY
def test_near_the_best_fixed_length_on_recorded_replies(machine: SimulatedMachine) -> None:
    for temperature in (0.0, 0.8):
        found = evaluate(machine, Case("recorded", recorded(temperature)))
        # On this machine, a reply's loss allowance is too small for drafts of the best length.
        assert found.share >= (0.85 if machine.name.endswith("Q4_K_M") else 0.9)
        assert found.limit_left_steps >= -1e-6


@EVERY
def test_recovers_within_50_tokens_when_acceptance_falls(machine: SimulatedMachine) -> None:
    assert recovery_tokens(machine, [flips(0.85, 0.05, 100, 200, seed) for seed in range(12)], 100) <= 50


@EVERY
def test_lookup_speeds_up_copied_text(machine: SimulatedMachine) -> None:
    texts = [passages(stationary(0.05, 200, seed), 0.6, 40, seed) for seed in SEEDS]
    found = evaluate(machine, Case("copied", texts))
    assert found.auto >= 1.0 or found.best < 1.2
    assert found.limit_left_steps >= -1e-6


@pytest.mark.parametrize("name", ["2 CPU cores, Q8_0", "2 CPU cores, Q4_0", "2 CPU cores, Q4_K_M"])
def test_lookup_is_used_where_the_draft_model_is_unaffordable(name: str) -> None:
    """Lookups cost no drafting time, so they fit into the loss limit where wide passes are expensive."""
    texts = [passages(stationary(0.3, 200, seed), 0.4, 30, seed) for seed in range(8)]
    assert evaluate(BY_NAME[name], Case("copied", texts)).auto >= 1.05


@pytest.mark.parametrize("name", first(["2 CPU cores, Q8_0", "M3 Ultra"]))
def test_short_replies_lose_little(name: str) -> None:
    """Trying the draft model requires prefilling the prompt into it, which is most of the cost."""
    found = evaluate(BY_NAME[name], Case("short", replies(0.0)[:16], warm=12))
    assert found.auto >= 0.99
    assert found.slower <= 0.3


def test_forced_drafts_discover_that_long_drafts_save_time() -> None:
    """Short drafts lose time on this machine, so the controller would not try long ones by itself."""
    texts = [stationary(0.95, 200, seed) for seed in range(8)]
    assert evaluate(BY_NAME["2 CPU cores, Q8_0"], Case("after others", texts, warm=3)).auto >= 1.25


@EVERY
def test_slowing_machines_miss_the_limit_by_one_round_at_most(
    machine: SimulatedMachine,
) -> None:
    texts = [stationary(0.7, 200, seed) for seed in SEEDS[:3]]
    for slow in (1.5, 3.0):
        case = Case("slow", texts, slowness=lambda now, slow=slow: slow if now > 40.0 else 1.0)  # type: ignore[misc]
        found = evaluate(machine, case)
        assert found.limit_left_steps >= -slow * (machine.curve.v(17) + 17 * machine.draft_cost)
        assert found.worst >= 0.94


def test_target_step_is_measured_after_a_slowdown() -> None:
    for machine in MACHINES:
        world = World(machine, lambda now: 2.0 if now > 50.0 else 1.0)
        drafter = make_controller(world)
        world.reply(drafter, stationary(0.9, 300, 1))
        assert drafter.costs.target_step_seconds == pytest.approx(2.0, rel=0.05)


def test_credit_matches_the_clock() -> None:
    """The credit of the loss limit equals the time saved by the clock."""
    for machine in MACHINES:
        world = World(machine)
        drafter = make_controller(world, lookup=True)
        for seed in range(4):
            text = passages(stationary(float(np.array([0.2, 0.9])[seed % 2]), 150, seed), 0.3, 20, seed)
            seconds = world.reply(drafter, text.after(50))
            assert drafter.loss_tracker.tokens == 150
            assert drafter.loss_tracker.credit_seconds == pytest.approx(150.0 - seconds, abs=1e-6)
