"""OpenAI's API: chat completions, completions, responses, embeddings and the list of models."""

from __future__ import annotations

from edgespec.server.endpoint import Endpoint, Protocol
from edgespec.server.openai.chat import ChatCompletion, ChatRequest, create_chat_completion
from edgespec.server.openai.completions import Completion, CompletionRequest, create_completion
from edgespec.server.openai.embeddings import EmbeddingList, EmbeddingRequest, create_embeddings
from edgespec.server.openai.fields import error_body
from edgespec.server.openai.model_list import Model, ModelList, list_models, retrieve_model
from edgespec.server.openai.responses import ResponseObject, ResponsesRequest, create_response

__all__ = ["OPENAI"]

OPENAI = Protocol(
    "OpenAI",
    ("/",),  # Unknown paths have OpenAI's error format, unless another protocol has a longer prefix.
    (
        Endpoint(
            "POST",
            "/v1/chat/completions",
            "Reply to a conversation.",
            create_chat_completion,
            ChatRequest,
            ChatCompletion,
            streams=True,
        ),
        Endpoint(
            "POST",
            "/v1/completions",
            "Continue text.",
            create_completion,
            CompletionRequest,
            Completion,
            streams=True,
        ),
        Endpoint(
            "POST",
            "/v1/responses",
            "Reply to a message or a conversation.",
            create_response,
            ResponsesRequest,
            ResponseObject,
            streams=True,
        ),
        Endpoint(
            "POST", "/v1/embeddings", "Embed texts.", create_embeddings, EmbeddingRequest, EmbeddingList
        ),
        Endpoint("GET", "/v1/models", "List the models on this machine.", list_models, response=ModelList),
        Endpoint("GET", "/v1/models/{model:path}", "Describe a model.", retrieve_model, response=Model),
    ),
    error_body,
)
