"""The list of saved chats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar

from rich.segment import Segment
from textual import events
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.geometry import Region, Size, clamp
from textual.message import Message as Event
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from edgespec.chat.store import FoundChat, StoredChat, search
from edgespec.tui.numbers import ago, count
from edgespec.tui.open_chat import FORK_SUFFIX
from edgespec.tui.widgets.prompt import UNDO_KEYS

# Number of rows per chat: one for the title, and one for the age or the matching line.
_CHAT_ROWS = 2
_NO_CHATS = "No saved chats yet. Each message is saved when you send it."


class Sidebar(ScrollView, can_focus=True):
    """The saved chats: pinned ones first, then the newest. Typing filters the list.

    Enter opens the highlighted chat. `chat_list_hint` lists the other keys. Only the visible rows are drawn,
    because there can be thousands of chats.

    Attributes:
        highlighted: Index of the highlighted chat in `found`.
        found: The chats in the list.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {"sidebar--highlighted"}
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("pageup", "move_page(-1)", show=False),
        Binding("pagedown", "move_page(1)", show=False),
        Binding("home", "first", show=False),
        Binding("end", "last", show=False),
        Binding("enter", "choose", show=False),
        Binding("ctrl+r", "screen.rename_chat", "Rename", show=False),
        Binding("ctrl+p", "screen.pin_chat", "Pin", show=False),
        Binding("delete", "screen.delete_chat", "Delete", show=False),
        Binding(UNDO_KEYS, "screen.restore_chat", "Undo", show=False),
    ]

    highlighted = reactive(0)

    @dataclass
    class Chosen(Event):
        """Posted when the user chooses a chat with Enter or a click."""

        chat: StoredChat

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.found: Sequence[FoundChat] = ()
        self._chats: Sequence[StoredChat] = ()
        self._open = ""
        self._query = ""
        self._show_query()

    def show(self, chats: Sequence[StoredChat], *, current: str) -> None:
        """Show `chats` and mark the one whose ID is `current`. The highlighted chat stays highlighted."""
        self._chats, self._open = chats, current
        chat = self.chat
        self._search()
        if chat is not None:
            self.highlight(chat.id)

    def highlight(self, chat_id: str) -> None:
        """Highlight the chat with this ID, if it is in the list."""
        ids = [each.chat.id for each in self.found]
        if chat_id in ids:
            self.highlighted = ids.index(chat_id)

    @property
    def chat(self) -> StoredChat | None:
        """The highlighted chat, or None if the list is empty."""
        return self.found[self.highlighted].chat if self.found else None

    def _search(self) -> None:
        """Show the chats that match the query."""
        self.found = search(self._chats, self._query)
        self.virtual_size = Size(self.size.width, _CHAT_ROWS * max(1, len(self.found)))
        self.highlighted = clamp(self.highlighted, 0, max(0, len(self.found) - 1))
        self.refresh()

    def render_line(self, y: int) -> Strip:
        # Always reserve space for the scrollbar, so that the text does not move when the scrollbar appears.
        width = self.size.width - self.styles.scrollbar_size_vertical
        number, row = divmod(y + self.scroll_offset.y, _CHAT_ROWS)
        if not self.found:
            text = f"No chat contains “{self._query}”." if self._chats else _NO_CHATS
            lines = Content.styled(text, "$muted").wrap(width - 2)
            line = Content("  ") + lines[y] if y < len(lines) else Content()
        elif number < len(self.found):
            line = (self._note, self._title)[row == 0](self.found[number], width)
        else:
            line = Content()
        style = self.visual_style
        if self.found and number == self.highlighted:
            style = self.get_visual_style("sidebar--highlighted")
        parts = line.render(style, end="", parse_style=self._get_style)
        segments = [Segment(text, part_style.rich_style) for text, part_style in parts]
        return Strip(segments).adjust_cell_length(self.size.width, style.rich_style)

    def _title(self, found: FoundChat, width: int) -> Content:
        title = found.chat.title
        # Never cut off the suffix, which distinguishes a fork from the original chat.
        suffix = FORK_SUFFIX if title.endswith(FORK_SUFFIX) else ""
        mark = "• " if found.chat.id == self._open else "  "
        shown = Content.assemble((mark, "$primary"), title.removesuffix(suffix))
        return shown.truncate(max(0, width - len(suffix)), ellipsis=True) + suffix

    def _note(self, found: FoundChat, width: int) -> Content:
        chat = found.chat
        age = f"{ago(chat.updated, datetime.now(UTC))} · {count(chat.message_count, 'message')}"
        line = (found.line or ("pinned · " if chat.pinned else "") + age, "$muted")
        note = Content.assemble("  ", ("unreadable", "$error") if chat.problem else line)
        return note.truncate(width, ellipsis=True)

    def watch_highlighted(self) -> None:
        """Scroll to the highlighted chat."""
        place = Region(0, _CHAT_ROWS * self.highlighted, self.size.width, _CHAT_ROWS)
        self.scroll_to_region(place, animate=False, force=True, immediate=True)

    def action_move(self, chats: int) -> None:
        """Highlight the chat `chats` positions below the highlighted one, or above it if negative."""
        self.highlighted = clamp(self.highlighted + chats, 0, max(0, len(self.found) - 1))

    def action_move_page(self, pages: int) -> None:
        self.action_move(pages * max(1, self.scrollable_content_region.height // _CHAT_ROWS))

    def action_first(self) -> None:
        self.action_move(-len(self.found))

    def action_last(self) -> None:
        self.action_move(len(self.found))

    def action_choose(self) -> None:
        if (chat := self.chat) is not None:
            self.post_message(self.Chosen(chat))

    def on_click(self, event: events.Click) -> None:
        """Open the clicked chat."""
        place = event.get_content_offset(self)
        if place is not None and (number := (place.y + self.scroll_offset.y) // _CHAT_ROWS) < len(self.found):
            self.highlighted = number
            self.action_choose()

    def _show_query(self) -> None:
        self.border_title = Content(f"Chats: {self._query}" if self._query else "Chats")
        self.border_subtitle = "Type to search · Del deletes"

    def clear_query(self) -> bool:
        """Show all chats again. Return False if the list is not filtered."""
        filtered = bool(self._query)
        self.filter("")
        return filtered

    def filter(self, query: str) -> None:
        """Show only the chats whose titles or messages contain all words of `query`."""
        self.highlighted = 0
        if query != self._query:
            self._query = query
            self._show_query()
            self._search()

    def on_key(self, event: events.Key) -> None:
        """Filter the list by what the user types."""
        if event.key == "backspace":
            query = self._query[:-1]
        elif event.character == "/" and not self._query:
            return  # The screen starts a command in the input.
        elif event.is_printable and event.character is not None:
            query = self._query + event.character
        else:
            return
        event.stop()
        event.prevent_default()
        self.filter(query)


def chat_list_hint(*, narrow: bool) -> str:
    """Return the hint line shown while the list has focus. The list's border shows the other keys."""
    return "Enter opens · Esc back" if narrow else "Enter opens · Ctrl+R renames · Ctrl+P pins · Esc back"
