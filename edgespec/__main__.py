"""Entry point for `python -m edgespec`."""

from edgespec.cli import main

main()
