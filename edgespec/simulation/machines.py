"""What passes cost on machines that others measured."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.policy.curve import CostCurve

__all__ = ["MACHINES", "Machine"]


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine with a target and a draft. Costs are in plain steps of the target.

    curve: v(m), whose plain step takes one second. draft_cost: of a drafted token. reading_cost: of a token
    of the prompt that the draft runs. source: who measured v.
    """

    name: str
    curve: CostCurve
    draft_cost: float
    source: str
    reading_cost: float = 0.02


def _curve(*points: tuple[int, float]) -> CostCurve:
    widths, costs = zip((1, 1.0), *points, strict=True)
    return CostCurve(widths, costs)


# v beyond the last width goes on as steeply as before it. Draft costs are those of a draft of an eighth of
# the target's size, where the source tells none.
MACHINES = (
    Machine("M4 Pro", _curve((2, 0.99), (3, 1.13), (4, 1.43), (8, 2.84)), 0.12, "mlx #3852"),
    Machine("M3 Ultra", _curve((2, 1.83), (4, 3.26), (8, 6.12)), 0.12, "mlx #4265"),
    Machine("M5 Max", _curve((3, 1.11), (5, 1.42), (8, 2.2)), 0.12, "mlx PR 3791"),
    Machine(
        "A100",
        _curve((2, 1.01), (4, 1.03), (8, 1.06), (16, 1.12), (32, 1.3)),
        0.08,
        "a roofline: \
weights are read once for up to a few dozen rows",
    ),
    Machine(
        "2 CPU cores, F16",
        _curve((2, 1.47), (3, 1.63), (4, 1.41), (5, 1.48), (6, 1.52), (8, 1.79), (12, 2.13), (16, 2.47)),
        0.08,
        "measured",
    ),
    Machine(
        "2 CPU cores, Q8_0",
        _curve((2, 1.96), (3, 2.35), (4, 2.47), (5, 3.51), (6, 3.73), (8, 3.36), (12, 4.27), (16, 5.26)),
        0.08,
        "measured",
    ),
)
