"""Benchmarks that compare every method with plain decoding: measurements, statistics, tables and plots."""

from edgespec.bench.plan import BenchPlan, MethodConfig, bench_prompts, method_configs
from edgespec.bench.report import Report, make_report
from edgespec.bench.runs import BenchRun, Measurement, run

__all__ = [
    "BenchPlan",
    "BenchRun",
    "Measurement",
    "MethodConfig",
    "Report",
    "bench_prompts",
    "make_report",
    "method_configs",
    "run",
]
