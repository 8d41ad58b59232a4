"""Soak test: chat for hours under bad conditions. See `scripts/soak --help`."""
