"""Let the model call tools: ask for approval, run the calls, and send the results back to the model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future

from edgespec.chat.tool_calls.calls import ToolCall
from edgespec.errors import ConfigurationError, OptionError
from edgespec.tools.connection import Toolbox
from edgespec.tools.tool import Tool, ToolResult
from edgespec.tui.chat_view import ChatView
from edgespec.tui.open_chat import OpenChat
from edgespec.tui.screens.tools import ApprovalScreen, ToolsScreen
from edgespec.tui.tool_access import (
    INTERRUPTED,
    MAX_ROUNDS,
    REFUSED,
    STOPPED,
    TOO_MANY,
    CallDecision,
    ToolAccess,
    add_result,
    call_rounds,
    no_servers_text,
    unanswered_calls,
)
from edgespec.tui.widgets.messages import ToolCallMessage

__all__ = ["ToolUse"]


class ToolUse(ToolAccess):
    """Tool use in the full-screen chat.

    Args:
        screen: Shows the calls and prompts the user.
        save: Saves the chat.
        after_calls: Called once a reply's calls have ended, with a flag for whether the user stopped them.
            Lets the model continue.
    """

    def __init__(
        self,
        screen: ChatView,
        *,
        save: Callable[[], Awaitable[object]],
        after_calls: Callable[[bool], Awaitable[None]],
    ) -> None:
        super().__init__()
        self._screen = screen
        self._save = save
        self._after_calls = after_calls
        self._stop = asyncio.Event()
        self._dialog: ApprovalScreen | None = None

    def show_servers(self) -> None:
        """Open the dialog for turning servers and tools on and off."""
        self._screen.app.push_screen(ToolsScreen(self), lambda _: self._screen.refresh_facts())

    async def _has_servers(self) -> bool:
        """Load the user's servers. If there are none, explain how to add one, and return False."""
        if await asyncio.to_thread(self.read_servers):
            return True
        await self._screen.transcript.note(no_servers_text())
        return False

    async def start_servers(self) -> None:
        """Start all servers. Tell the user how many tools there are, and which servers failed."""
        note = self._screen.transcript.note
        try:
            if not await self._has_servers():
                return
        except OptionError as error:
            await self._screen.show_error(error)
            return
        toolbox = self.toolbox
        self._screen.say("Starting the tools…")
        await asyncio.gather(*(asyncio.wrap_future(toolbox.start(name)) for name in toolbox.servers))
        for problem in self.start_problems():
            await note(problem)
        self._screen.refresh_facts()
        if text := self.started_text("Type /tools to see them or turn them off."):
            await note(text)

    async def stop_servers(self) -> None:
        """Stop all servers, so that the model has no tools."""
        self.stop()
        toolbox, self.toolbox = self.toolbox, Toolbox(())
        self._screen.refresh_facts()
        await asyncio.to_thread(toolbox.close)

    def stop(self) -> None:
        """Stop the running call and skip the remaining ones. Keep the results so far."""
        self._stop.set()
        if self._dialog is not None:
            self._dialog.decide("stop")

    def begin(self, calls: Sequence[ToolCall]) -> None:
        """Run the calls, then let the model continue. The screen's `calling_tools` is True while they run."""
        self._stop = asyncio.Event()
        self._screen.calling_tools = True
        self._screen.run_worker(self._make_calls(calls))

    async def _make_calls(self, calls: Sequence[ToolCall]) -> None:
        screen, chat = self._screen, self._screen.current_chat
        chat.unfinished = True
        too_many = call_rounds(chat) > MAX_ROUNDS
        try:
            for call in calls:
                widget = ToolCallMessage(call)
                await screen.transcript.add(widget)
                result = TOO_MANY if too_many else await self._make_call(call)
                widget.finish(self._add_result(chat, call, result))
                await self._save()
            chat.unfinished = False
            await self._save()
            if too_many:
                await screen.transcript.note(
                    f"Stopped after {MAX_ROUNDS} rounds of tool calls. Type /continue to ask for an answer."
                )
        finally:
            # Start the next reply without an `await` in between, so that nothing else sees the chat as idle.
            screen.calling_tools = False
        await self._after_calls(self._stop.is_set() or too_many)

    async def answer_pending(self, chat: OpenChat) -> None:
        """Add a result to each call that was not run, because chat templates expect one for every call."""
        for call in unanswered_calls(chat):
            widget = ToolCallMessage(call)
            await self._screen.transcript.add(widget)
            widget.finish(self._add_result(chat, call, STOPPED))

    def _add_result(self, chat: OpenChat, call: ToolCall, result: ToolResult) -> ToolResult:
        added = add_result(chat, call, result, self._screen.runtime.context_tokens)
        self._screen.transcript.follow()
        return added

    async def _make_call(self, call: ToolCall) -> ToolResult:
        """Run a call if the user allows it, and return its result."""
        if self._stop.is_set():
            return STOPPED
        checked = self.check(call)
        if isinstance(checked, ToolResult):
            return checked
        decision = await self._decide(checked.tool, call)
        if decision == "stop":
            self._stop.set()
            return STOPPED
        if decision == "refuse":
            return REFUSED
        return await self._until_stopped(self.toolbox.call(checked.tool, checked.arguments))

    async def _until_stopped(self, future: Future[ToolResult]) -> ToolResult:
        waiting = asyncio.ensure_future(asyncio.wrap_future(future))
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((waiting, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if waiting.done():
            return waiting.result()
        waiting.cancel()
        return INTERRUPTED

    async def _decide(self, tool: Tool, call: ToolCall) -> CallDecision:
        """Return the user's decision, or `once` if the user has already allowed such calls."""
        if self.is_allowed(tool, self._screen.current_chat):
            return "once"
        self._dialog = ApprovalScreen(tool, call.arguments)
        decision = await self._screen.app.push_screen_wait(self._dialog)
        self._dialog = None
        try:
            if note := await asyncio.to_thread(self.remember, tool, decision):
                self._screen.say(note)
        except (ConfigurationError, OptionError) as error:
            await self._screen.show_error(error)
        return decision
