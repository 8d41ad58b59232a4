"""Run the `edgespec` command for `python -m edgespec`."""

from edgespec.cli import main

main()
