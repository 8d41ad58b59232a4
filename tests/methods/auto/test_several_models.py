"""`auto` finds the best of several draft models and heads, and stays within the loss limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.methods.auto.loss_limit import LossLimits
from edgespec.methods.costs.curve import CostCurve
from scripts.simulation import (
    MACHINES,
    SimulatedMachine,
    SimulatedModel,
    Text,
    World,
    make_controller,
    stationary,
)

M4 = MACHINES[0]
CPU = MACHINES[4]
# A head is cheap and has little to catch up on. The second draft model is large and usually right.
HEAD, LARGE = SimulatedModel("head", 0.04, 0.002), SimulatedModel("large", 0.25, 0.04)


def text_of(rates: Mapping[str, float], length: int, seed: int, prompt_tokens: int = 100) -> Text:
    """Return a reply with an acceptance rate for each drafter, by name."""
    traces = {
        name: stationary(rate, length, 7 * seed + i).model for i, (name, rate) in enumerate(rates.items())
    }
    return Text("several", traces.pop("model"), None, prompt_tokens, traces)


def alone(machine: SimulatedMachine, text: Text, name: str) -> tuple[SimulatedMachine, Text]:
    """Return a machine on which the drafter `name` is the only one."""
    if name == "model":
        return machine, text
    model = {"head": HEAD, "large": LARGE}[name]
    only = replace(machine, draft_cost=model.draft_cost, prefill_cost=model.prefill_cost)
    return only, replace(text, model=text.others[name])


def seconds(machine: SimulatedMachine, texts: list[Text], others: tuple[SimulatedModel, ...] = ()) -> float:
    """Return the duration of the second half of the replies, all run by one controller."""
    world = World(machine)
    controller = make_controller(world, others=others)
    return sum([world.reply(controller, text) for text in texts][len(texts) // 2 :])


@pytest.mark.parametrize(
    ("machine", "rates"),
    [
        (CPU, {"head": 0.8, "model": 0.6, "large": 0.7}),
        pytest.param(M4, {"head": 0.5, "model": 0.85, "large": 0.9}, marks=pytest.mark.long),
        pytest.param(M4, {"head": 0.3, "model": 0.5, "large": 0.95}, marks=pytest.mark.long),
        pytest.param(CPU, {"head": 0.7, "model": 0.7, "large": 0.7}, marks=pytest.mark.long),
        pytest.param(M4, {"head": 0.1, "model": 0.1, "large": 0.1}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_best_of_three_models_is_used_in_the_long_run(
    machine: SimulatedMachine, rates: dict[str, float]
) -> None:
    texts = [text_of(rates, 160, seed) for seed in range(24)]
    together = seconds(machine, texts, (HEAD, LARGE))
    each = []
    for name in rates:
        only, _ = alone(machine, texts[0], name)
        each.append(seconds(only, [alone(machine, text, name)[1] for text in texts]))
    assert min(each) / together >= 0.97


@pytest.mark.long
def test_a_model_that_becomes_the_best_is_noticed() -> None:
    before, after = {"head": 0.9, "model": 0.3, "large": 0.3}, {"head": 0.3, "model": 0.9, "large": 0.3}
    texts = [text_of(before if seed < 12 else after, 160, seed) for seed in range(36)]
    together = seconds(M4, texts, (HEAD, LARGE))
    assert seconds(M4, texts) / together >= 0.97


CURVES = st.sampled_from([machine.curve for machine in MACHINES]) | st.lists(
    st.floats(0.5, 6.0), min_size=1, max_size=4
).map(lambda costs: CostCurve((1, 2, 3, 5, 9)[: len(costs) + 1], (1.0, *costs)))
COSTS = st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 0.1))
RATES = st.fixed_dictionaries(
    {name: st.sampled_from([0.0, 0.3, 0.7, 0.95]) for name in ("head", "model", "large")}
)


@settings(max_examples=30, deadline=None)
@given(
    CURVES,
    st.tuples(COSTS, COSTS, COSTS),
    st.lists(st.tuples(RATES, st.integers(10, 160), st.sampled_from([1, 40, 400])), min_size=1, max_size=4),
    st.builds(LossLimits, st.sampled_from([0.0, 0.02, 0.1]), st.sampled_from([0.0, 1.0, 2.0, 8.0])),
)
def test_loss_limit_holds_after_every_token_with_three_models_of_any_speed(
    curve: CostCurve,
    costs: tuple[tuple[float, float], ...],
    said: list[tuple[dict[str, float], int, int]],
    limits: LossLimits,
) -> None:
    own, head, large = costs
    world = World(SimulatedMachine("any", curve, own[0], "hypothesis", own[1]))
    others = (SimulatedModel("head", *head), SimulatedModel("large", *large))
    controller = make_controller(world, limits=limits, others=others)
    for seed, (rates, length, prompt_tokens) in enumerate(said):
        world.reply(controller, text_of(rates, length, seed, prompt_tokens))
        tokens = np.arange(1, len(world.moments) + 1)
        assert (np.array(world.moments) - ((1.0 + limits.rate) * tokens + limits.steps)).max() <= 1e-6
