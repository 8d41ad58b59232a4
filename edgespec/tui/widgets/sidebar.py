"""The sidebar with the list of saved chats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message as Event
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from edgespec.chat.store import StoredChat
from edgespec.tui.numbers import ago, count

__all__ = ["Sidebar"]

_MAX_TITLE_LENGTH = 60


class Sidebar(Vertical):
    """Sidebar that lists the saved chats, newest first. Enter opens a chat, Delete deletes it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("delete", "delete", "Delete", show=False)]

    @dataclass
    class Opened(Event):
        """The user chose a chat to open."""

        chat: StoredChat

    @dataclass
    class DeleteWanted(Event):
        """The user wants to delete a chat."""

        chat: StoredChat

    def __init__(self, *, id: str) -> None:  # noqa: A002 - textual's own name
        super().__init__(id=id)
        self._chats: dict[str, StoredChat] = {}

    def compose(self) -> ComposeResult:
        """Create the heading, the list and a hint."""
        yield Static("Chats", classes="sidebar-title")
        yield OptionList(id="chat-list", compact=True)
        yield Static("", id="chat-empty")
        yield Static("Enter opens · Del deletes", classes="sidebar-hint")

    def show(self, chats: Sequence[StoredChat], *, current: str, now: datetime | None = None) -> None:
        """Show `chats` and mark the one whose id is `current`."""
        now = now or datetime.now(UTC)
        options = self.query_one("#chat-list", OptionList)
        place = options.highlighted
        self._chats = {str(chat.path): chat for chat in chats}
        options.clear_options()
        options.add_options([Option(_entry(chat, current, now), id=str(chat.path)) for chat in chats])
        if chats:
            options.highlighted = min(place or 0, len(chats) - 1)
        empty = self.query_one("#chat-empty", Static)
        empty.display = not chats
        options.display = bool(chats)
        empty.update(Content("Chats are saved here after each reply."))

    def focus_list(self) -> None:
        """Focus the list."""
        self.query_one("#chat-list", OptionList).focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Open the chosen chat."""
        event.stop()
        chat = self._chats.get(event.option_id or "")
        if chat is not None:
            self.post_message(self.Opened(chat))

    def action_delete(self) -> None:
        """Request deletion of the highlighted chat."""
        options = self.query_one("#chat-list", OptionList)
        if options.highlighted is None:
            return
        chat = self._chats.get(options.get_option_at_index(options.highlighted).id or "")
        if chat is not None:
            self.post_message(self.DeleteWanted(chat))


def _entry(chat: StoredChat, current: str, now: datetime) -> Content:
    mark = "• " if chat.id == current else "  "
    # Titles read from files can be arbitrarily long.
    shown = chat.title if len(chat.title) <= _MAX_TITLE_LENGTH else f"{chat.title[: _MAX_TITLE_LENGTH - 1]}…"
    title = Content.assemble((mark, "$primary"), shown)
    when = ago(chat.updated, now)
    if chat.problem:
        note = Content.assemble(("  cannot be read", "$error"))
    else:
        note = Content.assemble((f"  {when} · {count(chat.message_count, 'message')}", "$muted"))
    return Content.assemble(title, "\n", note)
