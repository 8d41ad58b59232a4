"""Prepare models for faster drafting, by splitting them for early exit or quantising a copy."""
