"""Let the model call tools: ask the user, run the calls, and send the results back to the model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from edgespec.chat.message import Message
from edgespec.chat.tool_calls.calls import ToolCall, parse_object
from edgespec.errors import ConfigurationError, OptionError
from edgespec.tools.result import ToolResult, limited
from edgespec.tools.server_config import allow_always, read_servers, servers_path
from edgespec.tools.tool import Tool
from edgespec.tools.toolbox import Toolbox
from edgespec.tui.numbers import count
from edgespec.tui.open_chat import ChatEntry, OpenChat
from edgespec.tui.screens.approval import ApprovalScreen, Decision
from edgespec.tui.screens.tools import ToolsScreen
from edgespec.tui.texts import sentences
from edgespec.tui.widgets.tool_call import ToolCallMessage

if TYPE_CHECKING:
    from edgespec.tui.turns import TurnScreen

__all__ = ["ToolUse", "unanswered_calls"]

# Maximum number of replies with tool calls after one user message.
_MAX_ROUNDS = 25
# Maximum length of a tool's result in characters. For a model with a small context, the limit is as many
# characters as the context has tokens, which is about a quarter of the context.
_MAX_RESULT_CHARACTERS = 32_000
_REFUSED = ToolResult.failure("The user does not allow this call.")
_STOPPED = ToolResult.failure("The user stopped the reply before this call was made.")
_INTERRUPTED = ToolResult.failure("The user stopped this call.")
_TOO_MANY = ToolResult.failure(f"Not called: only {_MAX_ROUNDS} rounds of calls are allowed for a message.")


def unanswered_calls(chat: OpenChat) -> list[ToolCall]:
    """Return the tool calls at the end of the conversation that have no results yet."""
    answered: set[str] = set()
    for message in reversed(chat.messages):
        if message.role != "tool":
            return [call for call in message.tool_calls if call.id not in answered]
        answered.add(message.tool_call_id)
    return []


class ToolUse:
    """Tool use in the chat. No server is started until the user turns tools on.

    Attributes:
        toolbox: The servers. Empty until tools are first turned on.
        disabled: Names, as the model sees them, of the tools that the user turned off.
    """

    def __init__(self, screen: TurnScreen) -> None:
        self.toolbox = Toolbox(())
        self.disabled: set[str] = set()
        self._screen = screen
        self._stop = asyncio.Event()
        self._dialog: ApprovalScreen | None = None
        # Tools that the user allowed in the chat `_approved_in`, and tools that the user always allows.
        self._approved: set[str] = set()
        self._always: set[str] = set()
        self._approved_in: OpenChat | None = None

    @property
    def tools(self) -> list[Tool]:
        """The tools that the model can call."""
        return [tool for tool in self.toolbox.tools if tool.call_name not in self.disabled]

    @property
    def options(self) -> dict[str, Any]:
        """The reply options that make the tools available to the model."""
        tools = self.tools
        return {"tools": [tool.definition for tool in tools]} if tools else {}

    async def command(self, argument: str) -> None:
        """Run `/tools`: show the servers and their tools, or turn all of them on or off.

        Raises:
            OptionError: `argument` or the file that lists the servers is invalid.
        """
        word = argument.lower()
        if word not in ("", "on", "off"):
            raise OptionError(
                f"Unknown argument {argument!r} for /tools", "Type /tools, /tools on or /tools off"
            )
        if word == "off":
            await self._stop_servers()
            await self._screen.transcript.note("Tools are off.")
        elif await self._read_servers():
            if word == "on":
                self._screen.run_worker(self.start_servers())
            else:
                self._screen.app.push_screen(ToolsScreen(self.toolbox, self.disabled))

    async def _read_servers(self) -> bool:
        """Read the user's servers unless they have been read. If there are none, explain how to add one."""
        if not self.toolbox.servers:
            try:
                self.toolbox = Toolbox(await asyncio.to_thread(read_servers))
            except ConfigurationError as error:
                raise OptionError(error.what, error.next_step) from error
        if not self.toolbox.servers:
            await self._screen.transcript.note(
                "There are no tools yet. They come from MCP servers, which you list in the file"
                f' {servers_path()}. For example:\n\n[files]\ncommand = "npx"\n'
                'args = ["-y", "@modelcontextprotocol/server-filesystem", "~/notes"]'
            )
        return bool(self.toolbox.servers)

    async def start_servers(self) -> None:
        """Start all servers. Tell the user how many tools there are, and which servers failed."""
        note = self._screen.transcript.note
        try:
            if not await self._read_servers():
                return
        except OptionError as error:
            await self._screen.show_error(error)
            return
        toolbox = self.toolbox
        self._screen.say("Starting the tools…")
        await asyncio.gather(*(asyncio.wrap_future(toolbox.start(name)) for name in toolbox.servers))
        for name, server in toolbox.servers.items():
            if server.problem:
                await note(sentences(f"The server {name} was not started: {server.problem}"))
        if self.tools:
            await note(
                f"The model can now call {count(len(self.tools), 'tool')}. You are asked before each call."
                " Type /tools to see them or turn them off."
            )

    async def _stop_servers(self) -> None:
        self.stop()
        toolbox, self.toolbox = self.toolbox, Toolbox(())
        await asyncio.to_thread(toolbox.close)

    def close(self) -> None:
        """Stop all servers, waiting a few seconds at most. Can be called from any thread."""
        self.toolbox.close()

    def stop(self) -> None:
        """Stop the running call and skip the remaining ones. Keep the results so far."""
        self._stop.set()
        if self._dialog is not None:
            self._dialog.decide("stop")

    def begin(self, calls: Sequence[ToolCall]) -> None:
        """Make the calls, then let the model continue. Meanwhile, the screen's `calling_tools` is True."""
        self._stop = asyncio.Event()
        self._screen.calling_tools = True
        self._screen.run_worker(self._make_calls(calls))

    async def _make_calls(self, calls: Sequence[ToolCall]) -> None:
        screen, chat = self._screen, self._screen.current_chat
        chat.unfinished = True
        too_many = _rounds(chat) > _MAX_ROUNDS
        try:
            for call in calls:
                widget = ToolCallMessage(call)
                await screen.transcript.add(widget)
                result = _TOO_MANY if too_many else await self._make_call(call)
                self._add_result(chat, call, result)
                widget.finish(chat.messages[-1].content, result.seconds)
                await screen.save()
            chat.unfinished = False
            await screen.save()
            if too_many:
                await screen.transcript.note(
                    f"Stopped after {_MAX_ROUNDS} rounds of tool calls. Type /continue to ask for an answer."
                )
        finally:
            # Start the next reply without an `await` in between, so that nothing else sees the chat as free.
            screen.calling_tools = False
        await screen.after_calls(stopped=self._stop.is_set() or too_many)

    async def answer_pending(self, chat: OpenChat) -> None:
        """Add a result to each call that was not made, because chat templates expect one for every call."""
        for call in unanswered_calls(chat):
            widget = ToolCallMessage(call)
            await self._screen.transcript.add(widget)
            self._add_result(chat, call, _STOPPED)
            widget.finish(_STOPPED.text, 0.0)

    def _add_result(self, chat: OpenChat, call: ToolCall, result: ToolResult) -> None:
        most = min(_MAX_RESULT_CHARACTERS, self._screen.runtime.context_tokens)
        text = limited(result.text, most)
        message = Message("tool", text, tool_call_id=call.id, name=call.name)
        chat.tree = chat.tree.add(ChatEntry(message), chat.tree.tip)
        self._screen.transcript.follow()

    async def _make_call(self, call: ToolCall) -> ToolResult:
        """Return the result of a call, after asking the user."""
        if self._stop.is_set():
            return _STOPPED
        tool = next((each for each in self.tools if each.call_name == call.name), None)
        if tool is None:
            names = ", ".join(each.call_name for each in self.tools) or "none"
            return ToolResult.failure(f"There is no tool {call.name!r}. Available tools: {names}.")
        arguments = parse_object(call.arguments)
        if arguments is None:
            return ToolResult.failure("The arguments are not a JSON object.")
        decision = await self._decide(tool, call)
        if decision == "stop":
            self._stop.set()
            return _STOPPED
        if decision == "refuse":
            return _REFUSED
        return await self._until_stopped(self.toolbox.call(tool, arguments))

    async def _until_stopped(self, future: Future[ToolResult]) -> ToolResult:
        waiting = asyncio.ensure_future(asyncio.wrap_future(future))
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((waiting, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if waiting.done():
            return waiting.result()
        waiting.cancel()
        return _INTERRUPTED

    async def _decide(self, tool: Tool, call: ToolCall) -> Decision:
        """Return the user's decision, or `once` if the user allows the call now or has allowed it before."""
        chat = self._screen.current_chat
        if self._approved_in is not chat:
            self._approved, self._approved_in = set(), chat
        config = self.toolbox.servers[tool.server].config
        if tool.name in config.allow or tool.call_name in self._approved | self._always:
            return "once"
        self._dialog = ApprovalScreen(tool, call.arguments)
        decision = await self._screen.app.push_screen_wait(self._dialog)
        self._dialog = None
        if decision == "chat":
            self._approved.add(tool.call_name)
        elif decision == "always":
            self._always.add(tool.call_name)
            try:
                await asyncio.to_thread(allow_always, tool.server, tool.name)
            except (ConfigurationError, OptionError) as error:
                await self._screen.show_error(error)
        return "once" if decision in ("once", "chat", "always") else decision


def _rounds(chat: OpenChat) -> int:
    """Return the number of replies with tool calls since the last user message."""
    rounds = 0
    for message in reversed(chat.messages):
        if message.role == "user":
            break
        rounds += bool(message.tool_calls)
    return rounds
