"""MCP tools and the results of their calls, as text for the model and the screen.

A tool's name, description and schema come from the server and are untrusted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from mcp.types import CallToolResult
    from mcp.types import Tool as ListedTool

__all__ = ["MAX_TOOLS", "Tool", "ToolResult", "Veto", "accepted_tools", "limited", "visible"]

# Maximum number of tools per server. Each tool takes up about a hundred tokens of context.
MAX_TOOLS = 100
_MAX_DESCRIPTION_CHARACTERS = 1_000
_MAX_SCHEMA_CHARACTERS = 20_000
# Matches tool names that follow the MCP specification's recommendation.
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
# Matches control characters, and invisible characters that can hide text or change its direction. Does not
# match line breaks and tabs, which are harmless.
_INVISIBLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff"
    r"\ud800-\udfff\U000e0000-\U000e0fff]"
)
Veto: TypeAlias = Literal["", "refused", "stopped"]
"""How the user vetoed a call: `refused`, `stopped` (the call or the whole reply), or empty if not at all."""

# Prefix of a failed call's text, which tells the model that the call failed.
_FAILED = "Error: "


def visible(text: str) -> str:
    r"""Replace control characters and invisible characters with escapes such as `\u200b`.

    Newlines and tabs are kept, and Windows line endings become newlines.
    """
    text = text.replace("\r\n", "\n")
    return _INVISIBLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model can call.

    Attributes:
        server: The user's name for the server.
        name: The server's name for the tool.
        description: What the tool does, according to the server.
        schema: The JSON schema of the tool's arguments.
    """

    server: str
    name: str
    description: str
    schema: Mapping[str, Any]

    @property
    def call_name(self) -> str:
        """The name that the model uses, such as `files_read`. Unique, as server names have no underscores."""
        return f"{self.server}_{self.name}"

    @property
    def definition(self) -> dict[str, Any]:
        """The tool in OpenAI's API format, for `Runtime.stream_messages`."""
        function = {"name": self.call_name, "description": self.description, "parameters": dict(self.schema)}
        return {"type": "function", "function": function}


def accepted_tools(server: str, listed: Iterable[ListedTool]) -> tuple[tuple[Tool, ...], int]:
    """Return a server's usable tools, and the number of tools left out.

    A tool is left out if its name is invalid or repeated, if its schema is too large, or if 100 tools have
    already been accepted.
    """
    tools: dict[str, Tool] = {}
    left_out = 0
    for each in listed:
        valid = _NAME.fullmatch(each.name) and each.name not in tools and len(tools) < MAX_TOOLS
        if not valid or not _is_small(each.input_schema):
            left_out += 1
            continue
        description = visible(each.description or "")
        if len(description) > _MAX_DESCRIPTION_CHARACTERS:
            description = description[:_MAX_DESCRIPTION_CHARACTERS] + "…"
        tools[each.name] = Tool(server, each.name, description, each.input_schema)
    return tuple(tools.values()), left_out


def _is_small(schema: Mapping[str, Any]) -> bool:
    try:
        return len(json.dumps(schema)) <= _MAX_SCHEMA_CHARACTERS
    except (ValueError, RecursionError):
        return False


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a tool call.

    Attributes:
        text: The result to send to the model, or the error message if the call failed.
        failed: Whether the call failed.
        seconds: Duration of the call in seconds.
        veto: Whether the user refused or stopped the call. See `Veto`.
    """

    text: str
    failed: bool = False
    seconds: float = 0.0
    veto: Veto = ""

    @classmethod
    def of(cls, result: CallToolResult, seconds: float) -> ToolResult:
        """Convert a result from the MCP SDK, replacing non-text content with short descriptions."""
        parts = [_result_text(content) for content in result.content]
        if not parts and result.structured_content is not None:
            parts = [json.dumps(result.structured_content, ensure_ascii=False)]
        text = "\n".join(parts) or "(The tool returned nothing.)"
        return cls(f"{_FAILED}{text}" if result.is_error else text, result.is_error, seconds)

    @classmethod
    def failure(cls, problem: str, seconds: float = 0.0, *, veto: Veto = "") -> ToolResult:
        """Create the result of a call that failed without a result from the tool."""
        return cls(f"{_FAILED}{problem}", True, seconds, veto)

    @classmethod
    def saved(cls, text: str, veto: Veto = "") -> ToolResult:
        """Create a result from a saved chat, which marks other failures only by the prefix of the text."""
        return cls(text, failed=text.startswith(_FAILED), veto=veto)

    @property
    def problem(self) -> str:
        """The error message of a failed call, without the prefix that tells the model about the failure."""
        return self.text.removeprefix(_FAILED)


def _result_text(content: Any) -> str:
    if content.type == "text":
        return str(content.text)
    if content.type == "resource":
        text = getattr(content.resource, "text", None)
        return f"[data from {content.resource.uri}]" if text is None else str(text)
    if content.type == "resource_link":
        about = filter(None, (content.title or content.name, content.description))
        return f"[link to {'; '.join((str(content.uri), *about))}]"
    return f"[{content.type}, {content.mime_type}: models in this chat can read only text]"


def limited(text: str, max_characters: int) -> str:
    """Truncate text to `max_characters`, and append a note on how much is missing."""
    if len(text) <= max_characters:
        return text
    left_out = len(text) - max_characters
    return (
        f"{text[:max_characters]}\n[This result has {len(text):,} characters. The last {left_out:,} are left"
        " out, because they would fill the context.]"
    )
