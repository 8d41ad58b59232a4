#!/usr/bin/env python3
"""Compare the speeds that `edgespec recommend` predicts with measured ones.

    scripts/bench_recommend.py big-q8_0.gguf big-q4_0.gguf    # takes about a minute per model

Measures this machine, and then the duration of each model's passes. Repeats this several times, because the
speed of a machine changes within minutes, and compares the medians. Prints the predicted and measured tokens
per second and costs of passes over 2, 4 and 8 tokens, the largest errors, and how far the measured speeds of
a model deviated from their median. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from edgespec.methods.costs.curve import measure_costs
from edgespec.methods.costs.machine_speed import measure_machine
from edgespec.model.base import LoadOptions
from edgespec.model.registry import FileFormat, format_at

_WIDTHS = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Speed:
    """The tokens per second of plain decoding, and the cost of a pass at each of `_WIDTHS`."""

    tokens_per_second: float
    costs: tuple[float, ...]


def main() -> int:
    """Print a table of predicted and measured speeds. Return 1 if an error exceeds its limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+", help="GGUF files to predict")
    parser.add_argument("--repeats", type=int, default=3, help="number of measurements of everything")
    parser.add_argument("--speed-limit", type=float, default=0.15, help="largest error of tokens per second")
    parser.add_argument("--cost-limit", type=float, default=0.20, help="largest error of a pass cost")
    args = parser.parse_args()
    form = format_at(args.models[0])
    if form.read_pass_weights is None:
        raise SystemExit(f"error: the weights of {form.label} models cannot be read")
    predicted: dict[Path, list[Speed]] = {path: [] for path in args.models}
    measured: dict[Path, list[Speed]] = {path: [] for path in args.models}
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["EDGESPEC_CACHE_DIR"] = folder
            machine = measure_machine(form, lambda what, _done: print(what, file=sys.stderr) is None)
        for path in args.models:
            weights = form.read_pass_weights(path)
            costs = tuple(machine.v(weights, width) for width in _WIDTHS)
            predicted[path].append(Speed(1 / machine.pass_seconds(weights), costs))
            measured[path].append(_measured(form, path))
    print(f"{'model':28} {'tokens/s':>22} " + " ".join(f"{f'v({width})':>14}" for width in _WIDTHS))
    errors = [_row(path.name, _median(predicted[path]), _median(measured[path])) for path in args.models]
    worst_speed, worst_cost = (max(each) for each in zip(*errors, strict=True))
    print("Each cell shows the prediction, the measurement and the error of the prediction.")
    print(f"Largest error: {worst_speed:.1%} of the speed, {worst_cost:.1%} of a pass cost.")
    spread = max(
        abs(each.tokens_per_second / _median(speeds).tokens_per_second - 1)
        for speeds in measured.values()
        for each in speeds
    )
    print(f"The measured speed of a model differed from its own median by up to {spread:.1%}.")
    return int(worst_speed > args.speed_limit or worst_cost > args.cost_limit)


def _measured(form: FileFormat, path: Path) -> Speed:
    model = form.load(str(path), path.name, LoadOptions(context_tokens=512), None)
    try:
        curve = measure_costs(model, (1, *_WIDTHS), repeats=8, budget_seconds=20.0)
    finally:
        model.close()
    return Speed(1 / curve.target_step_seconds, tuple(map(curve.v, _WIDTHS)))


def _median(speeds: Sequence[Speed]) -> Speed:
    costs = zip(*(each.costs for each in speeds), strict=True)
    return Speed(median(each.tokens_per_second for each in speeds), tuple(map(median, costs)))


def _row(name: str, predicted: Speed, measured: Speed) -> tuple[float, float]:
    """Print a row of the table, and return the errors of the speed and of the worst pass cost."""
    error = predicted.tokens_per_second / measured.tokens_per_second - 1
    cells = [f"{predicted.tokens_per_second:6.2f} / {measured.tokens_per_second:6.2f} {error:+5.0%}"]
    ratios = [own / real for own, real in zip(predicted.costs, measured.costs, strict=True)]
    for own, real, ratio in zip(predicted.costs, measured.costs, ratios, strict=True):
        cells.append(f"{own:.2f}/{real:.2f} {ratio - 1:+4.0%}")
    print(f"{name:28} {cells[0]:>22} " + " ".join(f"{cell:>14}" for cell in cells[1:]), flush=True)
    return abs(error), max(abs(ratio - 1) for ratio in ratios)


if __name__ == "__main__":
    sys.exit(main())
