"""Chat for hours under bad conditions, and check that no message is lost and memory use does not grow.

    scripts/soak --hours 4      # rerun to resume

A program chats with the embedded model through the Python API and saves its chats. Meanwhile, replies are
cancelled, the model is reloaded, the disk is full (simulated by a file size limit of 0), memory is reported
as used up, and the program is suspended and resumed. Some questions are asked in the terminal
chat, which is then ended by a signal.

Prints the events, the growth of the program's memory with a 95 % interval, and how many questions and replies
are missing from the saved chats. The exit status is 1 if a message is lost, the program crashes or hangs, or
its memory use grows.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from scripts.soaking.soak import Soak, report

_ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Run the soak test and print the results. Return 1 if it failed."""
    parser = argparse.ArgumentParser(
        prog="scripts/soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--hours", type=float, default=4.0, help="total hours, including earlier runs (default: 4)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="each seed gives a different order of events (default: 0)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=_ROOT / "build" / "soak",
        help="folder for results (default: build/soak)",
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    soak = Soak(args.results.absolute(), args.seed)
    try:
        soak.run(args.hours * 3600)
    except KeyboardInterrupt:
        print("Interrupted. Run the same command to continue.", file=sys.stderr)
    return 0 if report(soak) else 1


if __name__ == "__main__":
    sys.exit(main())
