"""Fuzz edgespec with damaged and hostile inputs.

    scripts/fuzz --count 100000             # all subjects; rerun to resume
    scripts/fuzz --seed 7 --minutes 60      # different inputs, for an hour
    scripts/fuzz --only chat --count 5000   # one subject
    scripts/fuzz --replay FOLDER            # replay one finding

Inputs are small valid files with random changes. Each subject, such as `chat` for saved chats, runs in a
child process, which is restarted if it dies. An input passes if edgespec accepts it, or rejects it with its
own error, within 10 seconds. It is a finding if the process crashes, hangs, raises any other exception or
uses more than 3 GiB. A process that grows by more than 32 MiB over its inputs is also a finding.

The first input of each kind of failure is minimised and written to the results folder, with the command that
replays it. The next run first replays all findings and drops those that are fixed. The exit status is 1 if
there are findings.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from scripts.fuzzing.campaign import Campaign, Subject, replay, table

_ROOT = Path(__file__).resolve().parents[2]
SUBJECTS = tuple(
    Subject(name, f"scripts.fuzzing.{place}", weight)
    for name, place, weight in (
        # Relative numbers of inputs. The last six subjects are slow, because they start processes
        # or load models.
        ("gguf", "models:Gguf", 350),
        ("chat", "saved_files:Chat", 300),
        ("prefix-cache", "saved_files:PrefixCacheFiles", 245),
        ("settings", "saved_files:SettingsFile", 40),
        ("aliases", "saved_files:Aliases", 30),
        ("template", "template", 15),
        ("prompt", "prompt", 8),
        ("gguf-plan", "models:GgufPlan", 3),
        ("gguf-load", "models:GgufLoad", 3),
        ("mlx", "models:Mlx", 3),
        ("mlx-load", "models:MlxLoad", 3),
    )
)


def main() -> int:
    """Run the fuzzer and print the results. Return 1 if there are findings."""
    parser = argparse.ArgumentParser(
        prog="scripts/fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="each seed gives different inputs (default: 0)")
    parser.add_argument(
        "--count",
        type=int,
        default=100_000,
        help="total number of inputs, including earlier runs (default: 100000)",
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this many minutes")
    names = [subject.name for subject in SUBJECTS]
    parser.add_argument("--only", choices=names, metavar="SUBJECT", help=f"one of {', '.join(names)}")
    parser.add_argument("--results", type=Path, help="folder for results (default: build/fuzz/SEED)")
    parser.add_argument("--replay", type=Path, metavar="FOLDER", help="replay the input of a finding")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if args.replay:
        outcome = replay(args.replay)
        print(f"{outcome.kind} {outcome.signature}\n{outcome.detail}".strip())
        return 1 if outcome.is_finding else 0
    subjects = [subject for subject in SUBJECTS if args.only in (None, subject.name)]
    folder = args.results or _ROOT / "build" / "fuzz" / str(args.seed)
    campaign = Campaign(folder, subjects, args.seed, report=lambda line: print(line, file=sys.stderr))
    try:
        campaign.recheck()
        campaign.run(args.count, args.minutes * 60)
    except KeyboardInterrupt:
        print("Interrupted. Run the same command to continue.", file=sys.stderr)
    print(table(campaign))
    return 1 if any(results.findings for results in campaign.results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
