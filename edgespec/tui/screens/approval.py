"""The dialog that asks whether the model may call a tool."""

from __future__ import annotations

from time import monotonic
from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, Static

from edgespec.tools.tool import Tool
from edgespec.tui.tool_access import CallDecision, readable_arguments

__all__ = ["ApprovalScreen"]

# Seconds without typing after which the dialog accepts keys. The dialog can open while the user is typing, so
# it ignores all keys until then.
_QUIET_SECONDS = 0.5
_CHECK_SECONDS = 0.05


class ApprovalScreen(ModalScreen[CallDecision]):
    """Dialog that shows a tool call and its arguments. Its result is the user's decision.

    The model and the server wrote the texts about the call, so the dialog does not interpret markup in them
    and shows control characters as escapes.
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
            # The buttons are disabled until `_check_quiet` enables them. Textual focuses an enabled button at
            # once, and the next key would press it.
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
