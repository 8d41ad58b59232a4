#!/usr/bin/env python3
"""Simulate `--method auto` on other machines and write the tables of docs/policy.md.

    scripts/simulate_policy.py                      # all machines, about a minute
    scripts/simulate_policy.py --machine "M4 Pro"   # one
    scripts/simulate_policy.py --write              # into docs/policy.md

The decode loop and the controller are the real ones; only the clock is simulated. All seeds are fixed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from scripts.simulation.cases import markdown_table
from scripts.simulation.machines import MACHINES

PAGE = Path(__file__).parent.parent / "docs" / "policy.md"
BEGIN, END = "<!-- simulated -->\n", "<!-- simulated, end -->\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", choices=[machine.name for machine in MACHINES])
    parser.add_argument("--write", action="store_true", help="write the tables into docs/policy.md")
    args = parser.parse_args()
    machines = [machine for machine in MACHINES if args.machine in (None, machine.name)]
    tables = "\n".join(markdown_table(machine) for machine in machines)
    if not args.write:
        print(tables)
    elif args.machine:
        parser.error("--write writes the tables of all machines")
    else:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        _, found, after = rest.partition(END)
        if not found:
            parser.error(f"{PAGE} has no {BEGIN.strip()} and {END.strip()}")
        PAGE.write_text(f"{before}{BEGIN}{tables}{END}{after}", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
