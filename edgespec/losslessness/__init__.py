"""Verify that speculative decoding gives the same tokens as plain decoding."""
