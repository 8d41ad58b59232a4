"""OpenAI's API: chat completions, completions, responses, embeddings and the list of models."""

from __future__ import annotations

from edgespec.server.endpoint import Protocol
from edgespec.server.openai.chat import create_chat_completion
from edgespec.server.openai.completions import create_completion
from edgespec.server.openai.embeddings import create_embeddings
from edgespec.server.openai.fields import error_body
from edgespec.server.openai.model_list import list_models, retrieve_model
from edgespec.server.openai.responses import create_response

__all__ = ["OPENAI"]

OPENAI = Protocol(
    "OpenAI",
    ("/",),  # Unknown paths have OpenAI's error format, unless another protocol has a longer prefix.
    (
        create_chat_completion,
        create_completion,
        create_response,
        create_embeddings,
        list_models,
        retrieve_model,
    ),
    error_body,
)
