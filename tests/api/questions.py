"""Prompts for the demo models, and the comparison of replies."""

from __future__ import annotations

from edgespec import Reply

METHODS = ("model", "ngram", "model+ngram")
HOWTO = "How do I list files by size?"
REPEATS = "Repeat this: `tar -xzf archive.tar.gz` and `tar -czf archive.tar.gz` and `tar -tzf archive.tar.gz`"


def equal(got: Reply, expected: Reply) -> None:
    """Assert equal tokens, text and finish reason."""
    assert got.tokens == expected.tokens
    assert (got.text, got.finish_reason) == (expected.text, expected.finish_reason)
