"""Prepare models once for faster drafting, such as splitting them for early exit or quantising a copy."""
