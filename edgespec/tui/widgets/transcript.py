"""The conversation on screen. It follows the reply being written until the person scrolls away."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.message import Message as Event
from textual.widget import Widget
from textual.widgets import Static

from edgespec.tui.numbers import count
from edgespec.tui.open_chat import ChatEntry
from edgespec.tui.widgets.messages import Note, Panel, ReplyMessage, UserMessage

__all__ = ["Transcript"]

# A chat of a whole day has hundreds of messages; only the last ones are widgets.
_PAGE = 40
_MOST = 120


class Transcript(VerticalScroll):
    """Messages, notes and panels, newest at the bottom."""

    class EarlierWanted(Event):
        """The line that stands for earlier messages was clicked."""

    def __init__(self, welcome: Widget, *, id: str) -> None:  # noqa: A002 - textual's own name
        super().__init__(id=id)
        # At least as high as the view, so that a short chat starts at the top.
        self._column = Vertical(welcome, _Earlier(), id="messages")
        self._entries: Sequence[ChatEntry] = ()
        self._first = 0
        self._dropped = 0
        self._origin = False

    def compose(self) -> ComposeResult:
        """One column of messages."""
        yield self._column

    def on_mount(self) -> None:
        """Stay at the end from the start."""
        self.anchor()

    async def show_chat(self, entries: Sequence[ChatEntry], *, welcome: Widget) -> None:
        """Replace everything by this chat."""
        self._entries = entries
        self._first = max(0, len(entries) - _PAGE)
        self._dropped = 0
        with self.app.batch_update():
            await self._column.remove_children()
            await self._column.mount(welcome, _Earlier())
            await self._column.mount_all([self._widget(entry) for entry in entries[self._first :]])
        self._refresh_earlier()
        self.to_end()

    async def show_earlier(self) -> None:
        """Mount one more page of older messages."""
        start = max(0, self._first - _PAGE)
        widgets = [self._widget(entry) for entry in self._entries[start : self._first]]
        self._first = start
        if widgets:
            await self._column.mount_all(widgets, after=self.query_one(_Earlier))
        self._refresh_earlier()
        self.set_dropped(self._dropped)

    async def add(self, widget: Widget) -> None:
        """Add a message, note or panel at the end, and go there."""
        await self._column.mount(widget)
        self.to_end()

    async def start_reply(self) -> ReplyMessage:
        """Add an empty reply, ready for chunks."""
        reply = ReplyMessage(origin=self._origin)
        await self.add(reply)
        reply.begin()
        return reply

    async def note(self, text: str) -> None:
        """Add one quiet line."""
        await self.add(Note(text))

    async def remove_notes(self) -> None:
        """Take away notes and panels: the conversation has gone on."""
        await self.query("Note, Panel").remove()

    async def remove_messages(self, number: int) -> None:
        """Take away the last messages, which are about to be said anew."""
        messages = self._messages
        for widget in messages[len(messages) - number :]:
            await widget.remove()

    async def prune(self) -> None:
        """Unmount the oldest messages when there are very many."""
        messages = self._messages
        surplus = len(messages) - _PAGE if len(messages) > _MOST else 0
        for widget in messages[:surplus]:
            await widget.remove()
        self._first += surplus
        self._refresh_earlier()

    def set_origin(self, origin: bool) -> None:
        """Colour the replies' tokens by origin, or show markdown."""
        self._origin = origin
        for reply in self.query(ReplyMessage):
            reply.show_origin(origin)

    def set_dropped(self, dropped: int) -> None:
        """Draw the line above which the model no longer sees the messages."""
        self._dropped = dropped
        for old in self.query(".unseen"):
            old.remove()
        place = dropped - self._first
        messages = self._messages
        if dropped and 0 <= place < len(messages):
            verb = "message no longer fits" if dropped == 1 else "messages no longer fit"
            seen = "is" if dropped == 1 else "are"
            text = f"{count(dropped)} earlier {verb} the context and {seen} not seen by the model"
            self._column.mount(Static(Content(text), classes="unseen"), before=messages[place])

    def to_end(self) -> None:
        """Go to the end and stay there."""
        self.anchor()

    @property
    def _messages(self) -> list[Widget]:
        return [child for child in self._column.children if isinstance(child, UserMessage | ReplyMessage)]

    def _widget(self, entry: ChatEntry) -> Widget:
        if entry.role == "user":
            return UserMessage(entry.content)
        if entry.role == "system":
            return Panel("System", entry.content)
        return ReplyMessage(entry.content, chunks=entry.chunks, reply=entry.reply, origin=self._origin)

    def _refresh_earlier(self) -> None:
        for earlier in self.query(_Earlier):
            earlier.show(self._first)


class _Earlier(Static):
    """Stands for the messages that are not mounted."""

    def __init__(self) -> None:
        super().__init__(classes="earlier")
        self.display = False

    def show(self, number: int) -> None:
        """Stand for this many messages."""
        self.display = number > 0
        self.update(Content(f"↑ {count(number, 'earlier message')}: click, or Ctrl+Home"))

    def on_click(self) -> None:
        """Ask for them."""
        self.post_message(Transcript.EarlierWanted())
