"""Speculative decoding in pure Python and NumPy: the loop, token trees, sampling and acceptance."""
