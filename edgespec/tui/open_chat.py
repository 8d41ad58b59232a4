"""The open chat: its messages, the stats of its replies, and its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from threading import Event
from typing import TYPE_CHECKING

from markdown_it import MarkdownIt

from edgespec.chat.message import Message, Role, reply_message
from edgespec.chat.store import SavedChat, Setting, title_of

if TYPE_CHECKING:
    from edgespec import Reply, TextChunk

__all__ = ["ChatEntry", "OpenChat", "RunningTurn", "code_blocks"]


@dataclass(slots=True)
class ChatEntry:
    """A message in the open chat.

    `chunks`, `reply` and `thought_seconds` are set only for replies generated since the chat was opened.
    `thought_seconds` is the time that the model spent on its reasoning.
    """

    role: Role
    content: str
    reasoning: str = ""
    markers: tuple[str, str] = ("", "")
    chunks: tuple[TextChunk, ...] = ()
    reply: Reply | None = None
    thought_seconds: float | None = None

    @classmethod
    def of(cls, message: Message) -> ChatEntry:
        return cls(message.role, message.content, message.reasoning, message.markers)

    @property
    def message(self) -> Message:
        """This entry as a `Message`, without the data that is used only for display."""
        return Message(self.role, self.content, self.reasoning, self.markers)


@dataclass(frozen=True, slots=True)
class RunningTurn:
    """A message and its reply while the model writes it.

    Attributes:
        messages_before: The conversation up to and including the user's message.
        reply_start: Text of the reply that is being continued, or an empty string.
        written: Text generated after `reply_start`. The model thread appends to this list.
        ended: Set when the turn has ended and must not be saved any more.
    """

    messages_before: tuple[Message, ...]
    reply_start: str = ""
    written: list[str] = field(default_factory=list)
    ended: Event = field(default_factory=Event)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation, including the text of the reply generated so far."""
        text = self.reply_start + "".join(self.written)
        return (*self.messages_before, reply_message(text)) if text else self.messages_before


@dataclass(slots=True)
class OpenChat:
    """The chat that is currently open.

    Attributes:
        id: Empty until the chat is first saved.
        saved_at: Timestamp of the saved version that this program last wrote or read, or None.
        unfinished: Whether the last reply is incomplete because the program ended or an error occurred.
        turn: The message being answered and its reply so far. None if no reply is being generated.
    """

    system: str | None = None
    settings: dict[str, Setting] = field(default_factory=dict)
    id: str = ""
    title: str = ""
    created: datetime = field(default_factory=lambda: datetime.now(UTC))
    entries: list[ChatEntry] = field(default_factory=list)
    saved_at: datetime | None = None
    unfinished: bool = False
    turn: RunningTurn | None = None

    @classmethod
    def opened(cls, chat: SavedChat, settings: Mapping[str, Setting]) -> OpenChat:
        """Create an open chat from a saved chat. `settings` are its valid settings."""
        entries = [ChatEntry.of(message) for message in chat.messages]
        return cls(
            *(chat.system, dict(settings), chat.id, chat.title, chat.created, entries, chat.updated),
            unfinished=chat.unfinished,
        )

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages of the chat, without data that is used only for display."""
        return tuple(entry.message for entry in self.entries)

    @property
    def shown_title(self) -> str:
        """The chat's title, or else one made from the first message. Empty if the chat is empty."""
        return self.title or (title_of(self.messages) if self.entries else "")

    @property
    def last_reply(self) -> ChatEntry | None:
        return next((entry for entry in reversed(self.entries) if entry.role == "assistant"), None)

    @property
    def last_user_text(self) -> str | None:
        return next((entry.content for entry in reversed(self.entries) if entry.role == "user"), None)

    def follow(self, messages: Sequence[Message]) -> None:
        """Replace the chat's messages. Unchanged messages keep their text chunks and statistics."""
        old = dict(enumerate(self.entries))
        for place, message in enumerate(messages):
            entry = old.get(place)
            if entry is None or entry.message != message:
                old[place] = ChatEntry.of(message)
        self.entries[:] = [old[place] for place in range(len(messages))]

    def begin_turn(self, messages: tuple[Message, ...], reply_start: str = "") -> RunningTurn:
        """Start a reply to `messages`. Until `end_turn`, `saved` includes the text generated so far."""
        self.turn = RunningTurn(messages, reply_start)
        return self.turn

    def end_turn(self) -> None:
        if self.turn is not None:
            self.turn.ended.set()
            self.turn = None

    def saved(self, target: str, turn: RunningTurn | None = None) -> SavedChat:
        """Return a copy of the chat to save, including `turn` or, by default, the running turn."""
        turn = turn or self.turn
        return SavedChat(
            id=self.id,
            messages=self.messages if turn is None else turn.messages,
            created=self.created,
            updated=datetime.now(UTC),
            title=self.title,
            target=target,
            system=self.system,
            sampling=dict(self.settings),
            unfinished=self.unfinished or turn is not None,
        )

    def as_markdown(self) -> str:
        names = {"user": "You", "assistant": "Model", "system": "System"}
        return "\n\n".join(f"**{names[entry.role]}:**\n\n{entry.content.strip()}" for entry in self.entries)


def code_blocks(markdown: str) -> list[str]:
    """Return the code blocks of a Markdown text, without their fences."""
    tokens = MarkdownIt("gfm-like").parse(markdown)
    return [token.content for token in tokens if token.type in ("fence", "code_block")]
