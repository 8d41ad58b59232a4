"""What a benchmark found."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from edgespec.bench.figures import Figures, Hindsight, figures, hindsights
from edgespec.bench.plan import Plan
from edgespec.bench.runs import Ending, Measured, Row
from edgespec.costs.curve import CostCurve
from edgespec.runtime import Runtime

__all__ = ["Report", "report"]


@dataclass(frozen=True, slots=True)
class Report:
    """The figures, and how they were taken. planned: replies; `rows` has those that were measured.

    curve: what passes cost. peak_memory_bytes: the most this process held, whatever the method.
    ending, trouble, no_energy: as in `Measured`.
    """

    target: str
    target_quantisation: str
    draft: str | None
    acceptance: str
    max_tokens: int
    repeats: int
    seed: int
    planned: int
    ending: Ending
    trouble: str
    no_energy: str
    curve: CostCurve
    peak_memory_bytes: int
    figures: tuple[Figures, ...]
    hindsights: tuple[Hindsight, ...]
    rows: tuple[Row, ...]

    @property
    def differing(self) -> int:
        """Replies that are not plain decoding's and ought to be."""
        return sum(each.compared - each.same for each in self.figures if each.category is None)

    def to_json(self, *, rows: bool = False) -> dict[str, object]:
        """All of it by name; the replies one by one where they are wanted."""
        taken: dict[str, object] = {
            "target": self.target,
            "target_quantisation": self.target_quantisation,
            "draft": self.draft,
            "acceptance": self.acceptance,
            "max_tokens": self.max_tokens,
            "repeats": self.repeats,
            "seed": self.seed,
            "planned_replies": self.planned,
            "replies": len(self.rows),
            "ending": self.ending,
            "trouble": self.trouble,
            "no_energy": self.no_energy,
            "curve": asdict(self.curve),
            "peak_memory_bytes": self.peak_memory_bytes,
            "differing_replies": self.differing,
            "figures": [asdict(each) for each in self.figures],
            "hindsights": [asdict(each) for each in self.hindsights],
        }
        return taken | ({"rows": [row.to_json() for row in self.rows]} if rows else {})


def report(runtime: Runtime, plan: Plan, measured: Measured) -> Report:
    """The figures of what was measured, whole or not."""

    def equal_tokens(temperature: float) -> bool:
        return plan.acceptance == "invariant" or temperature == 0

    return Report(
        target=runtime.target.name,
        target_quantisation=runtime.target.quantisation,
        draft=runtime.draft.name if runtime.draft else None,
        acceptance=plan.acceptance,
        max_tokens=plan.max_tokens,
        repeats=plan.repeats,
        seed=plan.seed,
        planned=plan.replies,
        ending=measured.ending,
        trouble=measured.trouble,
        no_energy=measured.no_energy,
        curve=measured.curve,
        peak_memory_bytes=max((row.reply.stats.peak_memory_bytes for row in measured.rows), default=0),
        figures=tuple(figures(measured.rows, plan.ways, equal_tokens=equal_tokens)),
        hindsights=tuple(hindsights(measured.rows, plan.ways)),
        rows=measured.rows,
    )
