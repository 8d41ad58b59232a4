"""What stands in the transcript: a person's message, a reply, a note, a panel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from markdown_it import MarkdownIt
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Markdown, Static
from textual.widgets.markdown import MarkdownStream

from edgespec.tui.numbers import count, percent
from edgespec.tui.widgets.pairs import Pairs

if TYPE_CHECKING:
    from edgespec import Reply, TextChunk

__all__ = ["Note", "Panel", "ReplyMessage", "UserMessage", "Welcome", "markdown_parser", "origin_content"]


def markdown_parser() -> MarkdownIt:
    """Markdown in which `<angle brackets>` are text: a model writes them far more often than HTML."""
    return MarkdownIt("gfm-like", {"html": False})


def origin_content(chunks: Sequence[TextChunk]) -> Content:
    """The text of a reply with every token coloured by who wrote it."""
    parts: list[tuple[str, str]] = []
    for chunk in chunks:
        style = "$accepted" if chunk.accepted else "bold $own"
        if parts and parts[-1][1] == style:
            parts[-1] = (parts[-1][0] + chunk.text, style)
        else:
            parts.append((chunk.text, style))
    return Content.assemble(*parts)


class UserMessage(Static):
    """What the person said, as they typed it."""

    def __init__(self, text: str) -> None:
        super().__init__(Content(text), classes="user")


class Note(Static):
    """One quiet line from the program, such as what it just did."""

    def __init__(self, text: str) -> None:
        super().__init__(Content(text), classes="note")


class Panel(Vertical):
    """A titled box in the transcript: an error, or the answer to /show."""

    def __init__(self, title: str, body: str | Widget, *, kind: str = "info") -> None:
        super().__init__(classes=f"panel -{kind}")
        self._title = title
        self._body = body if isinstance(body, Widget) else Static(Content(body), classes="panel-body")

    def compose(self) -> ComposeResult:
        """A heading and the text."""
        yield Static(Content(self._title), classes="panel-title")
        yield self._body


class Welcome(Vertical):
    """What is running, above the first message."""

    def __init__(self, rows: Sequence[tuple[str, str]], notices: Sequence[str]) -> None:
        super().__init__(classes="welcome")
        self._rows = rows
        self._notices = notices

    def compose(self) -> ComposeResult:
        """The rows, then what should be said about the models."""
        yield Pairs(self._rows)
        for notice in self._notices:
            yield Static(Content(notice), classes="notice")


class ReplyMessage(Widget):
    """A reply: markdown, or its tokens coloured by origin, and one line when it ended early."""

    def __init__(
        self,
        text: str = "",
        *,
        chunks: Sequence[TextChunk] = (),
        reply: Reply | None = None,
        origin: bool = False,
    ) -> None:
        super().__init__(classes="reply")
        self.text = text
        self.chunks: list[TextChunk] = list(chunks)
        self.reply = reply
        self._origin = origin
        self._stream: MarkdownStream | None = None

    def compose(self) -> ComposeResult:
        """The two views of the text, and the line under them."""
        yield Markdown(self.text, parser_factory=markdown_parser, classes="reply-markdown")
        yield Static(classes="reply-origin")
        yield Static(classes="reply-end")

    def on_mount(self) -> None:
        """Show the right view from the start."""
        self._refresh_views()

    @property
    def writing(self) -> bool:
        """True while chunks arrive."""
        return self._stream is not None

    @property
    def coloured(self) -> bool:
        """True while the tokens are shown by origin."""
        return self._origin and bool(self.chunks)

    def begin(self) -> None:
        """Get ready for chunks."""
        self._stream = Markdown.get_stream(self._markdown)
        self._end.update(Content("…"))
        self._end.display = True

    def show_reading(self, fraction: float) -> None:
        """Before the first word: how much of the prompt has been read, where that takes a while."""
        if not self.text and 0 < fraction < 1:
            self._end.update(Content(f"reading the prompt, {percent(fraction)}"))

    async def write(self, chunks: Sequence[TextChunk]) -> None:
        """Add what the model has just said."""
        assert self._stream is not None
        self.chunks.extend(chunks)
        fragment = "".join(chunk.text for chunk in chunks)
        self.text += fragment
        self._end.display = False
        if self.coloured:
            self._refresh_views()
        await self._stream.write(fragment)

    async def finish(self, text: str, reply: Reply | None) -> None:
        """The reply is over; `text` is what the conversation keeps of it."""
        self.reply = reply
        if self._stream is not None:
            await self._stream.stop()
            self._stream = None
        # A table that grew row by row can keep cells of its older shapes.
        if text != self.text or self._markdown.query("MarkdownTable"):
            self.text = text
            await self._markdown.update(text)
        self._refresh_views()

    def show_origin(self, origin: bool) -> None:
        """Switch between markdown and coloured tokens."""
        self._origin = origin
        self._refresh_views()

    @property
    def _markdown(self) -> Markdown:
        return self.query_one(".reply-markdown", Markdown)

    @property
    def _end(self) -> Static:
        return self.query_one(".reply-end", Static)

    def _refresh_views(self) -> None:
        coloured = self.coloured
        view = self.query_one(".reply-origin", Static)
        self._markdown.display = not coloured
        view.display = coloured
        if coloured:
            view.update(origin_content(self.chunks).rstrip())
        if not self.writing:
            line = self._closing_line(coloured)
            self._end.update(line)
            self._end.display = bool(line)

    def _closing_line(self, coloured: bool) -> Content:
        reason = self.reply.finish_reason if self.reply is not None else "stop"
        said = {"cancelled": "stopped", "length": "cut: the longest reply, or the context, was reached"}.get(
            reason, ""
        )
        if not coloured:
            return Content(said)
        drafted = sum(chunk.token_count for chunk in self.chunks if chunk.accepted)
        own = sum(chunk.token_count for chunk in self.chunks if not chunk.accepted)
        return Content.assemble(
            ("■ ", "$accepted"),
            f"{count(drafted)} from the draft   ",
            ("■ ", "$own"),
            f"{count(own)} from the target",
            f"   {said}" if said else "",
        )
