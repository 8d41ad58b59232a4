"""The list of MCP servers and their tools, and the dialog that asks the user to approve a tool call."""

from __future__ import annotations

import asyncio
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

from edgespec.tools.connection import ServerConnection
from edgespec.tools.tool import Tool, visible
from edgespec.tui.tool_access import CallDecision, ToolAccess, readable_arguments, server_state

__all__ = ["ApprovalScreen", "ToolsScreen"]

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
        self.decide(decision)

    def decide(self, decision: CallDecision) -> None:
        """Close the dialog with this decision. Do nothing if the dialog is already closed."""
        if not self._decided:
            self._decided = True
            self.dismiss(decision)
