"""The command line: `edgespec COMMAND`, one file per command. It uses the public API only."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line of this process; does not return."""
    from edgespec.cli.program import program

    program.main()
