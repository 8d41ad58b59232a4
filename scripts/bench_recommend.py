#!/usr/bin/env python3
"""Compare the speeds that `edgespec recommend` predicts with measured ones.

    scripts/bench_recommend.py big-q8_0.gguf big-q4_0.gguf    # takes about a minute per model

Measures this machine, then loads each model and measures the duration of its passes. Prints the predicted and
measured tokens per second and costs of passes over 2, 4 and 8 tokens, and the largest errors. Run it on an
idle machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from edgespec.backends.base import LoadOptions
from edgespec.backends.registry import format_at
from edgespec.costs.curve import measure_costs
from edgespec.costs.machine_speed import measure_machine

_WIDTHS = (2, 4, 8)


def main() -> int:
    """Print a table of predicted and measured speeds. Return 1 if an error exceeds its limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+", help="GGUF files to predict")
    parser.add_argument("--speed-limit", type=float, default=0.15, help="largest error of tokens per second")
    parser.add_argument("--cost-limit", type=float, default=0.20, help="largest error of a pass cost")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EDGESPEC_DATA_DIR"] = folder
        form = format_at(args.models[0])
        machine = measure_machine(form, lambda what, _done: print(what, file=sys.stderr) is None)
    print(f"{'model':28} {'tokens/s':>18} " + " ".join(f"{f'v({width})':>14}" for width in _WIDTHS))
    worst_speed = worst_cost = 0.0
    for path in args.models:
        if form.read_pass_weights is None:
            raise SystemExit(f"error: the weights of {form.label} models cannot be read")
        weights = form.read_pass_weights(path)
        model = form.load(str(path), path.name, LoadOptions(context_tokens=512), None)
        try:
            curve = measure_costs(model, (1, *_WIDTHS), repeats=8, budget_seconds=20.0)
        finally:
            model.close()
        predicted, measured = 1 / machine.pass_seconds(weights), 1 / curve.target_step_seconds
        worst_speed = max(worst_speed, abs(predicted / measured - 1))
        cells = [f"{predicted:6.2f} / {measured:6.2f} {predicted / measured - 1:+5.0%}"]
        for width in _WIDTHS:
            ratio = machine.v(weights, width) / curve.v(width)
            worst_cost = max(worst_cost, abs(ratio - 1))
            cells.append(f"{machine.v(weights, width):.2f}/{curve.v(width):.2f} {ratio - 1:+4.0%}")
        print(f"{path.name:28} {cells[0]:>18} " + " ".join(f"{cell:>14}" for cell in cells[1:]), flush=True)
    print("Each cell shows the prediction, the measurement and the error of the prediction.")
    print(f"Largest error: {worst_speed:.1%} of the speed, {worst_cost:.1%} of a pass cost.")
    return int(worst_speed > args.speed_limit or worst_cost > args.cost_limit)


if __name__ == "__main__":
    sys.exit(main())
