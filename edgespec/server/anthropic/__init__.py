"""Anthropic's protocol."""

from edgespec.server.anthropic.protocol import ANTHROPIC

__all__ = ["ANTHROPIC"]
