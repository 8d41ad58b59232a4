"""Benchmarks that compare methods with plain decoding: measurements, statistics, tables and plots."""

from edgespec.bench.figures import BenchReport, make_report
from edgespec.bench.runs import (
    BenchPlan,
    BenchRun,
    Measurement,
    MethodConfig,
    bench_prompts,
    method_configs,
    run,
)

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
