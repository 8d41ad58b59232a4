"""OpenAI's protocol: chat completions, completions, responses and the list of models."""

from edgespec.server.openai.protocol import OPENAI

__all__ = ["OPENAI"]
