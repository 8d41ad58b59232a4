"""The header line with the model names and the title of the chat."""

from __future__ import annotations

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

__all__ = ["Header"]


class Header(Widget):
    """Header with the models on the left and the chat's title on the right, truncated to fit."""

    models: reactive[str] = reactive("")
    chat_title: reactive[str] = reactive("")

    def render(self) -> Content:
        """Return the header line for the current width."""
        width = self.content_size.width
        left = Content.assemble(("edgespec", "bold"), "  ", (self.models, "$muted"))
        room = width - left.cell_length - 3
        if room < 8 or not self.chat_title:
            return left.truncate(width, ellipsis=True)
        title = Content(self.chat_title).truncate(room, ellipsis=True)
        gap = " " * (width - left.cell_length - title.cell_length)
        return Content.assemble(left, gap, title.stylize("$muted"))
