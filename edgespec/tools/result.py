"""The result of a tool call, as text for the model and the screen."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from mcp.types import CallToolResult

__all__ = ["ToolResult", "Veto", "limited"]

Veto: TypeAlias = Literal["", "refused", "stopped"]
"""Whether the user refused a call, or stopped the reply or the call. Empty if neither."""

# Prefix of a failed call's text, which tells the model that the call failed.
_FAILED = "Error: "


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a tool call.

    Attributes:
        text: The result to send to the model, or the error message if the call failed.
        failed: Whether the call failed.
        seconds: Duration of the call in seconds.
        veto: Whether the call failed because the user refused it or stopped it.
    """

    text: str
    failed: bool = False
    seconds: float = 0.0
    veto: Veto = ""

    @classmethod
    def of(cls, result: CallToolResult, seconds: float) -> ToolResult:
        """Convert an MCP SDK result, replacing non-text content with a short description."""
        parts = [_text(content) for content in result.content]
        if not parts and result.structured_content is not None:
            parts = [json.dumps(result.structured_content, ensure_ascii=False)]
        text = "\n".join(parts) or "(The tool returned nothing.)"
        return cls(f"{_FAILED}{text}" if result.is_error else text, result.is_error, seconds)

    @classmethod
    def failure(cls, problem: str, seconds: float = 0.0, *, veto: Veto = "") -> ToolResult:
        """Create the result of a call that failed before or while reaching the tool."""
        return cls(f"{_FAILED}{problem}", True, seconds, veto)

    @classmethod
    def saved(cls, text: str) -> ToolResult:
        """Create a result from a saved chat, which contains only its text."""
        return cls(text, failed=text.startswith(_FAILED))

    @property
    def problem(self) -> str:
        """The error message of a failed call, without the words that inform the model of the failure."""
        return self.text.removeprefix(_FAILED)


def _text(content: Any) -> str:
    if content.type == "text":
        return str(content.text)
    if content.type == "resource":
        text = getattr(content.resource, "text", None)
        return f"[data from {content.resource.uri}]" if text is None else str(text)
    if content.type == "resource_link":
        return f"[link to {content.uri}]"
    return f"[{content.type}, {content.mime_type}: models in this chat read only text]"


def limited(text: str, max_characters: int) -> str:
    """Truncate text that is too long, and append a note on how much is missing."""
    if len(text) <= max_characters:
        return text
    left_out = len(text) - max_characters
    return (
        f"{text[:max_characters]}\n[This result has {len(text):,} characters. The last {left_out:,} are left"
        " out, because they would fill the context.]"
    )
