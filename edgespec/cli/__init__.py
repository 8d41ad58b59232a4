"""The command line interface, with one module per command. It uses only edgespec's public API."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command given in `sys.argv` and exit."""
    try:
        from edgespec.system.stdio import ensure_utf8_locale

        ensure_utf8_locale()
        from edgespec.cli.program import program
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    program.main()
