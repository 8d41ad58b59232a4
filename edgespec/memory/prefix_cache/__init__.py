"""Cache the KV states of earlier prompts and replies in memory and on disk.

A prompt that begins with cached tokens does not need to be prefilled from the beginning.
"""
