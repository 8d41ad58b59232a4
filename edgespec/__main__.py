"""`python -m edgespec` is `edgespec`."""

from edgespec.cli import main

main()
