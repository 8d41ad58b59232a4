"""A table of labels and values that fits narrow terminals."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.geometry import Size
from textual.widget import Widget

__all__ = ["Pairs", "pairs_content"]


def pairs_content(
    rows: Sequence[tuple[str, str]], width: int, *, label_style: str, stack_below: int = 0
) -> Content:
    """Return a table of labels and values for a screen that is `width` cells wide.

    A value without a label starts at the left edge. If fewer than `stack_below` cells are left for the
    values, they follow their labels directly instead of forming a column.
    """
    label_width = max((len(label) for label, _ in rows), default=0) + 2
    has_column = width - label_width >= stack_below
    lines: list[Content] = []
    for label, value in rows:
        indent = 0 if not label else label_width if has_column else 2
        head = Content.assemble((label.ljust(indent) if has_column else label.rstrip(), label_style))
        if label and not has_column:
            line = Content.assemble(head, "  ", value)
            first, *rest = line.wrap(width if line.cell_length <= width else max(8, width - indent))
        else:
            first, *rest = Content(value).wrap(max(8, width - indent))
            first = Content.assemble(head, first)
        lines += [first, *(Content.assemble(" " * indent, line) for line in rest)]
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
