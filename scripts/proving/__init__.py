"""Compare drafted replies with plain decoding at scale. `scripts/prove --help` describes the use."""
