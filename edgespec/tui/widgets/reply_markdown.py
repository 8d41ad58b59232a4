"""Draw a reply's Markdown in a single widget, because a widget per block would make scrolling slow.

Words can be coloured by their origin: accepted draft tokens, or the model itself.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from urllib.parse import unquote

from rich.cells import cell_len
from rich.segment import Segment
from textual import events
from textual.content import Span
from textual.geometry import Offset, Region, Size
from textual.message import Message as Event
from textual.reactive import Reactive
from textual.selection import Selection
from textual.strip import Strip
from textual.widget import Widget

from edgespec.tui.widgets.markdown_blocks import Block, CodeBlock, Row, gap_row, read_markdown

GUESSED_STYLE, OWN_STYLE = "$success", "$warning"
"""Styles of words from accepted draft tokens, and of words from the model itself."""
_COPY_MARK = " copy "
_WORD = re.compile(r"\S+")
# Maximum number of markup characters, such as those of a link's URL, between two words, and between two
# letters of a word.
_MAX_MARKUP, _MAX_INNER_MARKUP = 2000, 16


class ReplyMarkdown(Widget):
    """Markdown whose code blocks can be copied with the mouse. It draws only the rows that are visible.

    Attributes:
        colours: Colours of the words by their origin, or None. A change applies only to text added later, so
            call `replace` afterwards.

    Args:
        text: The Markdown text.
    """

    DEFAULT_CSS = """
    ReplyMarkdown {
        height: auto;
    }
    ReplyMarkdown.-empty {
        display: none;
    }
    """

    # See `MessageWidget.virtual_size`.
    virtual_size: Reactive[Size] = Reactive(Size(0, 0), repaint=False)

    class CopyCode(Event):
        """Posted when the user clicks the copy button of a code block."""

        def __init__(self, code: str) -> None:
            super().__init__()
            self.code = code

    def __init__(self, text: str = "") -> None:
        super().__init__(classes="reply-markdown")
        self.colours: OriginColours | None = None
        self._finished: list[Block] = []
        self._last_text = ""
        # Index in the whole text at which `_last_text` starts.
        self._last_first = 0
        self._blocks: list[Block] = []
        # A width and the result of `_bottoms_at` for this width, cached until the text changes.
        self._bottoms: tuple[int, list[int]] = (0, [])
        # The code block under the mouse.
        self._pointed: CodeBlock | None = None
        self._read(text)

    def replace(self, text: str) -> None:
        """Replace the whole text."""
        self._finished, self._last_text, self._last_first = [], "", 0
        self.append(text)

    def append(self, text: str) -> None:
        """Append text, reparsing only the last part, such as a paragraph or a list."""
        width = self.size.width
        blocks, bottoms = self._blocks, self._bottoms_at(width)
        self._read(text)
        if not bottoms or bottoms[-1:] != self._bottoms_at(width)[-1:]:
            self.refresh(layout=True)
        elif same := self._same_rows(blocks, width):
            self.refresh(Region(0, same, width, bottoms[-1] - same))
        else:
            self.refresh()

    def _same_rows(self, before: Sequence[Block], width: int) -> int:
        """Return how many rows at the top look the same as in the previous blocks, `before`."""
        pairs = zip(before, self._blocks, strict=False)
        number = next((number for number, (old, new) in enumerate(pairs) if old is not new), len(before))
        top = self._bottoms_at(width)[number - 1] if number else 0
        if number == min(len(before), len(self._blocks)) or not (drawn := before[number].drawn_rows):
            return top
        new = self._blocks[number]
        if new.gap and number:
            top += 1
        rows = zip(drawn, new.rows(width, top, self.visual_style, self._get_style), strict=False)
        return top + next((row for row, (old, now) in enumerate(rows) if old != now), len(drawn))

    def _read(self, text: str) -> None:
        text = self._last_text + text
        markdown = read_markdown(text)
        if self.colours is not None:
            self.colours.colour((*markdown.finished, *markdown.last), text, self._last_first)
        self._last_first += len(text) - len(markdown.last_text)
        self._finished += markdown.finished
        self._blocks = [*self._finished, *markdown.last]
        self._last_text = markdown.last_text
        self._bottoms = (0, [])
        self.set_class(not self._blocks, "-empty")

    def notify_style_update(self) -> None:
        """Draw the text in the colours of the new theme."""
        self._forget_rows()
        super().notify_style_update()

    def on_unmount(self) -> None:
        # Free the rows now. A removed widget is freed only by the garbage collector, which gets slower with
        # every object.
        self._forget_rows()

    def _forget_rows(self) -> None:
        for block in self._blocks:
            block.forget_rows()

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:  # noqa: ARG002
        bottoms = self._bottoms_at(width)
        return bottoms[-1] if bottoms and width else 0

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if (place := self._place(y)) is None:
            return Strip.blank(width, self.visual_style.rich_style)
        strip = self._row(y, *place).strip
        selection = self.text_selection
        if selection is not None and (span := selection.get_span(y)) is not None:
            strip = self._with_selection(strip, *span)
        number, row = place
        if self._blocks[number] is self._pointed and row == 0:
            mark = Segment(_COPY_MARK, self._get_style("$primary on $panel").rich_style)
            strip = Strip.join([strip.crop(0, width - len(_COPY_MARK)), Strip([mark])])
        return strip

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        parts: list[str] = []
        for y in range(self.size.height):
            if (span := selection.get_span(y)) is not None and (place := self._place(y)) is not None:
                row = self._row(y, *place)
                start, end = span
                text = row.strip.text[max(start, row.start) : row.end if end == -1 else min(end, row.end)]
                parts += [row.before, text] if parts else [text]
        return "".join(parts), "\n"

    def _with_selection(self, strip: Strip, start: int, end: int) -> Strip:
        """Return `strip` with characters `start` to `end` selected. If `end` is -1, select to the end."""
        text = strip.text
        left, right = (cell_len(text[:each]) for each in (start, len(text) if end == -1 else end))
        style = self.screen.get_component_rich_style("screen--selection")
        parts = strip.crop(0, left), strip.crop(left, right).apply_style(style), strip.crop(right)
        return Strip.join(parts)

    def _row(self, y: int, number: int, row: int) -> Row:
        """Return row `y` of the widget: row `row` of block `number`, or the gap above it if `row` is -1."""
        width, style, block = self.size.width, self.visual_style, self._blocks[number]
        if row < 0:
            return gap_row(self._blocks[number - 1], block, width, y, style, self._get_style)
        return block.rows(width, y - row, style, self._get_style)[row]

    def _place(self, y: int) -> tuple[int, int] | None:
        """Return the index of the block at row `y`, and the row within the block.

        The row is -1 for the blank row above a block. Returns None below the last block.
        """
        width = self.size.width
        bottoms = self._bottoms_at(width)
        number = bisect_right(bottoms, y)
        if number == len(bottoms):
            return None
        return number, y - bottoms[number] + self._blocks[number].height(width)

    def _bottoms_at(self, width: int) -> list[int]:
        """Return the index of the row below each block when the text is `width` cells wide."""
        if self._bottoms[0] != width:
            heights = (
                block.height(width) + (block.gap and number > 0) for number, block in enumerate(self._blocks)
            )
            self._bottoms = width, list(accumulate(heights))
        return self._bottoms[1]

    def on_mouse_move(self, event: events.MouseMove) -> None:
        self._point_at(self._place(event.y))

    def on_leave(self) -> None:
        self._point_at(None)

    def _point_at(self, place: tuple[int, int] | None) -> None:
        """Show the copy button of the code block at this position, and hide any other."""
        block = None if place is None else self._blocks[place[0]]
        pointed = block if isinstance(block, CodeBlock) else None
        if pointed is not self._pointed:
            self._pointed = pointed
            self.refresh()

    def on_click(self, event: events.Click) -> None:
        """Copy a code block if its copy button is clicked. Select a block if its text is double-clicked."""
        if (place := self._place(event.y)) is None:
            return
        block, row = self._blocks[place[0]], place[1]
        width = self.size.width
        if isinstance(block, CodeBlock) and row == 0 and event.x >= width - len(_COPY_MARK):
            event.stop()
            event.prevent_default()
            self.post_message(self.CopyCode(block.code))
        elif event.chain == 2:
            event.prevent_default()
            top = event.y - row
            end = Offset(width, top + block.height(width) - 1)
            self.screen.selections = {self: Selection(Offset(0, top), end)}

    def action_link(self, address: str) -> None:
        """Open a link in the browser."""
        self.app.open_url(unquote(address))


class OriginColours:
    """The origin of each character of a reply's Markdown text.

    The parser does not report where in the text a word comes from, so each word is located by searching from
    the end of the preceding one. The search takes the first match, so it never skips the right place for a
    later word. A word that also occurs in the markup before it can get the markup's colour.

    Args:
        uncoloured: Number of characters at the start whose origin is unknown.
    """

    def __init__(self, uncoloured: int = 0) -> None:
        # End index and style of each run of text with the same style.
        self._ends, self._styles = [uncoloured], [""]

    def add(self, text: str, *, accepted: bool) -> None:
        """Append text. `accepted` says whether it comes from accepted draft tokens."""
        style = GUESSED_STYLE if accepted else OWN_STYLE
        if self._styles[-1] != style:
            self._ends.append(self._ends[-1])
            self._styles.append(style)
        self._ends[-1] += len(text)

    def colour(self, blocks: Iterable[Block], markdown: str, first: int) -> None:
        """Colour the words in blocks by their origin.

        Args:
            blocks: The blocks to colour.
            markdown: The part of the text from which the blocks were parsed.
            first: The index of the first character of this part.
        """
        place = 0

        def spans(plain: str) -> list[Span]:
            nonlocal place
            found: list[Span] = []
            for word in _WORD.finditer(plain):
                at = markdown.find(word[0], place, place + _MAX_MARKUP + len(word[0]))
                if at >= 0:
                    place = at + len(word[0])
                    self._add_spans(found, word.start(), first + at, len(word[0]))
                    continue
                # The word was not found as a whole, so it contains markup. Search for its letters one by one.
                for index, letter in enumerate(word[0], word.start()):
                    at = markdown.find(letter, place, place + _MAX_INNER_MARKUP)
                    if at >= 0:
                        place = at + 1
                        self._add_spans(found, index, first + at, 1)
            return found

        for block in blocks:
            block.colour(spans)

    def _add_spans(self, spans: list[Span], start: int, at: int, length: int) -> None:
        """Add spans for `length` characters: from `start` in the block, and from index `at` in the text."""
        end = at + length
        while at < end and (part := bisect_right(self._ends, at)) < len(self._ends):
            following = min(end, self._ends[part])
            style, stop = self._styles[part], start + following - at
            if style and spans and spans[-1].style == style:
                # Words with the same origin share a span, including the spaces between them.
                spans[-1] = Span(spans[-1].start, stop, style)
            elif style:
                spans.append(Span(start, stop, style))
            start, at = stop, following
