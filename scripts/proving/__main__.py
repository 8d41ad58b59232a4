"""Compare drafted replies with plain decoding over many tokens, and print a table.

    scripts/prove --tokens 1000000           # takes many hours; rerun to resume
    scripts/prove --minutes 30               # stop after half an hour
    scripts/prove --methods model,auto --drafts trees --prompts 2   # what an earlier run has not reached
    scripts/prove --tokens 0 --write         # write the table of all results to docs/exactness.md

The models of scripts/real_models and the demo models answer prompts with and without drafting: with every
method that needs no trained head, with drafts that are chains and trees, and at the temperatures 0, 0.8 and
1.2. Both replies must have the same tokens. If they differ, their passes are replayed as in `edgespec
verify`, which distinguishes rounding from faults. Replies have up to 128 tokens. In half of the blocks,
the end token is suppressed to get longer replies.

Prompts are questions, code, stories, lists, texts in other languages and texts to copy. They are drawn from
a seed, with 2 to 3,000 tokens. MLX models are slow on a CPU, so they get a small share of shorter prompts.

Each finished method and block is one line in the results, and a later run skips it. The run stops at the
first block with a fault, or with rounding where edgespec promised equal bits. The exit status is then 1, and
also if a method drafted nothing on one of the backends. Run the command again to continue after that block.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from scripts.proving.configurations import CONFIGURATIONS, GROUPS, REAL_MODELS
from scripts.proving.prompts import Range
from scripts.proving.shards import Shards
from scripts.proving.table import is_proved, summary, table

_ROOT = Path(__file__).resolve().parents[2]
PAGE = _ROOT / "docs" / "exactness.md"
BEGIN, END = "<!-- proved -->\n", "<!-- proved, end -->\n"


def main() -> int:
    """Run the missing shards and print the table. Return 1 if something is wrong or not proved."""
    parser = argparse.ArgumentParser(
        prog="scripts/prove", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=1_000_000,
        help="total tokens to compare, including earlier runs (default: 1000000)",
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only models whose name contains TEXT, such as Q4_K_M"
    )
    parser.add_argument(
        "--methods",
        type=_methods,
        default=(),
        metavar="NAMES",
        help="only these methods, separated by commas, such as model,auto",
    )
    parser.add_argument("--drafts", choices=("chains", "trees"), help="only drafts of this shape")
    parser.add_argument(
        "--prompts",
        type=int,
        default=6,
        metavar="N",
        help="at most N prompts per block, so that a short run covers more settings (default: 6)",
    )
    parser.add_argument(
        "--first-round",
        type=int,
        default=0,
        metavar="N",
        help="round of blocks to start with, to compare other prompts than an earlier run (default: 0)",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=_range,
        metavar="LOW-HIGH",
        help="use one prompt per block, with a length in this range, such as 1500-3000 (default: up to six"
        " prompts of all lengths; give each range its own --results)",
    )
    parser.add_argument("--retry", action="store_true", help="rerun the blocks that went wrong")
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="CPU threads of GGUF models; 0 lets edgespec choose (default: 1)",
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
    os.environ["EDGESPEC_CACHE_DIR"] = str(results / "cache")
    chosen = [each for each in CONFIGURATIONS if args.only.lower() in f"{each.backend}, {each.model}".lower()]
    if not chosen:
        names = ", ".join(dict.fromkeys(f"{each.backend}, {each.model}" for each in CONFIGURATIONS))
        parser.error(f"--only {args.only} is in no model's name; choose from {names}")
    chosen = [replace(each, prompts=min(each.prompts, args.prompts)) for each in chosen]
    shards = Shards(
        *(results / "shards.jsonl", chosen, _report, args.threads or None, args.prompt_tokens),
        methods=args.methods,
        drafts=args.drafts,
    )
    if args.retry:
        shards.drop_wrong()
    if shards.tokens < args.tokens:
        if not REAL_MODELS.exists():
            parser.error("the real models are missing; run scripts/real_models")
        try:
            shards.run(args.tokens, args.minutes * 60, args.first_round)
        except KeyboardInterrupt:
            _report("Interrupted. Run the same command to continue.")
    found = f"{table(shards.lines)}\n{summary(shards.lines)}"
    print(found)
    if args.write:
        before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
        PAGE.write_text(before + BEGIN + "\n" + found + "\n" + END + rest.partition(END)[2], "utf-8")
    return 0 if is_proved(shards.lines) else 1


def _methods(text: str) -> tuple[str, ...]:
    known = [method for methods in GROUPS.values() for method in methods]
    names = tuple(text.split(","))
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name} is unknown; choose from {', '.join(known)}")
    return names


def _range(text: str) -> Range:
    low, high = map(int, text.split("-"))
    if not 2 <= low <= high:
        raise argparse.ArgumentTypeError(f"{text} is not a range of two numbers from 2 up")
    return low, high


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
