"""The types of a tool call: a complete one, and a part of one that streams."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ToolCall", "ToolCallDelta"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of one of the tools, written by the model.

    Attributes:
        id: Identifies the call in the message with its result.
        name: The tool's name, as the model wrote it. It may not be one of the tools.
        arguments: The arguments as JSON text. It is incomplete if the reply ended within the call.
    """

    id: str
    name: str
    arguments: str

    def for_openai(self) -> dict[str, object]:
        """Return the call in the format of OpenAI's API."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next part of a tool call in a streamed reply.

    Attributes:
        index: The place of the call in `Reply.tool_calls`.
        id: The call's id in its first part, and an empty string in later ones.
        name: The tool's name in the first part, and an empty string in later ones.
        arguments: The next part of the arguments' JSON text.
    """

    index: int
    id: str
    name: str
    arguments: str
