"""The scrolling view of the conversation. It follows the running reply until the user scrolls away."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from edgespec.tui.numbers import count
from edgespec.tui.open_chat import ChatEntry
from edgespec.tui.widgets.long_texts import drawing_seconds
from edgespec.tui.widgets.messages import Panel, ReplyMessage, UserMessage
from edgespec.tui.widgets.tool_call import ToolCallMessage

__all__ = ["Transcript"]

# Number of messages shown when a chat is opened, and added each time the user asks for older ones.
_PAGE_MESSAGES = 40
# Maximum time in seconds for drawing the messages that are shown at once.
_PAGE_SECONDS = 10.0
# Maximum number of messages shown as widgets. Hundreds of Markdown widgets slow the screen down.
_MAX_MESSAGES = 120
_MESSAGES = (UserMessage, ReplyMessage, ToolCallMessage)


class Transcript(VerticalScroll):
    """Scrolling list of messages, notes and panels, with the newest at the bottom."""

    def __init__(self, welcome: Widget, *, id: str) -> None:  # noqa: A002 - textual's own name
        super().__init__(id=id)
        self._column = Vertical(welcome, _earlier(), id="messages")
        self._entries: Sequence[ChatEntry] = ()
        self._first = 0
        self._dropped = 0
        self._origin = False

    def compose(self) -> ComposeResult:
        yield self._column

    def on_mount(self) -> None:
        self.anchor()

    async def show_chat(self, entries: Sequence[ChatEntry], *, welcome: Widget) -> None:
        """Replace the shown messages with those of another chat."""
        self._entries = entries
        self._first = self._page_start(len(entries))
        self._dropped = 0
        with self.app.batch_update():
            await self._column.remove_children()
            await self._column.mount(welcome, _earlier())
            await self._column.mount_all([self._widget(entry) for entry in entries[self._first :]])
        self._refresh_earlier()
        self.anchor()

    async def show_earlier(self) -> None:
        """Show up to 40 more of the older messages."""
        start = self._page_start(self._first)
        widgets = [self._widget(entry) for entry in self._entries[start : self._first]]
        self._first = start
        if widgets:
            await self._column.mount_all(widgets, after=self.query_one(".earlier"))
        self._refresh_earlier()
        self.set_dropped(self._dropped)

    async def add(self, widget: Widget) -> None:
        """Append a message, note or panel and scroll to it."""
        await self._column.mount(widget)
        self.anchor()

    async def show_panel(self, panel: Panel) -> None:
        """Append a panel and scroll to it. If it is taller than the view, show its first lines."""
        await self.add(panel)
        self.call_after_refresh(self._show_top, panel)

    def _show_top(self, panel: Panel) -> None:
        if panel.outer_size.height > self.scrollable_content_region.height:
            self.release_anchor()
            self.scroll_relative(y=panel.region.y - self.region.y, animate=False)

    async def start_reply(self, *, resume: bool = False) -> ReplyMessage:
        """Return a reply widget that is ready for text: a new one, or the last one if `resume` is True."""
        last = self._messages[-1] if resume else None
        if isinstance(last, ReplyMessage):
            reply = last
            self.anchor()
        else:
            reply = ReplyMessage(origin=self._origin)
            await self.add(reply)
        reply.begin()
        return reply

    async def note(self, text: str) -> None:
        """Append a note from edgespec, such as the result of a command."""
        await self.add(Static(Content(text), classes="note"))

    async def remove_notes(self) -> None:
        """Remove all notes and panels, which are outdated once the next message is sent."""
        await self.query(".note, Panel").remove()

    async def keep(self, number: int) -> None:
        """Remove all but the first `number` messages of the chat, because others will replace them."""
        await self._column.remove_children(self._messages[max(0, number - self._first) :])

    async def prune(self) -> None:
        """Remove the oldest message widgets if there are too many."""
        messages = self._messages
        surplus = len(messages) - _PAGE_MESSAGES if len(messages) > _MAX_MESSAGES else 0
        await self._column.remove_children(messages[:surplus])
        self._first += surplus
        self._refresh_earlier()

    def set_origin(self, origin: bool) -> None:
        """Show replies with tokens coloured by origin, or as Markdown if `origin` is False."""
        self._origin = origin
        for reply in self.query(ReplyMessage):
            reply.show_origin(origin)

    def toggle_thoughts(self) -> bool:
        """Expand or collapse the last reasoning shown. Return False if there is none."""
        replies = [reply for reply in self._messages if isinstance(reply, ReplyMessage) and reply.reasoning]
        if replies:
            replies[-1].thoughts.collapsed = not replies[-1].thoughts.collapsed
        return bool(replies)

    def set_dropped(self, dropped: int) -> None:
        """Show a line below the first `dropped` messages, which no longer fit in the context."""
        self._dropped = dropped
        self.query(".unseen").remove()
        place = dropped - self._first
        messages = self._messages
        if dropped and 0 <= place < len(messages):
            text = f"The context is full: the model no longer sees the {count(dropped, 'message')} above"
            self._column.mount(Static(Content(text), classes="unseen"), before=messages[place])

    @property
    def _messages(self) -> list[Widget]:
        return [child for child in self._column.children if isinstance(child, _MESSAGES)]

    def _page_start(self, end: int) -> int:
        """Return the index of the first message on the page that ends before message `end`."""
        start, seconds = end, 0.0
        while start > max(0, end - _PAGE_MESSAGES):
            seconds += drawing_seconds(self._entries[start - 1].content)
            if seconds > _PAGE_SECONDS and start < end:
                break
            start -= 1
        return start

    def _widget(self, entry: ChatEntry) -> Widget:
        if entry.role == "user":
            return UserMessage(entry.content, entry.message.files)
        if entry.role == "tool":
            calls = (call for each in self._entries for call in each.message.tool_calls)
            call = next((call for call in calls if call.id == entry.message.tool_call_id), None)
            return ToolCallMessage(call, entry.content)
        if entry.role == "system":
            return Panel("System", entry.content)
        return ReplyMessage(
            entry.content,
            reasoning=entry.reasoning,
            thought_seconds=entry.thought_seconds,
            chunks=entry.chunks,
            reply=entry.reply,
            calls_tools=bool(entry.message.tool_calls),
            origin=self._origin,
        )

    def _refresh_earlier(self) -> None:
        for earlier in self.query(".earlier").results(Static):
            earlier.display = self._first > 0
            older = count(self._first, "older message")
            earlier.update(f"[@click=screen.show_earlier]↑ {older}: click, or press Ctrl+Home[/]")


def _earlier() -> Static:
    earlier = Static(classes="earlier")
    earlier.display = False
    return earlier
