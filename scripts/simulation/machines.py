"""Cost curves of verify passes on several machines, published by others or measured by us."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.methods.costs.curve import CostCurve


@dataclass(frozen=True, slots=True)
class SimulatedMachine:
    """A machine with a target and a draft model. Costs are in target steps.

    Attributes:
        curve: Cost v(m) of a verify pass over m tokens. A target step takes one second.
        draft_cost: Cost of drafting a token.
        source: Who measured the curve.
        prefill_cost: Cost of prefilling a token of the prompt in the draft model.
    """

    name: str
    curve: CostCurve
    draft_cost: float
    source: str
    prefill_cost: float = 0.02


def _curve(*points: tuple[int, float]) -> CostCurve:
    widths, costs = zip((1, 1.0), *points, strict=True)
    return CostCurve(widths, costs)


# Assumed draft costs, because published measurements do not include a draft model: about an eighth of the
# target's size. `prefill_cost` assumes that prefilling 50 tokens takes one target step. Beyond its last
# width, a curve continues with its last slope.
_APPLE, _SMALL = 0.12, 0.08

MACHINES = (
    SimulatedMachine("M4 Pro", _curve((2, 0.99), (3, 1.13), (4, 1.43), (8, 2.84)), _APPLE, "mlx #3852"),
    SimulatedMachine("M3 Ultra", _curve((2, 1.83), (4, 3.26), (8, 6.12)), _APPLE, "mlx #4265"),
    SimulatedMachine("M5 Max", _curve((3, 1.11), (5, 1.42), (8, 2.2)), _APPLE, "mlx PR 3791"),
    SimulatedMachine(
        "A100",
        _curve((2, 1.01), (4, 1.03), (8, 1.06), (16, 1.12), (32, 1.3)),
        _SMALL,
        "assumed, not measured: a pass over up to a few dozen tokens reads the weights only once",
    ),
    SimulatedMachine(
        "2 CPU cores, F16",
        _curve((2, 1.47), (3, 1.63), (4, 1.41), (5, 1.48), (6, 1.52), (8, 1.79), (12, 2.13), (16, 2.47)),
        0.076,
        "measured, 1.1B parameters",
        prefill_cost=0.0125,
    ),
    SimulatedMachine(
        "2 CPU cores, Q8_0",
        _curve((2, 1.96), (3, 2.35), (4, 2.47), (5, 3.51), (6, 3.73), (8, 3.36), (12, 4.27), (16, 5.26)),
        0.13,
        "measured, 1.1B parameters",
        prefill_cost=0.03,
    ),
    SimulatedMachine(
        "2 CPU cores, Q4_0",
        _curve((2, 1.70), (3, 2.43), (4, 1.72), (5, 2.47), (6, 3.17), (8, 3.05), (12, 4.37), (16, 4.52)),
        0.18,
        "measured, 1.1B parameters",
        prefill_cost=0.057,
    ),
    SimulatedMachine(
        "2 CPU cores, Q4_K_M",
        _curve((2, 1.66), (3, 2.22), (4, 2.71), (5, 3.42), (6, 4.04), (8, 4.63), (12, 5.83), (16, 5.70)),
        0.2,
        "measured, 1.1B parameters",
        prefill_cost=0.06,
    ),
)
