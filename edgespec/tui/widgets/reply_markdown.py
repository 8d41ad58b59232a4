"""The Markdown of a reply, whose code blocks can be copied with a click."""

from __future__ import annotations

from textual import events
from textual.app import ComposeResult
from textual.message import Message as Event
from textual.widgets import Markdown, Static
from textual.widgets.markdown import MarkdownFence

__all__ = ["ReplyMarkdown"]


class _CopyMark(Static):
    """The word “copy” in the corner of a code block, shown while the mouse is over the block."""

    def on_click(self, event: events.Click) -> None:
        event.stop()
        assert isinstance(self.parent, MarkdownFence)
        self.post_message(ReplyMarkdown.CopyCode(self.parent.code))


class _CodeBlock(MarkdownFence):
    """A code block with a “copy” mark in its corner."""

    def compose(self) -> ComposeResult:
        yield from super().compose()
        yield _CopyMark(" copy ", classes="copy-mark", markup=False)

    # The CSS pseudo-class `:hover` is off for a moment when the mouse moves within the block. The mark would
    # disappear under the mouse, which loses clicks.
    def on_enter(self) -> None:
        self.set_class(True, "-pointed")

    def on_leave(self) -> None:
        self.set_class(self.is_mouse_over, "-pointed")


class ReplyMarkdown(Markdown):
    """Markdown whose code blocks can be copied with the mouse."""

    BLOCKS = {**Markdown.BLOCKS, "fence": _CodeBlock, "code_block": _CodeBlock}  # noqa: RUF012 - as in the base class

    class CopyCode(Event):
        """Posted when the user clicks the “copy” mark of a code block."""

        def __init__(self, code: str) -> None:
            super().__init__()
            self.code = code
