"""The list of saved chats."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from edgespec.chat.store import StoredChat
from edgespec.tui.numbers import ago, count

__all__ = ["ChatOption", "Sidebar"]

_MAX_TITLE_LENGTH = 60


class ChatOption(Option):
    """An entry of the list: the chat's title, age and number of messages."""

    def __init__(self, chat: StoredChat, *, is_open: bool) -> None:
        short = f"{chat.title[: _MAX_TITLE_LENGTH - 1]}…"
        title = chat.title if len(chat.title) <= _MAX_TITLE_LENGTH else short
        note = (f"{ago(chat.updated, datetime.now(UTC))} · {count(chat.message_count, 'message')}", "$muted")
        super().__init__(
            Content.assemble(
                ("• " if is_open else "  ", "$primary"),
                f"{title}\n  ",
                ("cannot be read", "$error") if chat.problem else note,
            ),
            id=str(chat.path),
        )
        self.chat = chat


class Sidebar(OptionList):
    """The saved chats, newest first. Enter opens the highlighted chat, and the Delete key deletes it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("delete", "screen.delete_chat", "Delete", show=False)]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.border_title = "Chats"
        self.border_subtitle = "Enter opens · Del deletes"

    def show(self, chats: Sequence[StoredChat], *, current: str) -> None:
        """Show `chats` and mark the one whose id is `current`."""
        place = self.highlighted or 0
        self.set_options(
            [ChatOption(chat, is_open=chat.id == current) for chat in chats]
            or [Option("No saved chats yet. Each message is saved when you send it.", disabled=True)]
        )
        self.highlighted = min(place, len(chats) - 1) if chats else None
