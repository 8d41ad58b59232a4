"""Drafters propose tokens for the target to verify. There is one module per drafting method.

`edgespec.auto` decides when to draft.
"""
