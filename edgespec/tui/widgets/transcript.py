"""The scrolling view of the conversation. It follows the running reply until the user scrolls away.

Messages are added and removed in pages that fill the view. When the width of the view changes, the text at
its top stays in place.
"""

from __future__ import annotations

import gc
from asyncio import Lock
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, cast

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.geometry import Region, Size, clamp
from textual.reactive import Reactive
from textual.scrollbar import ScrollBar
from textual.widget import Widget
from textual.widgets import Static

from edgespec.chat.saved_chat import MessageTree
from edgespec.tools.tool import ToolResult, Veto
from edgespec.tui.numbers import count
from edgespec.tui.open_chat import ChatEntry, OpenChat, version_label
from edgespec.tui.widgets.long_texts import drawing_seconds
from edgespec.tui.widgets.messages import (
    MessageWidget,
    Panel,
    ReplyMessage,
    SystemMessage,
    ToolCallMessage,
    UserMessage,
    Welcome,
)

if TYPE_CHECKING:
    from textual.layout import DockArrangeResult

# Height in rows of the line that shows how many older messages there are. The user scrolls past this line.
_MORE_ROWS = 2
# Maximum number of notes and panels. Older ones are removed, and the next message removes them all.
_MAX_NOTES = 5
# Number of messages to add when the selection moves past the messages on screen.
_SELECTED_MESSAGES = 2
# Number of pages shown as widgets: one in view, one above it and one below it. With more widgets, each layout
# change takes longer.
_MAX_PAGES = 3
# Maximum number of messages to add at a time. Adding a message takes several milliseconds.
_PAGE_MESSAGES = 40
# Maximum time in seconds to draw the messages that are added at a time.
_PAGE_SECONDS = 1.0
# Rows that a message takes up besides its text: the space above it and its padding. A low value was chosen
# because a page with too many messages is better than one that does not fill the view.
_OTHER_ROWS = 1
# Seconds between the removal of messages from the screen and a garbage collection. Widgets refer to each
# other, so only the garbage collector frees them. Collecting immediately, while the user scrolls, would delay
# key presses.
_COLLECTION_SECONDS = 2.0


class _Column(Vertical):
    """The messages, notes and panels."""

    # See `Transcript.BLANK`.
    BLANK = True
    # See `Transcript.virtual_size`.
    virtual_size: Reactive[Size] = Reactive(Size(0, 0), repaint=False)


class Transcript(VerticalScroll):
    """Scrolling list of messages, notes and panels, with the newest at the bottom.

    Attributes:
        origin: Whether replies are coloured by the origin of their tokens. False in a chat that was just
            opened.
    """

    # Draw only the background. Without this, Textual draws borders and padding row by row below the messages.
    BLANK = True
    # Without this, Textual would lay out and draw all messages a second time after each new line, although
    # the first layout has already moved the scrollbar and the messages.
    virtual_size: Reactive[Size] = Reactive(Size(0, 0), repaint=False)

    # Active only after the user has deleted all messages, see `ChatScreen.check_action`.
    BINDINGS: ClassVar[list[BindingType]] = [Binding("u", "screen.undo", show=False)]

    def __init__(self, chat: OpenChat, welcome: Widget, *, id: str) -> None:  # noqa: A002 - textual's own name
        super().__init__(id=id)
        self._earlier, self._later = _more("earlier"), _more("later")
        self._column = _Column(welcome, self._earlier, self._later, id="messages")
        self._chat = chat
        # Messages `_first` (inclusive) to `_end` (exclusive) of the current branch are shown as widgets.
        self._first = self._end = 0
        self._dropped = 0
        self._extending = Lock()
        # The message to hold in place while added messages are laid out, and its screen row.
        self._held: tuple[MessageWidget, int] | None = None
        self.origin = False
        # Width of the view in the last layout, and the text at the top of the view.
        self._width = 0
        self._position = _TextPosition()

    def compose(self) -> ComposeResult:
        yield self._column

    def on_mount(self) -> None:
        self.anchor()
        self._collection = self.set_interval(_COLLECTION_SECONDS, self._collect_garbage, pause=True)

    def _collect_garbage(self) -> None:
        self._collection.pause()
        gc.collect()

    async def show_chat(self, chat: OpenChat, *, welcome: Widget) -> None:
        """Replace the shown messages with those of another chat."""
        self.origin = self.origin and chat is self._chat
        self._chat = chat
        self._dropped = 0
        with self.app.batch_update():
            kept = (self._earlier, self._later)
            await self._column.remove_children([each for each in self._column.children if each not in kept])
            await self._column.mount(welcome, before=self._earlier)
            await self._show_last_page()

    async def show_from(self, index: int) -> None:
        """Redraw the chat from its `index`-th message after messages have changed."""
        self.release_anchor()
        with self.app.batch_update():
            await self.keep(index)
            await self.show_later()
        self.call_after_refresh(self._show_around, index)

    def _show_around(self, index: int, tries: int = 10) -> None:
        """Scroll to the `index`-th message, and show its neighbours if they fit."""
        places = (index + 1, index, index - 1)
        messages = [each for each in map(self.message_at, places) if each is not None and each.display]
        if tries and not all(each.size for each in messages):
            # New messages have not been laid out yet, so try again after the next refresh.
            self.call_after_refresh(self._show_around, index, tries - 1)
            return
        for each in messages:
            self.scroll_to_widget(each, animate=False, immediate=True)

    async def show_earlier(self, most: int = _PAGE_MESSAGES) -> None:
        """Show up to `most` older messages, at most a page. Remove newer widgets if there are too many."""
        start = self._page(self._first, -1, most)
        if start == self._first:
            return
        self.release_anchor()
        widgets = self._widgets(start, self._first)
        held = self.message_at(self._first)
        row = 0 if held is None else held.region.y
        self._first = start
        # Without the batch, the screen would be laid out again after each widget.
        with self.app.batch_update():
            await self._column.mount_all(widgets, after=self._earlier)
            end = min(self._end, self._pages(start, 1))
            await self._remove(self._messages[end - start :])
            self._end = end
            self._refresh_more()
        self._hold(held, row)

    async def show_later(self, most: int = _PAGE_MESSAGES) -> None:
        """Show up to `most` newer messages, at most a page. Remove older widgets if there are too many."""
        held = self.message_at(self._end - 1)
        row = 0 if held is None else held.region.y
        end = self._page(self._end, 1, most)
        widgets = self._widgets(self._end, end)
        self._end = end
        with self.app.batch_update():
            await self._column.mount_all(widgets, before=self._later)
            await self.prune()
        self._hold(held, row)

    async def _show_last_page(self) -> None:
        """Show only the newest messages."""
        await self._remove(self._messages)
        self._end = len(self._chat.tree.path)
        self._first = self._page(self._end, -1)
        widgets = self._widgets(self._first, self._end)
        await self._column.mount_all(widgets, after=self._earlier)
        self._refresh_more()
        self.anchor()

    async def show_end(self) -> None:
        """Scroll to the newest messages."""
        if self._later.display:
            await self._show_last_page()
        self.anchor()

    async def page(self, pages: int) -> None:
        """Scroll by `pages` pages, up if negative, adding messages as needed."""
        await self._extend(pages)
        rows = pages * self.scrollable_content_region.height
        if self._held is None:
            self.scroll_relative(y=rows, animate=False, immediate=True)
            # Add the messages of the next page now, so that the next key press need not wait for them.
            self.call_after_refresh(self._extend, pages)
        else:
            message, row = self._held
            self._held = message, row - rows + pages * _MORE_ROWS

    def on_mouse_scroll_up(self) -> None:
        self.run_worker(self._extend(-1))

    def on_mouse_scroll_down(self) -> None:
        self.run_worker(self._extend(1))

    async def _extend(self, step: int) -> None:
        """Show more messages above or below if less than a page is left in that direction."""
        async with self._extending:
            left = self.scroll_y if step < 0 else self.max_scroll_y - self.scroll_y
            more = self._earlier if step < 0 else self._later
            # While a message is held, the messages that were just added have not been laid out yet.
            if self._held is None and more.display and left < self.size.height:
                await (self.show_earlier() if step < 0 else self.show_later())

    def _hold(self, message: MessageWidget | None, row: int) -> None:
        """Hold a message at this screen row while added messages are laid out."""
        self._held = None if message is None else (message, row)
        self.call_after_refresh(self._release_held)

    def _release_held(self) -> None:
        self._held = None

    def arrange(self, size: Size, optimal: bool = False) -> DockArrangeResult:
        """Lay out the messages. Scroll so that the held message, or else the text at the top, stays in place.

        Scrolling after the layout would draw the screen twice, and briefly show the wrong messages.
        """
        if optimal:
            return super().arrange(size, optimal)
        is_resized = self._width not in (0, size.width) and self.scroll_y < self.max_scroll_y
        if is_resized:
            self._position.remember(int(self.scroll_y))
        arrangement = super().arrange(size)
        column = next(each.region for each in arrangement.placements if each.widget is self._column)
        inner = column.shrink(self._column.gutter)
        placements = self._column.arrange(inner.size).placements
        places = {each.widget: each.region.translate(inner.offset) for each in placements}
        self._width, self._position.places = size.width, places
        last = max(0, column.bottom - size.height)
        row = None
        if self._held is not None:
            message, screen_row = self._held
            # Do nothing if the message has been removed in the meantime.
            if message in places:
                wanted = places[message].y - (screen_row - self.scrollable_content_region.y)
                row = clamp(wanted, 0, last)
        elif is_resized:
            row = self._position.found(last)
        if row is not None:
            self.set_reactive(Transcript.scroll_y, row)
            self.set_reactive(Transcript.scroll_target_y, row)
            self.vertical_scrollbar.set_reactive(ScrollBar.position, row)
        return arrangement

    def message_at(self, index: int) -> MessageWidget | None:
        """Return the widget of the `index`-th message of the chat, or None if it is not shown."""
        messages = self._messages
        place = index - self._first
        return messages[place] if 0 <= place < len(messages) else None

    async def neighbour(self, message: MessageWidget | None, step: int) -> MessageWidget | None:
        """Return the message `step` positions after `message`, or before it if `step` is negative.

        Returns None past the last message. Before the first message, returns the first one. If `message` is
        None, returns the last message.
        """
        messages = self._messages
        if message is None:
            await self.show_end()
            return self._messages[-1] if self._messages else None
        index = messages.index(message) + self._first + step
        if index < self._first:
            await self.show_earlier(_SELECTED_MESSAGES)
        elif index >= self._end and index < len(self._chat.tree.path):
            await self.show_later(_SELECTED_MESSAGES)
        return self.message_at(max(index, 0))

    def show_message(self, message: MessageWidget) -> None:
        """Scroll a message to the centre. If it is taller than the view, show its start."""

        def scroll() -> None:
            self.scroll_to_center(message, animate=False, immediate=True)

        if message.size:
            scroll()
        else:
            # The message was just added and has not been laid out yet, so scroll after the next refresh.
            self.call_after_refresh(scroll)

    async def add(self, widget: Widget) -> None:
        """Append a message, note or panel and scroll to it."""
        await self.show_end()
        is_message = isinstance(widget, MessageWidget)
        await self._column.mount(widget, before=self._later if is_message else None)
        if not is_message:
            await self._column.remove_children([*self.query(".note, Panel")][:-_MAX_NOTES])
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
            reply = ReplyMessage(None, origin=self.origin)
            await self.add(reply)
        reply.begin()
        return reply

    async def note(self, text: str) -> None:
        """Append a note, such as the result of a command. It replaces an earlier note with the same text."""
        same = [each for each in self.query(".note").results(Static) if str(each.content) == text]
        await self._column.remove_children(same)
        await self.add(Static(Content(text), classes="note"))

    async def remove_notes(self) -> None:
        """Remove all notes and panels, which are outdated once the next message is sent."""
        await self.query(".note, Panel").remove()

    async def keep(self, number: int) -> None:
        """Remove all but the first `number` messages of the chat. The caller must show the messages again."""
        if number > self._end:
            await self._show_last_page()
        await self._remove(self._messages[max(0, number - self._first) :])
        self._later.display = False
        self._end = min(self._end, number)
        if self._end < self._first:
            self._first = self._page(self._end, -1)
            widgets = self._widgets(self._first, self._end)
            await self._column.mount_all(widgets, after=self._earlier)

    async def prune(self) -> None:
        """Hide the oldest messages if there are too many widgets."""
        surplus = max(0, self._pages(self._end, -1) - self._first)
        await self._remove(self._messages[:surplus])
        self._first += surplus
        self._refresh_more()

    def follow(self) -> None:
        """Make the last turn's messages selectable once the turn is part of the chat."""
        path = self._chat.tree.path
        self._end = len(path)
        for place, message in zip(path[self._first :], self._messages, strict=False):
            message.place = place

    def set_origin(self, origin: bool) -> None:
        """Colour the tokens of all replies by their origin, or stop colouring them."""
        self.origin = origin
        for reply in self.query(ReplyMessage):
            reply.show_origin(origin)

    def toggle_thoughts(self) -> bool:
        """Expand or collapse the most recent reasoning. Return False if there is none."""
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
    def _messages(self) -> list[MessageWidget]:
        return [child for child in self._column.children if isinstance(child, MessageWidget)]

    async def _remove(self, messages: Sequence[MessageWidget]) -> None:
        """Remove widgets, and clear their drawn rows, which Textual would keep in a global cache."""
        for message in messages:
            for widget in message.walk_children(with_self=True):
                widget.refresh()
        await self._column.remove_children(messages)
        self._collection.reset()

    def _page(self, start: int, step: int, most: int = _PAGE_MESSAGES) -> int:
        """Return the index at which a page from `start` ends, so that its messages just fill the view.

        Args:
            start: The index at which the page starts.
            step: 1 for a page of messages from `start` on, -1 for one of messages before `start`.
            most: Maximum number of messages in the page.
        """
        # The transcript has no size before its first layout, and while the list of chats covers it.
        width = max(1, self.size.width or self.app.size.width)
        entries = self._chat.entries
        place, seconds, rows = start, 0.0, 0
        while 0 <= (following := place + step) <= len(entries) and abs(place - start) < most:
            content = entries[min(place, following)].content
            seconds += drawing_seconds(content)
            if place != start and (seconds > _PAGE_SECONDS or rows >= self.app.size.height):
                break
            rows += _OTHER_ROWS + sum(
                1 + len(line) // (2 * width) for line in content.splitlines() if line.strip()
            )
            place = following
        return place

    def _pages(self, start: int, step: int) -> int:
        """Return the index at which `_MAX_PAGES` pages from `start` end. See `_page`."""
        for _ in range(_MAX_PAGES):
            start = self._page(start, step)
        return start

    def _widgets(self, start: int, end: int) -> list[MessageWidget]:
        """Create the widgets for messages `start` (inclusive) to `end` (exclusive) of the current branch."""
        tree = self._chat.tree
        return [_widget(tree, place, self.origin) for place in tree.path[start:end]]

    def _refresh_more(self) -> None:
        earlier, later = self._first, len(self._chat.tree.path) - self._end
        older, newer = count(earlier, "older message"), count(later, "newer message")
        self._earlier.display, self._later.display = earlier > 0, later > 0
        self.query(Welcome).set(display=not earlier)
        self._earlier.update(f"[@click=screen.show_earlier]↑ {older}: click, or press Ctrl+Home[/]")
        self._later.update(f"[@click=screen.to_end]↓ {newer}: click, or press Ctrl+End[/]")
        self.set_dropped(self._dropped)


def _more(name: str) -> Static:
    """Create the line that says how many older or newer messages are not shown."""
    more = Static(classes=f"more {name}")
    more.display = False
    return more


def _widget(tree: MessageTree[ChatEntry], place: int, origin: bool) -> MessageWidget:
    entry, versions = tree.messages[place], version_label(tree, place)
    widget: MessageWidget
    if entry.role == "user":
        widget = UserMessage(entry.content, entry.message.files, versions)
    elif entry.role == "tool":
        calls = (call for each in tree.path for call in tree.messages[each].message.tool_calls)
        call = next((call for call in calls if call.id == entry.message.tool_call_id), None)
        widget = ToolCallMessage(call, ToolResult.saved(entry.content, cast(Veto, entry.message.ended_early)))
    elif entry.role == "system":
        widget = SystemMessage(entry.content)
    else:
        widget = ReplyMessage(entry, versions, origin=origin)
    widget.place = place
    return widget


class _TextPosition:
    """The text at the top of a view: a widget, and the fraction of its height above the view.

    Attributes:
        places: Regions of the widgets in the last layout, from top to bottom.
    """

    def __init__(self) -> None:
        self.places: dict[Widget, Region] = {}
        self._text: tuple[Widget, float] | None = None
        self._row = -1

    def remember(self, row: int) -> None:
        """Remember the text in `row` of the last layout.

        If `found` has returned the same row, the user has not scrolled since then, so the remembered text is
        kept. Otherwise, rounding would shift it slightly with each width change.
        """
        if row == self._row:
            return
        self._text = None
        for widget, place in self.places.items():
            if row < place.bottom:
                self._text = widget, (row - place.y) / max(1, place.height)
                return

    def found(self, rows: int) -> int | None:
        """Return the row of the remembered text in the last layout, at most `rows`.

        Returns None if its widget is not in the layout.
        """
        if self._text is None or self._text[0] not in self.places:
            return None
        place = self.places[self._text[0]]
        self._row = min(max(0, place.y + int(self._text[1] * place.height)), rows)
        return self._row
