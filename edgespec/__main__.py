"""Makes `python -m edgespec` run the `edgespec` command."""

from edgespec.cli import main

main()
