"""Ollama's API, for programs that can use Ollama but no other server."""

from edgespec.server.ollama.protocol import OLLAMA

__all__ = ["OLLAMA"]
