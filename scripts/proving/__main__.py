"""Compare drafted replies with plain decoding over many tokens, and print a table.

    scripts/prove --tokens 1000000           # takes a few hours; rerun to resume
    scripts/prove --tokens 0 --write         # write the table of all results to docs/exactness.md

The embedded models answer prompts with and without drafting, with every method, on both backends, and at the
temperatures 0, 0.7 and 1.2. Both replies must have the same tokens. The first difference is scored again as
in `edgespec verify`: it is a near-tie if the rounding error of this machine explains it, and a violation
otherwise. In every second group of prompts, the end token is suppressed to get longer replies.

Each finished group of replies is one line in the results, and a later run skips it. The exit status is 1 if
there are violations, or if a method drafted nothing.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.proving.shards import CONFIGURATIONS, Shards, prepare_models

_ROOT = Path(__file__).resolve().parents[2]
PAGE = _ROOT / "docs" / "exactness.md"
BEGIN, END = "<!-- proved -->\n", "<!-- proved, end -->\n"
_COUNTS = ("tokens", "replies", "identical", "near_tie", "violations")


def main() -> int:
    """Run the missing shards and print the table. Return 1 for a violation or a method without drafts."""
    parser = argparse.ArgumentParser(
        prog="scripts/prove", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=1_000_000,
        help="total tokens to compare, including earlier runs (default: 1000000)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=_ROOT / "build" / "prove",
        help="folder for results (default: build/prove)",
    )
    parser.add_argument("--write", action="store_true", help="write the table to docs/exactness.md")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = args.results.absolute()
    os.environ["EDGESPEC_DATA_DIR"] = str(results / "data")
    shards = Shards(results / "shards.jsonl", report=lambda line: print(line, file=sys.stderr, flush=True))
    if shards.tokens < args.tokens:
        prepare_models(results / "data")
        try:
            shards.run(args.tokens)
        except KeyboardInterrupt:
            print("Interrupted. Run the same command to continue.", file=sys.stderr)
    found = table(shards.lines)
    print(found)
    if args.write:
        before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
        PAGE.write_text(before + BEGIN + "\n" + found + "\n" + END + rest.partition(END)[2], "utf-8")
    return 0 if is_proved(shards.lines) else 1


def is_proved(lines: Sequence[dict[str, Any]]) -> bool:
    """Return whether there are no violations, and every method drafted tokens."""
    drafted: dict[tuple[str, str], int] = {}
    for line in lines:
        key = (line["backend"], line["method"])
        drafted[key] = drafted.get(key, 0) + line["drafted_tokens"]
    return all(drafted.values()) and not any(line["violations"] for line in lines)


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table with one row per backend, method and temperature, and a row of totals."""
    order = {(each.backend, method): None for each in CONFIGURATIONS for method in each.methods}
    places = {key: place for place, key in enumerate(order)}
    sums: dict[tuple[str, str, float], list[int]] = {}
    for line in lines:
        row = sums.setdefault((line["backend"], line["method"], line["temperature"]), [0] * len(_COUNTS))
        row[:] = [total + line[name] for total, name in zip(row, _COUNTS, strict=True)]
    rows = [
        [backend, f"`{method}`", f"{temperature:g}", *(f"{value:,}" for value in row)]
        for (backend, method, temperature), row in sorted(
            sums.items(), key=lambda item: (places[item[0][:2]], item[0][2])
        )
    ]
    totals = [sum(line[name] for line in lines) for name in _COUNTS]
    rows.append(["all", "", "", *(f"{value:,}" for value in totals)])
    header = ["backend", "method", "temperature", "tokens", "replies", "identical", "near-ties", "violations"]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
