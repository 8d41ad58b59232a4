"""Compare drafted replies with plain decoding at scale. See `scripts/prove --help`."""
