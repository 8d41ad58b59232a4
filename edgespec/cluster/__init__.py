"""Spread a target over several machines: the worker's server, and the target's links to its workers."""
