"""The widget that draws a reply's Markdown: rows, growing text, selecting, copying and links.

The colours by origin preserve the Markdown, follow the words, and end with the chat.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rich.color_triplet import ColorTriplet
from textual._compositor import Compositor, ReflowResult
from textual.app import App, ComposeResult
from textual.color import Color
from textual.geometry import Region, Size
from textual.pilot import Pilot
from textual.selection import SELECT_ALL
from textual.strip import Strip
from textual.widget import Widget

from edgespec import TextChunk
from edgespec.tui.themes import DARK, LIGHT
from edgespec.tui.widgets.markdown_blocks import Table, read_markdown
from edgespec.tui.widgets.reply_markdown import GUESSED_STYLE, OWN_STYLE, OriginColours, ReplyMarkdown
from tests.tui.driving import Driver, driving
from tests.tui.scripted import MARKDOWN, Script, ScriptedRuntime, loading

TEXT = """# Heading

A paragraph with **bold**, *emphasis*, ~~struck~~ and `code`, and a [link](https://example.org/a%20b) in it.

- first item, which is wrapped at a narrow width
  - nested
- last

9. nine
10. ten
    ```py
    def nested():
    \treturn 1
    ```

> quoted text
>
> > twice

| Name | Size of it |
|------|-----------:|
| a    | 1 |
| a longer name with `code` | 22 |

---

```
plain   code, which is wrapped at a narrow width, too
```

Line one\\
line two, 日本語.
"""
SHOWN = """Heading

A paragraph with bold, emphasis, struck and code, and a link in it.

• first item, which is wrapped at a narrow width
▪ nested
• last

  9. nine
 10. ten

def nested():
        return 1

quoted text

twice

┌───────────────────────────┬────────────┐
│ Name                      │ Size of it │
├───────────────────────────┼────────────┤
│ a                         │ 1          │
├───────────────────────────┼────────────┤
│ a longer name with code   │ 22         │
└───────────────────────────┴────────────┘

{rule}

plain   code, which is wrapped at a narrow width, too

Line one
line two, 日本語.""".replace("name with code  ", "name with code").replace("───┬", "─┬")


class MarkdownApp(App[None]):
    """A screen with one text."""

    CSS = "Screen { overflow-y: auto; }"

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.opened: list[str] = []

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return DARK.variables

    def compose(self) -> ComposeResult:
        yield ReplyMarkdown(self.text)

    def on_mount(self) -> None:
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self.theme = DARK.name

    def open_url(self, url: str, *, new_tab: bool = True) -> None:
        self.opened.append(url)


@asynccontextmanager
async def showing(text: str, width: int = 80) -> AsyncIterator[tuple[ReplyMarkdown, Pilot[None]]]:
    app = MarkdownApp(text)
    async with app.run_test(size=(width, 100)) as pilot:
        await pilot.pause()
        yield app.query_one(ReplyMarkdown), pilot


def rows(reply: ReplyMarkdown) -> list[str]:
    return [reply.render_line(y).text for y in range(reply.size.height)]


def copied(reply: ReplyMarkdown) -> str:
    selected = reply.get_selection(SELECT_ALL)
    assert selected is not None
    return selected[0]


@pytest.mark.long
@pytest.mark.parametrize("width", [300, 80, 41])
async def test_copied_text_does_not_depend_on_the_width(width: int) -> None:
    async with showing(TEXT, width) as (reply, _):
        lines = [line for line in copied(reply).split("\n") if "│" not in line and "─" not in line]
        expected = [line for line in SHOWN.split("\n") if "│" not in line and "─" not in line]
        assert lines == [line for line in expected if line != "{rule}"]


@pytest.mark.parametrize("width", [40, 80, 300])
async def test_every_row_fills_the_width(width: int) -> None:
    async with showing(TEXT, width) as (reply, _):
        assert {reply.render_line(y).cell_length for y in range(reply.size.height)} == {reply.size.width}


@pytest.mark.long
@pytest.mark.parametrize("width", [3, 4, 7])
async def test_text_is_drawn_at_every_width(width: int) -> None:
    async with showing(TEXT, width) as (reply, _):
        assert "H" in rows(reply)[0]


async def test_the_table_is_drawn_with_lines_and_wrapped_in_a_narrow_terminal() -> None:
    async with showing(TEXT) as (reply, _):
        table = [row.rstrip() for row in rows(reply) if row[0] in "┌│├└"]
        assert table == [
            "┌─────────────────────────┬────────────┐",
            "│ Name                    │ Size of it │",
            "├─────────────────────────┼────────────┤",
            "│ a                       │ 1          │",
            "├─────────────────────────┼────────────┤",
            "│ a longer name with code │ 22         │",
            "└─────────────────────────┴────────────┘",
        ]
    async with showing(TEXT, 30) as (reply, _):
        table = [row.rstrip() for row in rows(reply) if row[0] in "┌│├└"]
        assert table[5:] == [
            "│ a longer name │ 22         │",
            "│ with code     │            │",
            "└───────────────┴────────────┘",
        ]


@pytest.mark.long
@pytest.mark.parametrize("step", [1, 7, 50])
async def test_a_growing_text_is_drawn_like_the_whole_text(step: int) -> None:
    async with showing(TEXT) as (whole, _):
        expected = rows(whole)
    async with showing("") as (reply, pilot):
        assert not reply.display
        for place in range(0, len(TEXT), step):
            reply.append(TEXT[place : place + step])
        await pilot.pause()
        assert rows(reply) == expected
        reply.replace("Another.")
        await pilot.pause()
        assert copied(reply) == "Another."


async def test_the_mouse_selects_text_across_wrapped_rows() -> None:
    text = "one two three four five\n\n```\n  code  block\n```"
    async with showing(text, 12) as (reply, pilot):
        assert [row.rstrip() for row in rows(reply)] == [
            "one two",
            "three four",
            "five",
            "",
            "   code",
            " block",
        ]
        await pilot.mouse_down(reply, offset=(4, 0))
        await pilot.hover(reply, offset=(4, 4))
        assert pilot.app.screen.get_selected_text() == "two three four five\n\n  co"
        await pilot.mouse_up(reply, offset=(4, 4))
        selected, other = reply.render_line(1), reply.render_line(5)
        assert {segment.style.bgcolor for segment in selected if segment.style} != {
            segment.style.bgcolor for segment in other if segment.style
        }


async def test_two_clicks_select_a_block() -> None:
    async with showing("First.\n\nSecond one,\\\nstill second.\n\nThird.") as (reply, pilot):
        await pilot.click(reply, offset=(2, 3), times=2)
        assert pilot.app.screen.get_selected_text() == "Second one,\nstill second."


async def test_a_click_opens_a_link() -> None:
    async with showing("See [this page](https://example.org/a%20b).") as (reply, pilot):
        await pilot.click(reply, offset=(6, 0))
        assert isinstance(pilot.app, MarkdownApp)
        assert pilot.app.opened == ["https://example.org/a b"]


async def test_code_has_colours_which_change_with_the_theme() -> None:
    async with showing("```py\ndef f(): return 1\n```\n\nText.") as (reply, pilot):
        dark = {str(segment.style) for segment in reply.render_line(0) if segment.style}
        assert len(dark) > 3
        pilot.app.theme = LIGHT.name
        await pilot.pause()
        light = {str(segment.style) for segment in reply.render_line(0) if segment.style}
        assert not dark & light


async def test_html_is_shown_as_text() -> None:
    async with showing("Use <name> and <b>bold</b>.") as (reply, _):
        assert copied(reply) == "Use <name> and <b>bold</b>."


@pytest.mark.long
@pytest.mark.parametrize("step", [1, 7])
async def test_a_growing_text_leaves_no_outdated_rows(step: int) -> None:
    async with showing("", 41) as (reply, pilot):
        for start in range(0, len(TEXT), step):
            reply.append(TEXT[start : start + step])
            await pilot.pause(0)
            shown = reply.render_lines(Region.from_offset((0, 0), reply.size))
            assert [*shown] == [reply.render_line(y) for y in range(reply.size.height)]


async def test_only_the_rows_that_change_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with showing("One paragraph.\n\nThe start of a long second one " * 2, 41) as (reply, pilot):
        drawn: list[int] = []
        draw = ReplyMarkdown.render_line

        def noted(self: ReplyMarkdown, y: int) -> Strip:
            drawn.append(y)
            return draw(self, y)

        monkeypatch.setattr(ReplyMarkdown, "render_line", noted)
        reply.append(" more")
        await pilot.pause()
        assert drawn == [reply.size.height - 1]


@pytest.mark.long
async def test_a_new_line_is_laid_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts: list[Size] = []
    reflow = Compositor.reflow

    def counted(self: Compositor, parent: Widget, size: Size) -> ReflowResult:
        layouts.append(size)
        return reflow(self, parent, size)

    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        reply = await d.chat.transcript.start_reply()
        for number in range(40):
            await reply.write([TextChunk(f"- line {number}\n", 1, False)])
            await d.pilot.pause()
        monkeypatch.setattr(Compositor, "reflow", counted)
        for number in range(10):
            await reply.write([TextChunk(f"- and {number}\n", 1, False)])
            await d.pilot.pause()
        assert len(layouts) == 10
        assert d.chat.transcript.scroll_y == d.chat.transcript.max_scroll_y
        await d.sees("and 9")


COLOURED_TEXT = """# A big *title*

Use [the manual](https://example.com/a/the/page?of=it) of `ls`, **bo**ld and a\\*b.

- first item
  1. inner item
- second &amp; last

> quoted words

| name | size |
|------|------|
| some | 12 MB |

```sh
ls -lS \\
\tmore
```
The end.
"""


def coloured_words(text: str, first: int = 0) -> list[tuple[str, str]]:
    """Return the coloured letters of each word and their colour, if every second word is a guess."""
    colours = OriginColours(first)
    for number, part in enumerate(re.findall(r"\s*\S+\s*", text[first:])):
        colours.add(part, accepted=number % 2 == 0)
    markdown = read_markdown(text)
    blocks = (*markdown.finished, *markdown.last)
    colours.colour(blocks, text, 0)
    found = []
    for block in blocks:
        contents = [block._styled(80)]
        if isinstance(block, Table):
            contents = [cell for row in block._cells for cell in row]
        for content in contents:
            spans = [span for span in content.spans if span.style in (GUESSED_STYLE, OWN_STYLE)]
            found += [(content.plain[span.start : span.end], str(span.style)) for span in spans]
    return found


def test_the_words_of_all_kinds_of_blocks_have_their_colours() -> None:
    found = coloured_words(COLOURED_TEXT)
    words = "".join("".join(text.split()) for text, _ in found)
    shown = "AbigtitleUsethemanualofls,boldanda*b.firstiteminneritemsecond&lastquotedwords"
    shown += "namesizesome12MBls-lS\\moreTheend."
    assert words == shown
    source = re.findall(r"\S+", COLOURED_TEXT)
    for text, style in found:
        for word in re.findall(r"[A-Za-z]{4,}", text):
            places = [number for number, each in enumerate(source) if word in each]
            expected = {GUESSED_STYLE if number % 2 == 0 else OWN_STYLE for number in places}
            # Markup divides the word "bold" into two parts.
            assert style in expected or word == "bold", word


def test_the_start_of_a_continued_reply_has_no_colour() -> None:
    first = len("A **start** ")
    assert coloured_words("A **start** and the rest", first) == [
        ("and", GUESSED_STYLE), ("the", OWN_STYLE), ("rest", GUESSED_STYLE),
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("while_written", [False, True])
async def test_colours_keep_the_markdown(tmp_path: Path, while_written: bool) -> None:
    runtime = ScriptedRuntime(scripts=[Script(MARKDOWN)])
    async with driving(loading(runtime), tmp_path) as d:
        if while_written:
            await d.press("f4")
        await d.say("How?")
        if not while_written:
            await d.press("f4")
        assert "guessed correctly" in d.transcript()
        shown = "\n".join(d.screen_text())
        assert "• -S sorts by size" in shown, "the list is still a list"
        assert "```" not in shown
        names = d.app.theme_variables
        own = {Color.parse(names[name]).rich_color.triplet for name in ("success", "warning")}
        assert own <= text_colours(d)
        await d.press("f4")
        assert not own <= text_colours(d)


def text_colours(d: Driver) -> set[ColorTriplet | None]:
    """Return the colours of the letters in the reply."""
    markdown = d.chat.transcript.query_one(ReplyMarkdown)
    segments = (segment for y in range(markdown.size.height) for segment in markdown.render_line(y))
    styles = (segment.style for segment in segments if segment.text.strip() and segment.style)
    return {style.color.triplet for style in styles if style.color}


@pytest.mark.long
async def test_colours_end_with_the_chat(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.say("one")
        await d.press("f4")
        await d.say("two")
        assert d.transcript().count("guessed correctly") == 2
        await d.say("/new")
        await d.say("three")
        assert "guessed correctly" not in d.transcript()
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.say("four")
        assert "guessed correctly" not in d.transcript()
