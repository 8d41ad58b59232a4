"""The decoding algorithm in pure Python and numpy: loop, token trees, sampling, acceptance."""
