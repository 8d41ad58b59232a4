"""The texts and troubles that the policy is judged on, and what comes out as a table."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.costs.curve import CostCurve
from scripts.simulation.machines import SimulatedMachine
from scripts.simulation.report import Case, judged, recovery_tokens
from scripts.simulation.traces import Text, flips, passages, recorded, replies, stationary

__all__ = ["CASES", "FLIPS", "in_markdown", "row"]

RATES = (0.05, 0.3, 0.5, 0.7, 0.85, 0.95)
_SEEDS = range(8)
# Rates flip here, and not again.
FLIP_AT = 100


def _stationary(rate: float, length: int = 200) -> list[Text]:
    return [stationary(rate, length, seed) for seed in _SEEDS]


def _cheaper(curve: CostCurve) -> CostCurve:
    """Wide passes cost a third of what they really cost beside a plain step."""
    return CostCurve(curve.widths, tuple(1.0 + (cost - 1.0) / 3.0 for cost in curve.seconds))


def _dearer(curve: CostCurve) -> CostCurve:
    """Wide passes cost twice what they really cost."""
    return CostCurve(curve.widths, (1.0, *(2.0 * cost for cost in curve.seconds[1:])))


def _busy(now: float) -> float:
    """Another program begins after 60 plain steps and takes half of the machine, to the end."""
    return 2.0 if now > 60.0 else 1.0


FLIPS = {
    f"{first:g}, from token {FLIP_AT} on {then:g}": [
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
    Case("0.3, and 40 % copied", [passages(text, 0.4, 30, s) for s, text in enumerate(_stationary(0.3))]),
    Case("0.7, a prompt of 1,000", [text.after(1000) for text in _stationary(0.7)]),
    Case("0.7, 800 tokens, a prompt of 1,000", [text.after(1000) for text in _stationary(0.7, 800)]),
    Case("0.7, the machine slows down", _stationary(0.7), slowness=_busy),
    Case("0.7, passes are told cheaper", _stationary(0.7), told=_cheaper),
    Case("0.7, passes are told dearer", _stationary(0.7), told=_dearer),
)
_COLUMNS = ("text", "auto", "best fixed", "share", "worst", "slower", "bound kept by", "recovers in")


def row(machine: SimulatedMachine, case: Case) -> tuple[str, ...]:
    """One case on a machine, as in the table."""
    found = judged(machine, case)
    flip = FLIPS.get(case.name)
    return (
        case.name,
        f"{found.auto:.2f}",
        f"{found.best:.2f}",
        f"{found.share:.0%}",
        f"{found.worst:.2f}",
        f"{found.slower:.0%}",
        f"{found.left_steps:.1f}",
        f"{recovery_tokens(machine, flip, FLIP_AT)}" if flip else "",
    )


def in_markdown(machine: SimulatedMachine, cases: Sequence[Case] = CASES) -> str:
    """All cases on a machine."""
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *(row(machine, case) for case in cases)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"\n**{machine.name}** ({machine.source})\n\n{table}\n"
