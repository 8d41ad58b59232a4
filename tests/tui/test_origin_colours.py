"""The colours by origin preserve the Markdown, follow the words, and end with the chat."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.color_triplet import ColorTriplet
from textual.color import Color

from edgespec.tui.widgets.markdown_blocks import Table, read_markdown
from edgespec.tui.widgets.reply_markdown import GUESSED_STYLE, OWN_STYLE, OriginColours, ReplyMarkdown
from tests.tui.driving import Driver, driving
from tests.tui.scripted import MARKDOWN, Script, ScriptedRuntime, loading

TEXT = """# A big *title*

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
    found = coloured_words(TEXT)
    words = "".join("".join(text.split()) for text, _ in found)
    shown = "AbigtitleUsethemanualofls,boldanda*b.firstiteminneritemsecond&lastquotedwords"
    shown += "namesizesome12MBls-lS\\moreTheend."
    assert words == shown
    source = re.findall(r"\S+", TEXT)
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
