"""Render tools and tool calls as plain text, for chat templates without tool support."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from edgespec.chat.message import Message
from edgespec.chat.tool_calls.calls import read_arguments
from edgespec.chat.tool_calls.form import CallForm, JsonPart

__all__ = ["ToolSupport"]

_INSTRUCTIONS = """\
# Tools

You may call one or more tools to help with the user's request. The tools are described by these JSON objects:
{tools}

To call a tool, write its name and its arguments like this:
{example}"""


class ToolSupport:
    """Rewrites conversations for chat templates with partial or no tool support.

    Args:
        template: Source code of the template.
        form: The model's tool-call format.
    """

    def __init__(self, template: str, form: CallForm) -> None:
        self._form = form
        self._shows_tools = bool(re.search(r"\b(?:xml_)?tools\b", template))
        self._shows_calls = "tool_calls" in template
        self._shows_results = bool(re.search(r"""['"]tool['"]""", template))

    def rewrite(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Return the messages with everything that the template would omit written as text."""
        rewritten = [self._rewritten(message) for message in messages]
        if not tools or self._shows_tools:
            return rewritten
        instructions = _INSTRUCTIONS.format(
            tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools),
            example=self._spelled("NAME", '{"ARGUMENT": VALUE}'),
        )
        if rewritten[0].role == "system":
            first = rewritten.pop(0)
            instructions = f"{first.content}\n\n{instructions}"
        return [Message("system", instructions), *rewritten]

    def _rewritten(self, message: Message) -> Message:
        shown = {"assistant": self._shows_calls, "tool": self._shows_results}
        return message if shown.get(message.role, True) else self.as_text(message)

    def as_text(self, message: Message) -> Message:
        """Return the message with its tool calls or its tool result written as text."""
        if message.tool_calls:
            calls = [self._spelled(call.name, read_arguments(call.arguments)) for call in message.tool_calls]
            content = "\n".join(filter(None, [message.content, *calls]))
            return replace(message, content=content, tool_calls=())
        if message.role == "tool":
            return Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
        return message

    def _spelled(self, name: str, arguments: str) -> str:
        parts = self._form.spell(name, {})
        return "".join(arguments if isinstance(part, JsonPart) else str(part) for part in parts)
