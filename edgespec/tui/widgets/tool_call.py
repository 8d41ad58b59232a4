"""Widget for a tool call and its result, folded to one line."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import Collapsible, Static
from textual.widgets._collapsible import CollapsibleTitle

from edgespec.chat.tool_calls.calls import ToolCall
from edgespec.tools.tool import ToolResult, Veto, visible
from edgespec.tui.numbers import count, seconds_text
from edgespec.tui.tool_access import readable_arguments
from edgespec.tui.widgets.long_texts import limited_text
from edgespec.tui.widgets.message_widget import MessageWidget

__all__ = ["ToolCallMessage"]

# Maximum numbers of characters of the arguments and of an error message in the folded line.
_MAX_ARGUMENTS = 60
_MAX_PROBLEM = 100
# Labels for calls that the user refused or stopped.
_VETOES: dict[Veto, str] = {"refused": "not allowed", "stopped": "stopped"}


class ToolCallMessage(MessageWidget):
    """A tool call and its result, folded to one line. Enter or a click unfolds them.

    Args:
        call: The call. None if the chat file does not contain it.
        result: The result, or None if the call has not ended.
    """

    def __init__(self, call: ToolCall | None, result: ToolResult | None = None) -> None:
        super().__init__(classes="tool-call")
        self._call = call or ToolCall("", "unknown tool", "")
        self._body = Static()
        self._fold = Collapsible(self._body, title="")
        self._result = result

    def compose(self) -> ComposeResult:
        yield self._fold

    def on_mount(self) -> None:
        self._refresh()

    def finish(self, result: ToolResult) -> None:
        """Show the result of the call."""
        self._result = result
        self._refresh()

    def _refresh(self) -> None:
        call, result = self._call, self._result
        if result is None:
            state = "calling…"
        elif result.failed:
            state = _VETOES.get(result.veto) or f"failed: {_one_line(result.problem, _MAX_PROBLEM)}"
        else:
            took = f" in {seconds_text(result.seconds)}" if result.seconds else ""
            state = f"{count(len(result.text), 'character')}{took}"
        # Use `Content`, so that names and arguments are not interpreted as markup.
        self._fold.query_one(CollapsibleTitle).label = Content.assemble(
            "Tool ",
            (visible(call.name), "bold"),
            f" {_one_line(call.arguments, _MAX_ARGUMENTS)} · {state}",
        )
        text = visible(result.text) if result is not None else ""
        self._body.update(
            Content.assemble(
                (limited_text(readable_arguments(call.arguments)), "$muted"), "\n\n", limited_text(text)
            )
        )


def _one_line(text: str, max_characters: int) -> str:
    line = " ".join(visible(text).split())
    return line if len(line) <= max_characters else f"{line[: max_characters - 1]}…"
