"""Measuring methods against plain decoding: what is run, the figures of it, and pictures of those."""

from edgespec.bench.plan import Plan, Way, bench_prompts, ways_of
from edgespec.bench.report import Report, report
from edgespec.bench.runs import Measured, Row, run

__all__ = ["Measured", "Plan", "Report", "Row", "Way", "bench_prompts", "report", "run", "ways_of"]
