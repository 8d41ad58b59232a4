"""Errors in Anthropic's format."""

from __future__ import annotations

from typing import Any

from edgespec.server.errors import ApiError
from edgespec.server.responses import server_sent_event

__all__ = ["error_body", "error_event"]

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the body of an error response."""
    message = error.message
    if error.code == "context_length_exceeded":
        # Agents such as Claude Code recognise this wording, and shorten the conversation according to the
        # numbers.
        tokens, context_tokens = error.details.get("n_prompt_tokens", 0), error.details.get("n_ctx", 0)
        sizes = f"{tokens} tokens > {context_tokens} maximum; " if tokens > context_tokens else ""
        message = f"prompt is too long: {sizes}{message}"
    kind = _TYPES.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message, **error.details}}


def error_event(error: ApiError) -> bytes:
    """Return the event that reports an error to a client that is already receiving a stream."""
    return server_sent_event(error_body(error), "error")
