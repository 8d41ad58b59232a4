"""Read Markdown and return its blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain, pairwise
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode
from textual.content import Content
from textual.highlight import highlight
from textual.style import Style

from edgespec.tui.widgets.markdown_blocks import Block, CodeBlock, Margin, Rule, Table

__all__ = ["Markdown", "load_parsers", "read_markdown"]

_BULLETS = ("• ", "▪ ", "‣ ", "⭑ ", "◦ ")
_INLINE_STYLES = {"strong": "bold", "em": "italic", "s": "strike"}
_NEWLINE = re.compile(r"\r\n?|\n")
_SPACE = re.compile(r"\s+")


class Markdown(NamedTuple):
    """A parsed Markdown text.

    Attributes:
        finished: The blocks that do not change when the text grows.
        last: The blocks of the last part, such as a paragraph or a list.
        last_text: The text of the last part.
    """

    finished: list[Block]
    last: list[Block]
    last_text: str


def read_markdown(text: str) -> Markdown:
    """Return the blocks of a Markdown text."""
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
    """Load the parsers of Markdown and Python code, which takes about 80 ms, before a reply needs them."""
    read_markdown("https://example.com")
    highlight("pass", language="python")


@cache
def _parser() -> MarkdownIt:
    """Return a parser that shows HTML as text, because models often write tags such as `<name>`."""
    return MarkdownIt("gfm-like", {"html": False})


def _blocks(node: SyntaxTreeNode, margins: Sequence[Margin], begins: int, *, gap: bool) -> Iterator[Block]:
    """Yield the blocks of a node. The parameters are those of `Block`."""
    match node.type:
        case "bullet_list" | "ordered_list":
            bullets = _bullets(node, margins)
            for place, (item, bullet) in enumerate(zip(node.children, bullets, strict=True)):
                margin = Margin(bullet, " " * len(bullet))
                yield from _inner_blocks(
                    item, (*margins, margin), begins, gap=gap and not place, inner_gap=False
                )
                begins = 0
        case "blockquote":
            yield from _inner_blocks(
                node, (*margins, Margin("▌ ", "▌ ", "$muted")), begins, gap=True, inner_gap=True
            )
        case "fence" | "code_block":
            yield CodeBlock(node.content, node.info.partition(" ")[0], margins, begins)
        case "table":
            rows = [row.children for row in node.walk() if row.type == "tr"]
            yield Table([[_cell(cell) for cell in row] for row in rows], margins, begins)
        case "hr":
            yield Rule(Content(), margins, begins)
        case _:
            content = Content.assemble(*map(_inline, node.children))
            if node.type == "heading":
                content = content.stylize("bold")
            yield Block(content, margins, begins, gap=gap)


def _inner_blocks(
    node: SyntaxTreeNode, margins: Sequence[Margin], begins: int, *, gap: bool, inner_gap: bool
) -> Iterator[Block]:
    """Yield the blocks of a list item or a quote. The last of `margins` begins with the first block."""
    if not node.children:
        yield Block(Content(), margins, begins + 1, gap=gap)
    for place, child in enumerate(node.children):
        first = not place
        yield from _blocks(child, margins, begins + 1 if first else 0, gap=gap if first else inner_gap)


def _bullets(node: SyntaxTreeNode, margins: Sequence[Margin]) -> list[str]:
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
    """Return the text of a node inside a block."""
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
    """Return a style with which a click opens the link."""
    return Style(underline=True) + Style.from_meta({"@click": f"link({address!r})"})
