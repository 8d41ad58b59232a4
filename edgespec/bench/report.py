"""Combine benchmark results and the settings that produced them into a report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from edgespec.api.runtime import Runtime
from edgespec.bench.figures import MethodFigures, OracleComparison, figures, oracle_comparisons
from edgespec.bench.plan import BenchPlan
from edgespec.bench.runs import BenchRun, Ending, Measurement
from edgespec.methods.costs.curve import CostCurve
from edgespec.model.model_facts import Exactness

__all__ = ["BenchReport", "make_report"]


@dataclass(frozen=True, slots=True)
class BenchReport:
    """The results of a benchmark run and the settings used to measure them.

    Attributes:
        planned: Number of planned replies. `rows` contains the measured ones.
        ending: Why the run ended.
        error: The error message, if the run failed.
        curve: Measured duration of verify passes, by number of tokens in the pass.
        peak_memory_bytes: Peak memory of the process during the whole run.
        figures: Speed, acceptance and memory of each method, by temperature and prompt category.
        oracle_comparisons: Comparisons of `auto` with the best fixed methods.
        exactness: Whether replies are identical to plain decoding.
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
    error: str
    curve: CostCurve
    peak_memory_bytes: int
    figures: tuple[MethodFigures, ...]
    oracle_comparisons: tuple[OracleComparison, ...]
    rows: tuple[Measurement, ...]
    exactness: Exactness | None = None

    @property
    def differing(self) -> int:
        """Return the number of replies that should match plain decoding but do not."""
        return sum(each.compared - each.identical for each in self.figures if each.category is None)

    def to_json(self, *, rows: bool = False) -> dict[str, object]:
        """Return the report as a JSON object, with one entry per reply if `rows` is set."""
        summary = asdict(replace(self, rows=()))
        del summary["rows"]
        summary["planned_replies"] = summary.pop("planned")
        summary |= {
            "exactness": self.exactness.to_json() if self.exactness else None,
            "replies": len(self.rows),
            "differing_replies": self.differing,
        }
        return summary | ({"rows": [row.to_json() for row in self.rows]} if rows else {})


def make_report(runtime: Runtime, plan: BenchPlan, bench_run: BenchRun) -> BenchReport:
    """Create the report for a complete or partial benchmark run."""
    rows = bench_run.rows

    def equal_tokens(temperature: float) -> bool:
        return plan.acceptance == "invariant" or temperature == 0

    return BenchReport(
        target=runtime.target.name,
        target_quantisation=runtime.target.quantisation,
        draft=runtime.draft.name if runtime.draft else None,
        acceptance=plan.acceptance,
        max_tokens=plan.max_tokens,
        repeats=plan.repeats,
        seed=plan.seed,
        planned=plan.replies,
        ending=bench_run.ending,
        error=bench_run.error,
        curve=bench_run.curve,
        peak_memory_bytes=max((row.reply.stats.peak_memory_bytes for row in rows), default=0),
        figures=tuple(figures(rows, plan.configs, equal_tokens=equal_tokens)),
        oracle_comparisons=tuple(oracle_comparisons(rows, plan.configs)),
        rows=rows,
        exactness=runtime.exactness_for(acceptance=plan.acceptance),
    )
