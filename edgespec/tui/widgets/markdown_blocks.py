"""Parse Markdown into blocks, such as paragraphs and code blocks, which are drawn at a given width."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, pairwise
from typing import NamedTuple, TypeAlias

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode
from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style as RichStyle
from textual.content import Content, Span
from textual.highlight import highlight
from textual.strip import Strip
from textual.style import Style

_GetStyle: TypeAlias = Callable[[str | Style], Style]
_TAB_CELLS = 8
_LINE_STYLE = "$foreground 20%"
# Screen cells that each table cell needs besides its text: a space on each side and a border line.
_CELL_FRAME = 3
_BULLETS = ("• ", "▪ ", "‣ ", "⭑ ", "◦ ")
_INLINE_STYLES = {"strong": "bold", "em": "italic", "s": "strike"}
_NEWLINE = re.compile(r"\r\n?|\n")
_SPACE = re.compile(r"\s+")


class Markdown(NamedTuple):
    """Parsed Markdown text.

    Attributes:
        finished: The blocks that do not change when the text grows.
        last: The blocks of the last part, such as a paragraph or a list.
        last_text: The text of the last part.
    """

    finished: list[Block]
    last: list[Block]
    last_text: str


def read_markdown(text: str) -> Markdown:
    """Parse Markdown text into blocks."""
    parts = SyntaxTreeNode(_parser().parse(text)).children
    blocks = [list(_blocks(part, (), 0, gap=True)) for part in parts]
    for above, below in pairwise(chain.from_iterable(blocks)):
        below.gap = below.gap or isinstance(above, CodeBlock | Table)
    if not parts:
        return Markdown([], [], text)
    first_line = parts[-1].map[0] if parts[-1].map else 0
    last_text = "\n".join(_NEWLINE.split(text)[first_line:])
    return Markdown(list(chain.from_iterable(blocks[:-1])), blocks[-1], last_text)


def load_parsers() -> None:
    """Load the Markdown and Python parsers before a reply needs them, which takes about 80 ms."""
    read_markdown("https://example.com")
    highlight("pass", language="python")


@cache
def _parser() -> MarkdownIt:
    """Return a parser that shows HTML as text, because models often write tags such as `<name>`."""
    return MarkdownIt("gfm-like", {"html": False})


def _blocks(node: SyntaxTreeNode, margins: Sequence[_Margin], begins: int, *, gap: bool) -> Iterator[Block]:
    """Yield the blocks of a node. See `Block` for the other parameters."""
    match node.type:
        case "bullet_list" | "ordered_list":
            bullets = _bullets(node, margins)
            for place, (item, bullet) in enumerate(zip(node.children, bullets, strict=True)):
                margin = _Margin(bullet, " " * len(bullet))
                yield from _inner_blocks(
                    item, (*margins, margin), begins, gap=gap and not place, inner_gap=False
                )
                begins = 0
        case "blockquote":
            yield from _inner_blocks(
                node, (*margins, _Margin("▌ ", "▌ ", "$muted")), begins, gap=True, inner_gap=True
            )
        case "fence" | "code_block":
            yield CodeBlock(node.content, node.info.partition(" ")[0], margins, begins)
        case "table":
            rows = [row.children for row in node.walk() if row.type == "tr"]
            yield Table([[_cell(cell) for cell in row] for row in rows], margins, begins)
        case "hr":
            yield _Rule(Content(), margins, begins)
        case _:
            content = Content.assemble(*map(_inline, node.children))
            if node.type == "heading":
                content = content.stylize("bold")
            yield Block(content, margins, begins, gap=gap)


def _inner_blocks(
    node: SyntaxTreeNode, margins: Sequence[_Margin], begins: int, *, gap: bool, inner_gap: bool
) -> Iterator[Block]:
    """Yield the blocks of a list item or a quote. The last of `margins` begins with the first block."""
    if not node.children:
        yield Block(Content(), margins, begins + 1, gap=gap)
    for place, child in enumerate(node.children):
        first = not place
        yield from _blocks(child, margins, begins + 1 if first else 0, gap=gap if first else inner_gap)


def _bullets(node: SyntaxTreeNode, margins: Sequence[_Margin]) -> list[str]:
    """Return the bullets or numbers of a list."""
    if node.type == "bullet_list":
        depth = sum(margin.first in _BULLETS for margin in margins)
        return [_BULLETS[depth % len(_BULLETS)]] * len(node.children)
    first = int(node.children[0].info)
    numbers = [f" {number}. " for number in range(first, first + len(node.children))]
    return [number.rjust(len(numbers[-1])) for number in numbers]


def _cell(node: SyntaxTreeNode) -> Content:
    content = Content.assemble(*map(_inline, node.children))
    return content.stylize("$primary") if node.type == "th" else content


def _inline(node: SyntaxTreeNode) -> Content:
    """Return the styled text of an inline node."""
    match node.type:
        case "softbreak":
            return Content(" ")
        case "hardbreak":
            return Content("\n")
        case "code_inline":
            return Content.styled(node.content, "$primary on $code")
        case "image":
            return Content.assemble("🖼  ", *map(_inline, node.children)).stylize(_link(node.attrs["src"]))
        case "link":
            return Content.assemble(*map(_inline, node.children)).stylize(_link(node.attrs["href"]))
        case "strong" | "em" | "s":
            return Content.assemble(*map(_inline, node.children)).stylize(_INLINE_STYLES[node.type])
        case "inline":
            return Content.assemble(*map(_inline, node.children))
        case _:
            return Content(_SPACE.sub(" ", node.content))


def _link(address: object) -> Style:
    """Return a style that makes a click open the link."""
    return Style(underline=True) + Style.from_meta({"@click": f"link({address!r})"})


class Row(NamedTuple):
    """A row of a block: how it is drawn, and which part of it is copied.

    Attributes:
        strip: The row as it is drawn, with the offsets that Textual needs for text selection.
        start: Index of the first character that is copied. Padding and the indent of wrapped lines are not
            copied.
        end: Index after the last character that is copied.
        before: Text between the previous row and this one when both are copied: a line break, or the
            whitespace at which a line was wrapped.
    """

    strip: Strip
    start: int
    end: int
    before: str


@dataclass(frozen=True, eq=False, slots=True)
class _Margin:
    """The bullet, number or bar to the left of a list item or a quote.

    Attributes:
        first: Text before the first row, such as a bullet.
        rest: Text of the same width before all other rows.
        style: Style of both texts.
    """

    first: str
    rest: str
    style: str = "$primary"


class Block:
    """A block of Markdown text that contains no other blocks, such as a paragraph.

    Args:
        content: The text.
        margins: The margins of the surrounding list items and quotes, outermost first.
        begins: Number of innermost margins that begin with this block.
        gap: Whether there is a blank row above this block.
    """

    # Style of the whole block, or empty to use the reply's style.
    style = ""
    # Blank cells to the left and the right of the text.
    padding = 0

    def __init__(
        self, content: Content, margins: Sequence[_Margin] = (), begins: int = 0, *, gap: bool = True
    ) -> None:
        self.margins = tuple(margins)
        self.gap = gap
        self._content = content
        self._begins = begins
        self._ranges: tuple[int, list[tuple[int, int]]] = (0, [])
        self._rows: tuple[tuple[int, int, Style] | None, list[Row]] = (None, [])

    def colour(self, spans: Callable[[str], Sequence[Span]]) -> None:
        """Add colours before the block is drawn.

        Args:
            spans: Returns the colour spans for a piece of text. Called for each piece of the block, in order.
        """
        self._content = self._content.add_spans(spans(self._content.plain))

    def height(self, width: int) -> int:
        """Return the number of rows at this width. Faster than `rows`, because it ignores the styles."""
        indent = sum(len(margin.rest) for margin in self.margins)
        text_width = max(1, width - indent - 2 * self.padding)
        if self._ranges[0] != text_width:
            self._ranges = text_width, list(_wrapped(self._plain(text_width), text_width))
        return len(self._ranges[1])

    def rows(self, width: int, top: int, style: Style, get_style: _GetStyle) -> list[Row]:
        """Return the rows at this width.

        Args:
            width: Width in cells.
            top: Index of the first row among the rows of the reply.
            style: Style of the reply.
            get_style: Returns the style with a name such as `bold $primary` in the current theme.
        """
        if self._rows[0] != (width, top, style):
            self._rows = (width, top, style), self._draw(width, top, style, get_style)
        return self._rows[1]

    @property
    def drawn_rows(self) -> list[Row]:
        """The most recently drawn rows, or an empty list if the block has not been drawn."""
        return self._rows[1]

    def forget_rows(self) -> None:
        """Discard the drawn rows, for example after a theme change. They are redrawn when needed."""
        self._rows = (None, [])

    def _plain(self, width: int) -> str:
        """Return the unstyled text before it is wrapped to `width`."""
        return self._styled(width).plain

    def _styled(self, width: int) -> Content:  # noqa: ARG002
        """Return the styled text before it is wrapped to `width`."""
        return self._content

    def _draw(self, width: int, top: int, style: Style, get_style: _GetStyle) -> list[Row]:
        self.height(width)
        text_width, ranges = self._ranges
        content = self._styled(text_width)
        fill = style + get_style(self.style)
        rich_fill = fill.rich_style
        margin_styles = [(style + get_style(margin.style)).rich_style for margin in self.margins]
        indents = [margin.rest for margin in self.margins]
        old = len(indents) - self._begins
        firsts = [*indents[:old], *(margin.first for margin in self.margins[old:])]
        indent = sum(map(len, indents)) + self.padding
        # Bullets are part of copied text, so if the first row has one, start copying there.
        bullet = next((n for n, text in enumerate(firsts) if text != indents[n]), None)
        first_copied = indent if bullet is None else sum(map(len, indents[:bullet]))
        pad = " " * self.padding
        # Keep every second part, which is a row. The other parts are the whitespace between rows.
        parts = content.divide([index for each in ranges for index in each])[1::2]
        rows: list[Row] = []
        previous = 0
        for (start, end), part in zip(ranges, parts, strict=True):
            pieces = list(zip(indents if rows else firsts, margin_styles, strict=True))
            pieces.append((pad, rich_fill))
            for text, text_style in part.render(fill, end="", parse_style=get_style):
                pieces.append((text, text_style.rich_style))
            pieces.append((" " * (width - indent - part.cell_length), rich_fill))
            rows.append(
                Row(
                    _strip(pieces, top + len(rows)),
                    indent if rows else first_copied,
                    indent + end - start,
                    content.plain[previous:start] if rows else "\n",
                )
            )
            previous = end
        return rows


class CodeBlock(Block):
    """A code block, with colours for its language."""

    style = "$foreground on $code"
    padding = 1

    def __init__(self, code: str, language: str, margins: Sequence[_Margin] = (), begins: int = 0) -> None:
        # Replace tabs and rare line separators here, because the highlighter would replace them without
        # adjusting the positions of its colours.
        lines = code.rstrip().expandtabs(_TAB_CELLS).splitlines()
        super().__init__(Content("\n".join(lines)), margins, begins)
        self.code = code
        self._language = language
        self._colours: Sequence[Span] = ()

    def colour(self, spans: Callable[[str], Sequence[Span]]) -> None:
        self._colours = spans(self._content.plain)

    def _plain(self, width: int) -> str:  # noqa: ARG002
        return self._content.plain

    def _styled(self, width: int) -> Content:  # noqa: ARG002
        return self._highlighted.add_spans(self._colours) if self._colours else self._highlighted

    @cached_property
    def _highlighted(self) -> Content:
        # Without a language, `highlight` would guess it, which loads hundreds of modules.
        return highlight(self._content.plain, language=self._language or "text")


class _Rule(Block):
    """A horizontal rule."""

    def _styled(self, width: int) -> Content:
        return Content.styled("─" * width, "$secondary")


class Table(Block):
    """A table. Text that does not fit into its column is wrapped.

    Args:
        rows: The cells of each row. The first row is the header.
        margins: See `Block`.
        begins: See `Block`.
    """

    def __init__(self, rows: Sequence[Sequence[Content]], margins: Sequence[_Margin], begins: int) -> None:
        super().__init__(Content(), margins, begins)
        self._cells = rows
        self._drawn: tuple[int, Content] = (0, Content())

    def colour(self, spans: Callable[[str], Sequence[Span]]) -> None:
        self._cells = [[cell.add_spans(spans(cell.plain)) for cell in row] for row in self._cells]

    def _styled(self, width: int) -> Content:
        if self._drawn[0] != width:
            # In a very narrow terminal, the right end of the table is cut off.
            self._drawn = width, Content("\n").join(line.truncate(width) for line in self._lines(width))
        return self._drawn[1]

    def _lines(self, width: int) -> Iterator[Content]:
        widths = self._column_widths(width)
        vertical = Content.styled("│", _LINE_STYLE)

        def horizontal(left: str, middle: str, right: str) -> Content:
            text = middle.join("─" * (each + 2) for each in widths)
            return Content.styled(f"{left}{text}{right}", _LINE_STYLE)

        for number, row in enumerate(self._cells):
            yield horizontal("├", "┼", "┤") if number else horizontal("┌", "┬", "┐")
            wrapped = [cell.wrap(each) for cell, each in zip(row, widths, strict=True)]
            for line in range(max(map(len, wrapped))):
                parts: list[Content] = [vertical]
                for cell, each in zip(wrapped, widths, strict=True):
                    text = cell[line] if line < len(cell) else Content()
                    parts += [text.pad(1, each - text.cell_length + 1), vertical]
                yield Content("").join(parts)
        yield horizontal("└", "┴", "┘")

    def _column_widths(self, width: int) -> list[int]:
        """Return the column widths, narrowing the widest columns until the table fits."""
        widths = [max(cell.cell_length for cell in column) for column in zip(*self._cells, strict=True)]
        left = max(len(widths), width - _CELL_FRAME * len(widths) - 1)
        # Narrow columns keep their width, and the other columns share the remaining width.
        for place, number in zip(
            sorted(range(len(widths)), key=widths.__getitem__), range(len(widths), 0, -1), strict=True
        ):
            widths[place] = max(1, min(widths[place], left // number))
            left -= widths[place]
        return widths


def gap_row(above: Block, below: Block, width: int, y: int, style: Style, get_style: _GetStyle) -> Row:
    """Return the blank row `y` between two blocks. It shows the bars of quotes that surround both."""
    shared = [each for each, other in zip(above.margins, below.margins, strict=False) if each is other]
    pieces = [(each.rest, (style + get_style(each.style)).rich_style) for each in shared]
    end = sum(len(each.rest) for each in shared)
    return Row(_strip([*pieces, (" " * (width - end), style.rich_style)], y), end, end, "\n")


def _strip(pieces: Iterable[tuple[str, RichStyle]], y: int) -> Strip:
    """Return the pieces as row `y` of the reply, with the offsets that Textual needs for text selection."""
    x, segments = 0, []
    for text, style in pieces:
        if text:
            segments.append(Segment(text, style + RichStyle(meta={"offset": (x, y)})))
            x += len(text)
    return Strip(segments)


def _wrapped(text: str, width: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each row of `text` when it is wrapped to `width` cells."""
    place = 0
    for line in text.split("\n"):
        end = place + len(line)
        if cell_len(line) <= width:
            yield place, end
        else:
            for row in Content(line).wrap(width):
                # Search for the row, because Textual has removed the whitespace between rows.
                start = text.find(row.plain, place, end)
                place = start + len(row.plain)
                yield start, place
        place = end + 1
