"""The replies and disturbances that the controller is evaluated on, and the tables of the results."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.methods.costs.curve import CostCurve
from scripts.simulation.machines import SimulatedMachine
from scripts.simulation.report import Case, evaluate, recovery_tokens
from scripts.simulation.traces import Text, flips, passages, recorded, replies, stationary

RATES = (0.05, 0.3, 0.5, 0.7, 0.85, 0.95)
_SEEDS = range(8)
# Number of tokens after which the acceptance rate changes once.
FLIP_AT = 100


def _stationary(rate: float, length: int = 200) -> list[Text]:
    return [stationary(rate, length, seed) for seed in _SEEDS]


def _cheaper(curve: CostCurve) -> CostCurve:
    """Return a wrong cost curve, in which extra tokens cost a third of their true cost."""
    return CostCurve(curve.widths, tuple(1.0 + (cost - 1.0) / 3.0 for cost in curve.seconds))


def _dearer(curve: CostCurve) -> CostCurve:
    """Return a wrong cost curve, in which passes over several tokens cost twice their true cost."""
    return CostCurve(curve.widths, (1.0, *(2.0 * cost for cost in curve.seconds[1:])))


def _busy(now: float) -> float:
    """Return the slowdown caused by another program, which uses half of the machine after 60 target steps."""
    return 2.0 if now > 60.0 else 1.0


FLIPS = {
    f"{first:g}, then {then:g} from token {FLIP_AT}": [
        flips(first, then, FLIP_AT, 2 * FLIP_AT, seed) for seed in range(24)
    ]
    for first, then in ((0.85, 0.05), (0.05, 0.85))
}
CASES = (
    *(Case(f"{rate:g}", _stationary(rate)) for rate in RATES),
    *(Case(f"{rate:g}, after 3 replies", _stationary(rate), warm=3) for rate in RATES),
    *(Case(name, texts[:8]) for name, texts in FLIPS.items()),
    Case("changes every 50 tokens", [flips(0.85, 0.05, 50, 400, seed) for seed in _SEEDS]),
    Case("recorded, T 0", recorded(0.0)),
    Case("recorded, T 0.8", recorded(0.8)),
    *(Case(f"short replies, T {t:g}, after 12", replies(t), warm=12) for t in (0.0, 0.8)),
    Case("0.3, 40% copied", [passages(text, 0.4, 30, s) for s, text in enumerate(_stationary(0.3))]),
    Case("0.7, 1,000-token prompt", [text.after(1000) for text in _stationary(0.7)]),
    Case("0.7, 800 tokens, 1,000-token prompt", [text.after(1000) for text in _stationary(0.7, 800)]),
    Case("0.7, machine slows down", _stationary(0.7), slowness=_busy),
    Case("0.7, told costs too low", _stationary(0.7), distort=_cheaper),
    Case("0.7, told costs too high", _stationary(0.7), distort=_dearer),
)
_COLUMNS = ("reply", "auto", "best fixed", "share", "slowest", "slower", "limit left", "recovers in")


def row(machine: SimulatedMachine, case: Case) -> tuple[str, ...]:
    """Return the table row of a case on a machine."""
    outcome = evaluate(machine, case)
    flip = FLIPS.get(case.name)
    return (
        case.name,
        f"{outcome.auto:.2f}",
        f"{outcome.best:.2f}",
        f"{outcome.share:.0%}",
        f"{outcome.worst:.2f}",
        f"{outcome.slower:.0%}",
        f"{outcome.limit_left_steps:.1f}",
        f"{recovery_tokens(machine, flip, FLIP_AT)}" if flip else "",
    )


def markdown_table(machine: SimulatedMachine, cases: Sequence[Case] = CASES) -> str:
    """Return the Markdown table of a machine."""
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *(row(machine, case) for case in cases)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"\n**{machine.name}** ({machine.source})\n\n{table}\n"
