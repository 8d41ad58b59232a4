"""Benchmarks that compare every method with plain decoding: measurements, statistics, tables and plots."""

from edgespec.bench.plan import BenchPlan, MethodConfig, bench_prompts, method_configs
from edgespec.bench.report import BenchReport, make_report
from edgespec.bench.runs import BenchRun, Measurement, run

__all__ = [
    "BenchPlan",
    "BenchReport",
    "BenchRun",
    "Measurement",
    "MethodConfig",
    "bench_prompts",
    "make_report",
    "method_configs",
    "run",
]
