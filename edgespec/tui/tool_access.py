"""The tools that the model can call in a chat, and the calls that the user has allowed.

The full-screen chat and the plain chat share these rules.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeAlias

from edgespec.chat.message import Message
from edgespec.chat.tool_calls.calls import ToolCall, parse_object
from edgespec.errors import ConfigurationError, OptionError
from edgespec.tools.connection import ServerConnection, Toolbox
from edgespec.tools.server_config import allow_always, read_servers, servers_path
from edgespec.tools.tool import Tool, ToolResult, limited, visible
from edgespec.tui.numbers import count
from edgespec.tui.open_chat import ChatEntry, OpenChat
from edgespec.tui.texts import sentences

CallDecision: TypeAlias = Literal["once", "chat", "always", "refuse", "stop"]
"""The user's decision on whether the model may call a tool."""

MAX_ROUNDS = 25
"""Maximum number of replies with tool calls after one user message."""

# Maximum length of a tool's result in characters. For a model with a small context, the limit is one
# character per token of context, or about a quarter of the context.
_MAX_RESULT_CHARACTERS = 32_000
# Maximum length of a call's arguments in characters. The user must be able to read them before allowing the
# call, and longer arguments take seconds to draw.
_MAX_ARGUMENT_CHARACTERS = 100_000
REFUSED = ToolResult.failure("The user does not allow this call.", veto="refused")
STOPPED = ToolResult.failure("The user stopped the reply before this call was made.", veto="stopped")
INTERRUPTED = ToolResult.failure("The user stopped this call.", veto="stopped")
TOO_MANY = ToolResult.failure(f"Not called: only {MAX_ROUNDS} rounds of calls are allowed per message.")
"""Results for calls that were not made or not completed."""


class AllowedCall(NamedTuple):
    """A valid call: its tool and arguments."""

    tool: Tool
    arguments: dict[str, Any]


class ToolAccess:
    """The user's tools and permissions. No server is started until the user turns tools on.

    Attributes:
        toolbox: The servers. Empty until tools are first turned on.
        disabled: Tools that the user turned off, by the names that the model sees.
    """

    def __init__(self) -> None:
        self.toolbox = Toolbox(())
        self.disabled: set[str] = set()
        # Tools that the user allowed for the chat `_approved_in`, and tools that are always allowed.
        self._approved: set[str] = set()
        self._always: set[str] = set()
        self._approved_in: OpenChat | None = None

    @property
    def tools(self) -> list[Tool]:
        """The tools that the model can call."""
        return [tool for tool in self.toolbox.tools if tool.call_name not in self.disabled]

    @property
    def is_starting(self) -> bool:
        """Whether a server is being started. Its tools cannot be called yet."""
        return any(server.starting for server in self.toolbox.servers.values())

    @property
    def options(self) -> dict[str, Any]:
        """The reply options that make the tools available to the model."""
        tools = self.tools
        return {"tools": [tool.definition for tool in tools]} if tools else {}

    def read_servers(self) -> bool:
        """Load the list of the user's servers, unless it is already loaded. Return False if it is empty.

        Raises:
            OptionError: The file that lists the servers is invalid.
        """
        if not self.toolbox.servers:
            try:
                self.toolbox = Toolbox(read_servers())
                self._always.clear()
            except ConfigurationError as error:
                raise OptionError(error.what, error.next_step, code=error.code) from error
        return bool(self.toolbox.servers)

    def start_problems(self) -> list[str]:
        """Return a sentence about each server that could not be started."""
        return [
            sentences(f"The server {name} cannot be used: {server.problem}")
            for name, server in self.toolbox.servers.items()
            if server.problem
        ]

    def started_text(self, next_step: str) -> str:
        """Return a note on the available tools and `next_step`, or an empty string if there are no tools."""
        if not self.tools:
            return ""
        allowed = sum(map(self.is_always_allowed, self.tools))
        exception = f", except for {count(allowed, 'tool')} that you always allow" if allowed else ""
        return (
            f"The model can now call {count(len(self.tools), 'tool')}. You will be asked before each"
            f" call{exception}. {next_step}"
        )

    def close(self) -> None:
        """Stop all servers, waiting a few seconds at most. Can be called from any thread."""
        self.toolbox.close()

    def check(self, call: ToolCall) -> AllowedCall | ToolResult:
        """Return the tool and the arguments of a call, or an error result if the call is invalid."""
        tool = next((each for each in self.tools if each.call_name == call.name), None)
        if tool is None:
            names = ", ".join(each.call_name for each in self.tools) or "none"
            return ToolResult.failure(f"There is no tool {call.name!r}. Available tools: {names}.")
        if len(call.arguments) > _MAX_ARGUMENT_CHARACTERS:
            return ToolResult.failure(
                f"The arguments have {len(call.arguments):,} characters, but at most"
                f" {_MAX_ARGUMENT_CHARACTERS:,} are allowed."
            )
        arguments = parse_object(call.arguments)
        if arguments is None:
            return ToolResult.failure("The arguments are not a JSON object.")
        return AllowedCall(tool, arguments)

    def is_always_allowed(self, tool: Tool) -> bool:
        """Return whether the user has allowed calls to this tool in all chats."""
        return tool.call_name in self._always or tool.name in self.toolbox.servers[tool.server].config.allow

    def is_allowed(self, tool: Tool, chat: OpenChat) -> bool:
        """Return whether the user has already allowed calls to this tool in this chat."""
        if self._approved_in is not chat:
            self._approved, self._approved_in = set(), chat
        return tool.call_name in self._approved or self.is_always_allowed(tool)

    def remember(self, tool: Tool, decision: CallDecision) -> str:
        """Remember the user's decision about a tool if it also applies to later calls.

        Returns:
            A note on how to revoke a saved decision. Empty if nothing is saved.

        Raises:
            ConfigurationError, OptionError: The decision `always` could not be saved, so it applies only
                until the chat is closed or tools are turned off.
        """
        if decision == "chat":
            self._approved.add(tool.call_name)
        elif decision == "always":
            self._always.add(tool.call_name)
            allow_always(tool.server, tool.name)
            return (
                f"{visible(tool.call_name)} is now called without asking. To be asked again, remove it from"
                f" {servers_path().name}."
            )
        return ""


def unanswered_calls(chat: OpenChat) -> list[ToolCall]:
    """Return the tool calls at the end of the conversation that have no results yet."""
    answered: set[str] = set()
    for message in reversed(chat.messages):
        if message.role != "tool":
            return [call for call in message.tool_calls if call.id not in answered]
        answered.add(message.tool_call_id)
    return []


def call_rounds(chat: OpenChat) -> int:
    """Return the number of replies with tool calls since the last user message."""
    rounds = 0
    for message in reversed(chat.messages):
        if message.role == "user":
            break
        rounds += bool(message.tool_calls)
    return rounds


def add_result(chat: OpenChat, call: ToolCall, result: ToolResult, context_tokens: int) -> ToolResult:
    """Add a call's result to the chat, truncated to fit the context, and return what was added."""
    result = replace(result, text=limited(result.text, min(_MAX_RESULT_CHARACTERS, context_tokens)))
    message = Message("tool", result.text, tool_call_id=call.id, name=call.name, ended_early=result.veto)
    chat.tree = chat.tree.add(ChatEntry(message), chat.tree.tip)
    return result


def server_state(server: ServerConnection) -> str:
    """Return whether a server is running, and if not, why not."""
    if server.starting:
        return "starting…"
    if server.running:
        left_out = f", {server.left_out:,} more left out" if server.left_out else ""
        return f"on, {count(len(server.tools), 'tool')}{left_out}"
    if not server.problem:
        return "off"
    if server.tools:
        return f"ended: {server.problem.rstrip('.')}. The next call starts it again"
    return f"not running: {server.problem}"


def readable_arguments(arguments: str) -> str:
    """Return the arguments of a call as indented JSON in which control characters are escaped."""
    try:
        text = json.dumps(json.loads(arguments), ensure_ascii=False, indent=2)
    except (ValueError, RecursionError):
        text = arguments
    return visible(text)


def no_servers_text() -> str:
    """Return instructions for adding tools."""
    return (
        "There are no tools yet. They come from MCP servers, which you list in the file"
        f' {servers_path()}. For example:\n\n[files]\ncommand = "npx"\n'
        'args = ["-y", "@modelcontextprotocol/server-filesystem", "~/notes"]'
    )
