"""A table of labels and values. In a narrow terminal, each value goes below its label."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.geometry import Size
from textual.widget import Widget

__all__ = ["Pairs", "pairs_content"]


def pairs_content(
    rows: Sequence[tuple[str, str]], width: int, *, label_style: str, stack_below: int = 0
) -> Content:
    """Return the rows, laid out for `width` cells.

    A value without a label starts at the left edge. Values go below their labels if fewer than `stack_below`
    cells are left for them.
    """
    label_width = max((len(label) for label, _ in rows), default=0) + 2
    stacked = width - label_width < stack_below
    lines: list[Content] = []
    for label, value in rows:
        indent = 0 if not label else 2 if stacked else label_width
        wrapped = Content(value).wrap(max(8, width - indent))
        head = Content.assemble((label.ljust(indent), label_style))
        if stacked and label:
            lines.append(head.rstrip())
            head = Content(" " * indent)
        for place, line in enumerate(wrapped):
            lines.append(Content.assemble(head if place == 0 else " " * indent, line))
    return Content("\n").join(lines)


class Pairs(Widget):
    """A table of labels and values."""

    def __init__(
        self,
        rows: Sequence[tuple[str, str]],
        *,
        label_style: str = "$muted",
        stack_below: int = 0,
    ) -> None:
        super().__init__()
        self._rows = rows
        self._label_style = label_style
        self._stack_below = stack_below

    def render(self) -> Content:
        return self._laid_out(self.content_size.width)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:  # noqa: ARG002
        return self._laid_out(width).plain.count("\n") + 1

    def _laid_out(self, width: int) -> Content:
        return pairs_content(self._rows, width, label_style=self._label_style, stack_below=self._stack_below)
