"""The open chat: its messages, the stats of its replies, and its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from markdown_it import MarkdownIt

from edgespec.chat.message import Message, Role
from edgespec.chat.store import SavedChat, Setting, title_of

if TYPE_CHECKING:
    from edgespec import Reply, TextChunk

__all__ = ["ChatEntry", "OpenChat", "code_blocks"]


@dataclass(slots=True)
class ChatEntry:
    """A message in the open chat. Only replies generated since it was opened have `chunks` and `reply`."""

    role: Role
    content: str
    chunks: tuple[TextChunk, ...] = ()
    reply: Reply | None = None


@dataclass(slots=True)
class OpenChat:
    """The chat that is currently open.

    Attributes:
        id: Empty until the chat is first saved.
        saved_at: Time of the last save that this program wrote or read, or None.
    """

    system: str | None = None
    settings: dict[str, Setting] = field(default_factory=dict)
    id: str = ""
    title: str = ""
    created: datetime = field(default_factory=lambda: datetime.now(UTC))
    entries: list[ChatEntry] = field(default_factory=list)
    saved_at: datetime | None = None

    @classmethod
    def opened(cls, chat: SavedChat, settings: Mapping[str, Setting]) -> OpenChat:
        """Create an open chat from a saved chat. `settings` are its valid settings."""
        entries = [ChatEntry(message.role, message.content) for message in chat.messages]
        return cls(chat.system, dict(settings), chat.id, chat.title, chat.created, entries, chat.updated)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages without chunks and stats."""
        return tuple(Message(entry.role, entry.content) for entry in self.entries)

    @property
    def shown_title(self) -> str:
        """The title, by default taken from the first message. Empty if the chat is empty."""
        return self.title or (title_of(self.messages) if self.entries else "")

    @property
    def last_reply(self) -> ChatEntry | None:
        """The last reply, or None."""
        return next((entry for entry in reversed(self.entries) if entry.role == "assistant"), None)

    @property
    def last_user_text(self) -> str | None:
        """The last user message, or None."""
        return next((entry.content for entry in reversed(self.entries) if entry.role == "user"), None)

    def follow(self, messages: Sequence[Message]) -> None:
        """Replace the messages. Unchanged messages keep their chunks and stats."""
        old = dict(enumerate(self.entries))
        for place, message in enumerate(messages):
            entry = old.get(place)
            if entry is None or (entry.role, entry.content) != (message.role, message.content):
                old[place] = ChatEntry(message.role, message.content)
        self.entries[:] = [old[place] for place in range(len(messages))]

    def saved(self, target: str) -> SavedChat:
        """Return a copy of the chat to save."""
        return SavedChat(
            id=self.id,
            messages=self.messages,
            created=self.created,
            updated=datetime.now(UTC),
            title=self.title,
            target=target,
            system=self.system,
            sampling=dict(self.settings),
        )

    def as_markdown(self) -> str:
        """Return the whole chat as Markdown."""
        names = {"user": "You", "assistant": "Model", "system": "System"}
        return "\n\n".join(f"**{names[entry.role]}:**\n\n{entry.content.strip()}" for entry in self.entries)


def code_blocks(markdown: str) -> list[str]:
    """Return the code blocks of a Markdown text, without their fences."""
    tokens = MarkdownIt("gfm-like").parse(markdown)
    return [token.content for token in tokens if token.type in ("fence", "code_block")]
