"""The list of saved chats."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from edgespec.chat.search import FoundChat, search
from edgespec.chat.store import StoredChat
from edgespec.tui.numbers import ago, count
from edgespec.tui.open_chat import FORK_SUFFIX

__all__ = ["ChatOption", "Sidebar", "chat_list_hint"]

# Width of the rows, in cells, before the first layout. The list has this width in terminals of up to 136
# columns.
_DEFAULT_WIDTH = 30


class ChatOption(Option):
    """An entry of the list: the chat's title, and below it its age and length or the matching line.

    Args:
        found: The chat.
        width: The width of the list in cells. Longer lines are cut off.
        is_open: Whether this chat is open.
    """

    def __init__(self, found: FoundChat, width: int, *, is_open: bool) -> None:
        chat = found.chat
        age = f"{ago(chat.updated, datetime.now(UTC))} · {count(chat.message_count, 'message')}"
        pinned = "pinned · " if chat.pinned else ""
        line = (found.line or pinned + age, "$muted")
        # The suffix is never cut off, because it distinguishes a fork from the chat that it was made from.
        suffix = FORK_SUFFIX if chat.title.endswith(FORK_SUFFIX) else ""
        title = Content.assemble(("• " if is_open else "  ", "$primary"), chat.title.removesuffix(suffix))
        note = Content.assemble("  ", ("unreadable", "$error") if chat.problem else line)
        rows = (
            title.truncate(max(0, width - len(suffix)), ellipsis=True) + suffix,
            note.truncate(width, ellipsis=True),
        )
        super().__init__(Content("\n").join(rows), id=str(chat.path))
        self.chat = chat


class Sidebar(OptionList):
    """The saved chats: pinned ones first, then the newest. Typing filters the list.

    Enter opens the highlighted chat. `chat_list_hint` names the other keys.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+r", "screen.rename_chat", "Rename", show=False),
        Binding("ctrl+p", "screen.pin_chat", "Pin", show=False),
        Binding("delete", "screen.delete_chat", "Delete", show=False),
        Binding("ctrl+z", "screen.restore_chat", "Undo", show=False),
    ]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._chats: Sequence[StoredChat] = ()
        self._open = ""
        self._query = ""
        self._row_width = _DEFAULT_WIDTH
        self._show_query()

    def show(self, chats: Sequence[StoredChat], *, current: str) -> None:
        """Show `chats` and mark the one whose id is `current`."""
        self._chats, self._open = chats, current
        self._refresh_options(self.highlighted or 0, self.chat)

    @property
    def chat(self) -> StoredChat | None:
        """The highlighted chat, or None if the list is empty."""
        option = self.highlighted_option
        return option.chat if isinstance(option, ChatOption) else None

    def _refresh_options(self, highlighted: int, chat: StoredChat | None = None) -> None:
        """Show the chats that match the query.

        Args:
            highlighted: Index of the entry to highlight.
            chat: The chat to highlight instead, if it is still listed.
        """
        found = search(self._chats, self._query)
        nothing = (
            f"No chat contains “{self._query}”."
            if self._chats
            else "No saved chats yet. Each message is saved when you send it."
        )
        self.set_options(
            [ChatOption(each, self._row_width, is_open=each.chat.id == self._open) for each in found]
            or [Option(nothing, disabled=True)]
        )
        if chat is not None:
            ids = [each.chat.id for each in found]
            highlighted = ids.index(chat.id) if chat.id in ids else highlighted
        self.highlighted = min(highlighted, len(found) - 1) if found else None

    def on_resize(self) -> None:
        """Truncate the lines to the new width."""
        # Leave space for the scrollbar even if there is none, so that its appearance changes nothing.
        width = self.content_region.width - self.styles.scrollbar_size_vertical
        if width != self._row_width:
            self._row_width = width
            self._refresh_options(self.highlighted or 0, self.chat)

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
        if query != self._query:
            self._query = query
            self._show_query()
            self._refresh_options(0)
        elif self.chat is not None:
            self.highlighted = 0

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
    """Return the hint line while the list has the focus. The frame of the list names the other keys."""
    hint = "Ctrl+R renames · Ctrl+P pins"
    return hint if narrow else f"Enter opens · {hint} · Esc back"
