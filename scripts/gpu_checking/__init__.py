"""Check edgespec on a GPU without a network. See `scripts/check_gpu --help`."""
