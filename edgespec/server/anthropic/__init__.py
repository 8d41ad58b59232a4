"""Anthropic's Messages API."""

from edgespec.server.anthropic.protocol import ANTHROPIC

__all__ = ["ANTHROPIC"]
