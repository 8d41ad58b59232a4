"""The open chat: its messages, reply statistics and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from threading import Event
from time import monotonic
from typing import TYPE_CHECKING, Any

from markdown_it import MarkdownIt

from edgespec.chat.message import EARLY_ENDS, Message, Role, reply_message
from edgespec.chat.reply_start import whole_characters
from edgespec.chat.saved_chat import NO_MODELS, MessageTree, ModelReferences, SavedChat, Setting, title_of
from edgespec.tui.numbers import count

if TYPE_CHECKING:
    from edgespec import Reply, TextChunk

FORK_SUFFIX = " (fork)"
"""Appended to the title of a forked chat."""


@dataclass(slots=True, eq=False)
class ChatEntry:
    """A message in the open chat.

    Attributes:
        message: The message.
        chunks, reply: Set only for replies generated since the chat was opened.
        is_saved: Whether the message and its files come from a saved chat. Its references may now name other
            files, or none.
    """

    message: Message
    chunks: tuple[TextChunk, ...] = ()
    reply: Reply | None = None
    is_saved: bool = False

    @property
    def role(self) -> Role:
        return self.message.role

    @property
    def content(self) -> str:
        return self.message.content

    @property
    def reasoning(self) -> str:
        return self.message.reasoning

    @property
    def thought_seconds(self) -> float | None:
        """Time in seconds that the model spent on reasoning, or None if it was not measured."""
        return self.message.reasoning_seconds

    @thought_seconds.setter
    def thought_seconds(self, seconds: float | None) -> None:
        self.message = replace(self.message, reasoning_seconds=seconds)


@dataclass(frozen=True, slots=True)
class RunningTurn:
    """A message and its reply while the reply is being generated.

    Attributes:
        tree: The chat's messages. The current branch ends with the message to reply to.
        sent: The text that the user sent to start this turn. Empty if it continues or regenerates a reply.
        edited: Index of the message that `sent` replaces, or None if `sent` is a new message.
        continued: Index of the reply that is being continued, or None if this is a new reply.
        written: Text generated so far, excluding the start of a continued reply. The model thread appends to
            this list.
        ended: Set when the turn has ended and must no longer be saved.
    """

    tree: MessageTree[ChatEntry]
    sent: str = ""
    edited: int | None = None
    continued: int | None = None
    written: list[str] = field(default_factory=list)
    ended: Event = field(default_factory=Event)

    @property
    def reply_start(self) -> str:
        """Text of the reply that is being continued, or an empty string."""
        if self.continued is None:
            return ""
        return whole_characters(self.tree.messages[self.continued].message.text)

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The conversation to send to the model. It ends with the message to answer or reply to continue."""
        continued = () if self.continued is None else (self.tree.messages[self.continued].message,)
        return (*(entry.message for entry in self.tree.open_messages), *continued)

    def with_text(self) -> MessageTree[ChatEntry]:
        """Return the chat's messages, including the reply text generated so far."""
        text = self.reply_start + "".join(self.written)
        return self.with_reply(replace(reply_message(text), ended_early="cancelled")) if text else self.tree

    def with_reply(self, message: Message) -> MessageTree[ChatEntry]:
        """Return the chat's messages, including the finished reply.

        A continued reply replaces the unfinished one. If messages follow the unfinished reply, the continued
        reply becomes another version instead, because those messages refer to the shorter text.
        """
        tree, place = self.tree, self.continued
        if place is not None and tree.is_last(place):
            return tree.with_message(place, ChatEntry(message)).ending_at(place)
        return tree.add(ChatEntry(message), tree.tip)


@dataclass(slots=True)
class OpenChat:
    """The chat that is currently open.

    Attributes:
        id: ID of the saved chat. Empty until the chat is first saved.
        tree: The messages, including earlier versions and those deleted since the chat was opened.
        saved_at: Timestamp of the file that this program last wrote or read, or None if the chat is unsaved.
        unfinished: Whether the last reply is incomplete because the program ended or an error occurred.
        pinned: Whether the chat stays at the top of the list of chats.
        models: References to the models used for the last reply, or chosen since.
        turn: The message being answered and its reply so far, which `saved` includes. None if no reply is
            being generated. `finish_turn` ends it.
        deletion_times: When the messages in `tree.deleted` were deleted, from `time.monotonic`.
    """

    system: str | None = None
    settings: dict[str, Setting] = field(default_factory=dict)
    id: str = ""
    title: str = ""
    created: datetime = field(default_factory=lambda: datetime.now(UTC))
    tree: MessageTree[ChatEntry] = field(default_factory=MessageTree)
    saved_at: datetime | None = None
    unfinished: bool = False
    pinned: bool = False
    models: ModelReferences = NO_MODELS
    turn: RunningTurn | None = None
    deletion_times: tuple[float, ...] = ()

    @classmethod
    def opened(cls, chat: SavedChat, settings: Mapping[str, Setting]) -> OpenChat:
        """Create an open chat from a saved chat. `settings` are its valid settings."""
        tree = chat.tree.map(partial(ChatEntry, is_saved=True))
        return cls(
            *(chat.system, dict(settings), chat.id, chat.title, chat.created, tree),
            saved_at=chat.updated,
            unfinished=chat.unfinished,
            pinned=chat.pinned,
            models=chat.models,
        )

    def override(self, values: Mapping[str, Any]) -> None:
        """Replace settings with those in `values`, which can also contain the system prompt as `system`."""
        self.settings |= {name: value for name, value in values.items() if name != "system"}
        if "system" in values:
            self.system = values["system"] or None

    @property
    def entries(self) -> list[ChatEntry]:
        """The messages on the current branch, with one version of each."""
        return list(self.tree.open_messages)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages on the current branch, without the data that is used only for display."""
        return tuple(entry.message for entry in self.entries)

    @property
    def messages_so_far(self) -> tuple[Message, ...]:
        """The messages on the current branch, including the running turn and its reply so far."""
        tree = self.tree if self.turn is None else self.turn.with_text()
        return tuple(entry.message for entry in tree.open_messages)

    @property
    def shown_title(self) -> str:
        """The chat's title, or else one derived from the first message. Empty if the chat is empty."""
        return self.title or (title_of(self.messages) if self.entries else "")

    @property
    def last_reply(self) -> ChatEntry | None:
        return next((entry for entry in reversed(self.entries) if entry.role == "assistant"), None)

    def last_place(self, *roles: Role) -> int | None:
        """Return the index of the last message with one of these roles on the current branch."""
        path = reversed(self.tree.path)
        return next((place for place in path if self.tree.messages[place].role in roles), None)

    def change_messages(self, tree: MessageTree[ChatEntry]) -> None:
        """Replace the messages while no reply is being generated, for example to open another version."""
        self.unfinished = self.unfinished and tree.tip == self.tree.tip
        # The last item of `tree.deleted` may have been added or removed.
        self.deletion_times = (*self.deletion_times, monotonic())[: len(tree.deleted)]
        self.tree = tree

    def send(self, message: Message) -> RunningTurn:
        """Return a turn that adds a user's message to the conversation and replies to it."""
        return RunningTurn(self.tree.add(ChatEntry(message), self.tree.tip), sent=message.content)

    def edit(self, place: int, message: Message) -> RunningTurn:
        """Return a turn that adds a new version of a user's message and replies to it."""
        entry = ChatEntry(message, is_saved=self.tree.messages[place].is_saved)
        tree = self.tree.add(entry, self.tree.parents[place])
        return RunningTurn(tree, sent=message.content, edited=place)

    def regenerate(self, place: int) -> RunningTurn:
        """Return a turn that generates another version of a reply, or another reply to a user's message."""
        is_reply = self.tree.messages[place].role == "assistant"
        return RunningTurn(self.tree.ending_at(self.tree.parents[place] if is_reply else place))

    def continue_reply(self, place: int) -> RunningTurn:
        """Return a turn that continues a reply, or answers a message that has no reply yet."""
        if self.tree.messages[place].role != "assistant":
            return RunningTurn(self.tree.ending_at(place))
        return RunningTurn(self.tree.ending_at(self.tree.parents[place]), continued=place)

    def forked(self, place: int) -> OpenChat:
        """Return a new chat with the messages up to and including the one at `place`."""
        entries = self.tree.ending_at(place).open_messages
        return OpenChat(
            self.system,
            dict(self.settings),
            title=self.shown_title + FORK_SUFFIX,
            models=self.models,
            tree=MessageTree.linear(ChatEntry(entry.message, is_saved=entry.is_saved) for entry in entries),
        )

    def fork_text(self, fork: OpenChat) -> str:
        """Return the note that introduces a fork of this chat."""
        messages = count(len(fork.entries), "message")
        return f"This is a new chat with {messages} from “{self.shown_title}”, which is unchanged."

    def finish_turn(self, reply: Reply | None, message: Message | None, *, leaving: bool) -> ChatEntry | None:
        """End the running turn, and add its reply to the chat unless no text was generated.

        Args:
            reply: The reply, or None if it failed.
            message: The reply as a message, or None if it failed.
            leaving: Whether the program is about to end. If so, a stopped reply counts as unfinished.

        Returns:
            The new message, or None if no text was generated.
        """
        turn = self.turn
        assert turn is not None
        try:
            if reply is not None and message is not None:
                if not (reply.answer or reply.reasoning) and reply.finish_reason == "cancelled":
                    return None
                reason = "context_full" if reply.context_full else reply.finish_reason
                if reason in EARLY_ENDS:
                    message = replace(message, ended_early=reason)
                self.tree = turn.with_reply(message)
                self.unfinished = leaving and reply.finish_reason == "cancelled"
            elif turn.written:
                self.tree = turn.with_text()
                self.unfinished = True
            else:
                return None
        finally:
            turn.ended.set()
            self.turn = None
        entry = self.entries[-1]
        entry.reply = reply
        return entry

    def saved(self, target: str, turn: RunningTurn | None = None) -> SavedChat:
        """Return a copy of the chat to save, including `turn` or, by default, the running turn."""
        turn = turn or self.turn
        tree = self.tree if turn is None else turn.with_text()
        return SavedChat(
            id=self.id,
            tree=tree.pruned().map(lambda entry: entry.message),
            created=self.created,
            updated=datetime.now(UTC),
            title=self.title,
            target=target,
            system=self.system,
            sampling=dict(self.settings),
            unfinished=self.unfinished or turn is not None,
            pinned=self.pinned,
            models=self.models,
        )


def version_label(tree: MessageTree[ChatEntry], place: int) -> str:
    """Return the number of a message's version, such as `2/3`, or an empty string if it has no others."""
    versions = tree.versions(place)
    return f"{versions.index(place) + 1}/{len(versions)}" if len(versions) > 1 else ""


def code_blocks(markdown: str) -> list[str]:
    """Return the code blocks in Markdown, without their fences."""
    tokens = MarkdownIt("gfm-like").parse(markdown)
    return [token.content for token in tokens if token.type in ("fence", "code_block")]
