"""The list of MCP servers and their tools."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from edgespec.tools.connection import ServerConnection
from edgespec.tools.tool import Tool, visible
from edgespec.tui.tool_access import ToolAccess, server_state

__all__ = ["ToolsScreen"]

_MAX_DESCRIPTION = 100
# Seconds between checks whether a server has started or ended.
_TICK_SECONDS = 0.5


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
        # The servers that the user is turning on or off, and the text that says so.
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
        """Refresh the list if a server has started or ended."""
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
