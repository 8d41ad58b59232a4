"""Errors in OpenAI's format."""

from __future__ import annotations

from typing import Any

from edgespec.server.errors import ApiError
from edgespec.server.responses import server_sent_event

__all__ = ["error_body", "error_event"]


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the body of an error response."""
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
            **error.details,
        }
    }


def error_event(error: ApiError) -> bytes:
    """Return the event that reports an error to a client that is already receiving a stream."""
    return server_sent_event(error_body(error))
