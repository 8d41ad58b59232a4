"""Let the model call tools in the full-screen chat.

This module has the list of servers and tools, the dialog that asks the user to approve a call, and the class
that runs the calls and sends their results back to the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from time import monotonic
from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, OptionList, Static
from textual.widgets.option_list import Option

from edgespec.chat.tool_calls.calls import ToolCall
from edgespec.errors import ConfigurationError, OptionError
from edgespec.tools.connection import ServerConnection, Toolbox
from edgespec.tools.tool import Tool, ToolResult, visible
from edgespec.tui.chat_view import ChatView
from edgespec.tui.open_chat import OpenChat
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
    readable_arguments,
    server_state,
    unanswered_calls,
)
from edgespec.tui.widgets.messages import ToolCallMessage

_MAX_DESCRIPTION = 100
# Seconds between checks for servers that have started or exited.
_TICK_SECONDS = 0.5
# Seconds without a key press before the dialog accepts keys. It can open while the user is typing, so it
# ignores all keys until then.
_QUIET_SECONDS = 0.5
_CHECK_SECONDS = 0.05


class ToolsScreen(ModalScreen[None]):
    """Dialog that lists the servers and their tools. Enter turns the highlighted one on or off.

    Args:
        access: The servers, and the tools that are turned off or always allowed. The list changes which tools
            are turned off.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c", "dismiss", "Close", show=False),
        Binding("space", "switch", "Switch", show=False),
    ]

    def __init__(self, access: ToolAccess) -> None:
        super().__init__()
        self._access = access
        self._toolbox = access.toolbox
        # Names of servers that are being turned on or off, with the state to show for each.
        self._busy: dict[str, str] = {}
        self._shown_states: list[tuple[bool, bool]] = []

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -large") as dialog:
            dialog.border_title = "Tools"
            dialog.border_subtitle = "Enter switches on or off · Esc closes"
            yield OptionList(compact=True)

    def on_mount(self) -> None:
        self._refresh()
        self.query_one(OptionList).focus()
        self.set_interval(_TICK_SECONDS, self._follow_servers)

    def _follow_servers(self) -> None:
        """Refresh the list if a server has started or exited."""
        if self._states != self._shown_states:
            self._refresh()

    @property
    def _states(self) -> list[tuple[bool, bool]]:
        return [(server.starting, server.running) for server in self._toolbox.servers.values()]

    def _refresh(self) -> None:
        self._shown_states = self._states
        options = self.query_one(OptionList)
        place = options.highlighted or 0
        rows: list[Option] = []
        for name, server in self._toolbox.servers.items():
            rows.append(Option(self._server_row(name, server), id=name))
            rows += [Option(self._tool_row(tool), id=tool.call_name) for tool in server.tools]
        options.set_options(rows)
        options.highlighted = min(place, len(rows) - 1)

    def _server_row(self, name: str, server: ServerConnection) -> Content:
        if name in self._busy:
            state, colour = self._busy[name], "$muted"
        else:
            state = server_state(server)
            colour = "$success" if server.running else "$error" if server.problem else "$muted"
        return Content.assemble((name, "bold"), "  ", (state, colour))

    def _tool_row(self, tool: Tool) -> Content:
        is_on = tool.call_name not in self._access.disabled
        description = " ".join(visible(tool.description).split())
        if len(description) > _MAX_DESCRIPTION:
            description = description[: _MAX_DESCRIPTION - 1] + "…"
        allowed = "  called without asking" if self._access.is_always_allowed(tool) else ""
        return Content.assemble(
            "  ✓ " if is_on else "    ",
            tool.name if is_on else (tool.name, "$muted"),
            (f"  {description}", "$muted"),
            (allowed, "$warning"),
        )

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        self._switch(str(event.option.id))

    def action_switch(self) -> None:
        option = self.query_one(OptionList).highlighted_option
        if option is not None:
            self._switch(str(option.id))

    def _switch(self, name: str) -> None:
        """Turn the server or tool with this name on or off. Only tool names contain underscores."""
        if name not in self._toolbox.servers:
            self._access.disabled ^= {name}
        elif name not in self._busy:
            running = self._toolbox.servers[name].running
            self._busy[name] = "stopping…" if running else "starting…"
            self.run_worker(self._switch_server(name, running))
        self._refresh()

    async def _switch_server(self, name: str, running: bool) -> None:
        try:
            change = self._toolbox.stop if running else self._toolbox.start
            await asyncio.wrap_future(change(name))
        finally:
            del self._busy[name]
        self._refresh()


class ApprovalScreen(ModalScreen[CallDecision]):
    """Dialog that shows a tool call and its arguments. Its result is the user's decision.

    Text about the call comes from the model and the server, so the dialog does not interpret markup in it and
    shows control characters as escapes.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c", "choose('stop')", "Stop", show=False, priority=True),
        Binding("up", "app.focus_previous", "Previous", show=False),
        Binding("down", "app.focus_next", "Next", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
    ]

    def __init__(self, tool: Tool, arguments: str) -> None:
        super().__init__()
        self._tool = tool
        self._arguments = arguments
        self._last_key = monotonic()
        self._decided = False

    def compose(self) -> ComposeResult:
        tool = self._tool
        with Vertical(classes="dialog -large -approval") as dialog:
            dialog.border_title = "Allow this tool call?"
            yield Static(
                Content.assemble("Tool ", (tool.name, "bold"), " of the server ", (tool.server, "bold"))
            )
            with VerticalScroll(classes="approval-text", can_focus=False):
                yield Static(Content(readable_arguments(self._arguments)))
            # The buttons are disabled until `_check_quiet` enables them. Textual would focus an enabled
            # button immediately, and the next key would press it.
            yield Button("Allow once", action="screen.choose('once')", compact=True, disabled=True)
            yield Button("Allow in this chat", action="screen.choose('chat')", compact=True, disabled=True)
            yield Button(
                "Always allow this tool", action="screen.choose('always')", compact=True, disabled=True
            )
            yield Button(
                "Refuse", action="screen.choose('refuse')", variant="error", compact=True, disabled=True
            )

    def on_mount(self) -> None:
        self.set_interval(_CHECK_SECONDS, self._check_quiet)

    @on(events.Resize)
    def _laid_out(self) -> None:
        self.call_after_refresh(self._show_keys)

    def _show_keys(self) -> None:
        scrolls = self.query_one(VerticalScroll).max_scroll_y > 0
        scroll = "PgUp PgDn scroll · " if scrolls else ""
        self.query_one(".dialog").border_subtitle = f"{scroll}Enter picks · Esc stops the reply"

    def action_page(self, pages: int) -> None:
        """Scroll the arguments by `pages` pages, up if negative."""
        text = self.query_one(VerticalScroll)
        text.scroll_relative(y=pages * text.size.height, animate=False)

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.Key | events.Paste):
            self._last_key = monotonic()
            if isinstance(event, events.Paste) or event.is_printable:
                self._enable(False)
        await super().on_event(event)

    def _check_quiet(self) -> None:
        if self.query(Button).first().disabled and monotonic() - self._last_key >= _QUIET_SECONDS:
            self._enable(True)
            self.query(Button).first().focus()

    def _enable(self, enabled: bool) -> None:
        for button in self.query(Button):
            button.disabled = not enabled

    def action_choose(self, decision: CallDecision) -> None:
        """Close the dialog with this decision. Do nothing if the dialog is already closed."""
        if not self._decided:
            self._decided = True
            self.dismiss(decision)


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

    async def start_servers(self) -> None:
        """Start all servers. Tell the user how many tools there are, and which servers failed."""
        note = self._screen.transcript.note
        try:
            if not await asyncio.to_thread(self.read_servers):
                await note(no_servers_text())
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
            self._dialog.action_choose("stop")

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
