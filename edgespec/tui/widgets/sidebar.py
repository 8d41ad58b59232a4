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

__all__ = ["ChatOption", "Sidebar"]

_MAX_TITLE_LENGTH = 60


class ChatOption(Option):
    """An entry of the list: the chat's title, and below it its age and length or the matching line."""

    def __init__(self, found: FoundChat, *, is_open: bool) -> None:
        chat = found.chat
        short = f"{chat.title[: _MAX_TITLE_LENGTH - 1]}…"
        title = chat.title if len(chat.title) <= _MAX_TITLE_LENGTH else short
        note = f"{ago(chat.updated, datetime.now(UTC))} · {count(chat.message_count, 'message')}"
        pinned = "pinned · " if chat.pinned else ""
        line = (found.line[:_MAX_TITLE_LENGTH] or pinned + note, "$muted")
        super().__init__(
            Content.assemble(
                ("• " if is_open else "  ", "$primary"),
                f"{title}\n  ",
                ("unreadable", "$error") if chat.problem else line,
            ),
            id=str(chat.path),
        )
        self.chat = chat


class Sidebar(OptionList):
    """The saved chats: pinned ones first, then the newest. Typing filters the list.

    Enter opens the highlighted chat, and the Delete key deletes it.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("delete", "screen.delete_chat", "Delete", show=False)]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._chats: Sequence[StoredChat] = ()
        self._open = ""
        self._query = ""
        self._show_query()

    def show(self, chats: Sequence[StoredChat], *, current: str) -> None:
        """Show `chats` and mark the one whose id is `current`."""
        self._chats, self._open = chats, current
        self._refresh_options(self.highlighted or 0)

    def _refresh_options(self, highlighted: int) -> None:
        found = search(self._chats, self._query)
        nothing = (
            f"No chat contains “{self._query}”."
            if self._chats
            else "No saved chats yet. Each message is saved when you send it."
        )
        self.set_options(
            [ChatOption(each, is_open=each.chat.id == self._open) for each in found]
            or [Option(nothing, disabled=True)]
        )
        self.highlighted = min(highlighted, len(found) - 1) if found else None

    def _show_query(self) -> None:
        self.border_title = Content(f"Chats: {self._query}" if self._query else "Chats")
        self.border_subtitle = "Type to search · Del deletes"

    def clear_query(self) -> bool:
        """Show all chats again. Return False if the list is not filtered."""
        filtered, self._query = bool(self._query), ""
        self._show_query()
        self._refresh_options(0)
        return filtered

    def on_key(self, event: events.Key) -> None:
        """Filter the list by what the user types."""
        if event.key == "backspace":
            self._query = self._query[:-1]
        elif event.is_printable and event.character is not None:
            self._query += event.character
        else:
            return
        event.stop()
        event.prevent_default()
        self._show_query()
        self._refresh_options(0)
