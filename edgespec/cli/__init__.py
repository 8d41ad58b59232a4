"""The command line: `edgespec COMMAND`, one file per command. It uses the public API only."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line of this process; does not return."""
    try:
        from edgespec.cli.program import program
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    program.main()
