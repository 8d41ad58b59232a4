"""OpenAI's API: chat completions, completions, responses, embeddings and the list of models."""

from edgespec.server.openai.protocol import OPENAI

__all__ = ["OPENAI"]
