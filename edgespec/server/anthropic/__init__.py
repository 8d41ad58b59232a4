"""Anthropic's Messages API."""

from __future__ import annotations

from edgespec.server.anthropic.messages import (
    AnthropicCount,
    AnthropicCountRequest,
    AnthropicMessageRequest,
    AnthropicReply,
    count_tokens,
    create_message,
    error_body,
)
from edgespec.server.endpoint import Endpoint, Protocol

__all__ = ["ANTHROPIC"]

ANTHROPIC = Protocol(
    "Anthropic",
    ("/v1/messages",),
    (
        Endpoint(
            "POST",
            "/v1/messages",
            "Reply to a conversation.",
            create_message,
            AnthropicMessageRequest,
            AnthropicReply,
            streams=True,
        ),
        Endpoint(
            "POST",
            "/v1/messages/count_tokens",
            "Count the tokens of a prompt.",
            count_tokens,
            AnthropicCountRequest,
            AnthropicCount,
        ),
    ),
    error_body,
)
