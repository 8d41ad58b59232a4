"""Implement the command line, with one file per command. It uses only edgespec's public API."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Parse this process's arguments, run the command and exit."""
    try:
        from edgespec.cli.program import program
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    program.main()
