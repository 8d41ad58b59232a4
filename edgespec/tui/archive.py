"""Load and save chats, and save replies while they are generated."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from threading import Lock, Thread
from time import monotonic, time

from edgespec.chat.saved_chat import MAX_CHAT_BYTES, SavedChat, title_of
from edgespec.chat.store import ChatStore, StoredChat, find_chat
from edgespec.errors import CapabilityError, ChatFileError, ContextFullError, OptionError, TemplateError
from edgespec.system.files import format_bytes
from edgespec.tui.open_chat import OpenChat, RunningTurn

UNDO_SECONDS = 60.0
"""Time in seconds during which a deleted chat can be restored."""

REFUSALS = (CapabilityError, ContextFullError, OptionError, TemplateError)
"""Errors that retrying cannot resolve, because the model will never accept the message."""

_SAVE_SECONDS = 1.0
# Maximum fraction of time spent saving. Chats that are slow to save are saved less often.
_MAX_SAVING_SHARE = 0.1


def _saved_bytes(text: str) -> int:
    """Return the size of `text` in a chat file. Non-ASCII and escaped characters take more."""
    return len(json.dumps(text, ensure_ascii=False).encode("utf-8", "replace"))


class Archive:
    """Loads and saves chats in a `ChatStore`, one call at a time.

    All methods can be called from any thread, and can raise ChatFileError. They block until the files are
    read or written, so the full-screen chat calls them in another thread.

    Attributes:
        unsaved: The errors of chats whose last save failed, keyed by chat ID. Each message names the chat.
        branched: Set to True when a chat was saved under a new ID because another program had changed it. The
            caller resets this to False after telling the user.
        hidden: When each deleted chat that can still be restored was deleted, keyed by chat ID, most recently
            deleted last. The times are from `time.monotonic`.
    """

    def __init__(self, store: ChatStore) -> None:
        self.unsaved: dict[str, ChatFileError] = {}
        self.branched = False
        self.hidden: dict[str, float] = {}
        self.store = store
        self._lock = Lock()
        # The chats whose last save failed, with the names of their models. Saving is retried later, even if
        # the user has opened another chat. A chat in `hidden` is kept here too, in case it is restored.
        self._waiting: dict[str, tuple[OpenChat, str]] = {}

    def check_size(self, chat: OpenChat, turn: RunningTurn) -> None:
        """Raise OptionError if the chat is too long for another message or reply."""
        size_bytes = self.store.size_bytes(chat.id) if chat.id else 0
        files = turn.prompt[-1].files if turn.sent and turn.prompt else ()
        added = sum(_saved_bytes(text) for text in (turn.sent, *(file.text for file in files)))
        # Images are saved in base64, which has four characters for every three bytes.
        added += sum(len(file.image.data) * 4 // 3 for file in files if file.image)
        if size_bytes + added > MAX_CHAT_BYTES:
            raise OptionError(
                f"This chat takes up {format_bytes(size_bytes)}. With your message it would exceed"
                f" {format_bytes(MAX_CHAT_BYTES)}, the maximum for a chat",
                "Type /new to start an empty chat. To continue from part of this chat in a new one, select a"
                " message and press f",
                code="chat_too_large",
            )

    def save(self, chat: OpenChat, target: str, turn: RunningTurn | None = None) -> None:
        """Save the chat, assigning an ID if it has none. Does nothing if the chat is new and empty.

        If another program has changed the file since this chat was last read or saved, the other version is
        kept and this chat is saved under a new ID.

        Args:
            chat: The chat.
            target: Name of the model.
            turn: The message and reply in progress, to save with the chat. If the turn has already ended,
                nothing is saved.
        """
        with self._lock:
            if turn is not None and turn.ended.is_set():
                return
            self._save(chat, target, turn)
            for other, other_target in [*self._waiting.values()]:
                if other.id not in self.hidden:
                    with suppress(ChatFileError):
                        self._save(other, other_target)

    def _save(self, chat: OpenChat, target: str, turn: RunningTurn | None = None) -> None:
        chat.id = chat.id or self.store.new_id()
        snapshot = chat.saved(target, turn)
        if not snapshot.messages and chat.saved_at is None:
            return
        try:
            saved = self.store.save_after(snapshot, chat.saved_at)
        except ChatFileError as error:
            title = snapshot.title or title_of(snapshot.messages)
            what = f"the chat {title!r} was not saved: {error.what}"
            if chat.saved_at is not None:
                what = f"the last messages in {title!r} were not saved: {error.what}"
            self.unsaved[chat.id] = ChatFileError(what, error.next_step, code=error.code)
            self._waiting[chat.id] = chat, target
            raise
        self._forget_failure(snapshot.id)
        self.branched |= saved.id != snapshot.id
        chat.id, chat.saved_at = saved.id, saved.updated

    def unsaved_chat(self, chat_id: str) -> OpenChat | None:
        """Return the chat with this ID if its last save failed, so that its file lacks the last messages."""
        waiting = self._waiting.get(chat_id)
        return None if waiting is None else waiting[0]

    def _forget_failure(self, chat_id: str) -> None:
        self.unsaved.pop(chat_id, None)
        self._waiting.pop(chat_id, None)

    def withdraw(self, chat: OpenChat, target: str) -> None:
        """Save the chat without a message that the model refused, such as one that exceeds the context.

        `take_turn` saves each message before the model sees it. If a refused message stayed in the file, the
        next start would report it as unfinished, although no model has begun to answer it. If it was the only
        message, the file is deleted.
        """
        with self._lock:
            if chat.saved_at is None or chat.saved(target).messages:
                self._save(chat, target)
                return
            self.store.delete(chat.id)
            self._forget_failure(chat.id)
            chat.id, chat.saved_at = "", None

    def save_while_written(self, chat: OpenChat, target: str) -> None:
        """Save the chat about once a second, in another thread, until its running turn ends.

        The thread does not depend on the screen, which a slow or closed terminal can block. Errors are
        recorded in `unsaved`.
        """
        if (turn := chat.turn) is not None:
            Thread(target=self._save_while_written, args=(chat, target, turn), daemon=True).start()

    def _save_while_written(self, chat: OpenChat, target: str, turn: RunningTurn) -> None:
        saved_chunks, pause_seconds = 0, _SAVE_SECONDS
        while not turn.ended.wait(pause_seconds):
            if (chunks := len(turn.written)) == saved_chunks:
                continue
            began = monotonic()
            with suppress(ChatFileError):
                self.save(chat, target, turn)
            saved_chunks = chunks
            pause_seconds = max(_SAVE_SECONDS, (monotonic() - began) / _MAX_SAVING_SHARE)

    def check_saved(self) -> None:
        """Raise ChatFileError if the last save of any chat failed."""
        if self.unsaved:
            errors = [*self.unsaved.values()]
            what = "; ".join(error.what for error in errors)
            raise ChatFileError(what, errors[-1].next_step, code=errors[-1].code)

    def list(self) -> Sequence[StoredChat]:
        """Return all chats, newest first."""
        with self._lock:
            return self.store.list()

    def find(self, wanted: str) -> StoredChat | None:
        """Return the chat with the ID `wanted`, or else the newest chat whose title contains `wanted`.

        `last` means the newest chat. Returns None if there is no such chat.
        """
        return find_chat(self.list(), wanted)

    def load(self, chat_id: str) -> SavedChat:
        """Read and return a saved chat."""
        with self._lock:
            return self.store.load(chat_id)

    def add(self, chats: Iterable[SavedChat]) -> None:
        """Save imported chats under new IDs."""
        for chat in chats:
            # Take the lock once per chat, so that replies can be saved during a large import.
            with self._lock:
                self.store.add(chat)

    def change(self, chat_id: str, *, title: str | None = None, pinned: bool | None = None) -> None:
        """Rename, pin or unpin a saved chat. The chat keeps its place in the list of chats.

        Args:
            chat_id: The chat, which must not be the open one.
            title: The new title. None keeps the title.
            pinned: Whether the chat stays at the top of the list. None leaves that unchanged.
        """
        with self._lock:
            if (waiting := self._waiting.get(chat_id)) is not None:
                # The file lacks the last messages, so save the whole chat.
                chat, target = waiting
                chat.title = chat.title if title is None else title
                chat.pinned = chat.pinned if pinned is None else pinned
                self._save(chat, target)
                return
            saved = self.store.load(chat_id)
            changed = replace(
                saved,
                title=saved.title if title is None else title,
                pinned=saved.pinned if pinned is None else pinned,
                # Other programs detect the change by this timestamp. One microsecond is too little to reorder
                # chats.
                updated=saved.updated + timedelta(microseconds=1),
            )
            self.store.save_after(changed, saved.updated)

    def hide(self, chat_id: str) -> None:
        """Remove a chat from the list. Its file is kept until `finish_deletion`."""
        with self._lock:
            self.store.hide(chat_id)
            self.unsaved.pop(chat_id, None)
            self.hidden[chat_id] = monotonic()

    def restore(self) -> StoredChat | None:
        """Put the most recently hidden chat back into the list of chats, and return it."""
        with self._lock:
            if not self.hidden:
                return None
            hidden_id = next(reversed(self.hidden))
            chat_id = self.store.restore(hidden_id)
            del self.hidden[hidden_id]
            if (waiting := self._waiting.get(hidden_id)) is not None:
                with suppress(ChatFileError):
                    self._save(*waiting)
            return next((chat for chat in self.store.list() if chat.id == chat_id), None)

    def finish_deletion(self, chat_id: str) -> None:
        """Delete a chat if it is still hidden, along with cached data that may contain its text."""
        with self._lock:
            if self.hidden.pop(chat_id, None) is None:
                return
            self._forget_failure(chat_id)
        self._delete(chat_id)

    def finish_all_deletions(self) -> None:
        """Delete all hidden chats, including chats hidden by an earlier run that ended before deleting them.

        Call this after closing the model, because closing can save a cache that contains their text.

        Raises:
            ChatFileError: At least one chat could not be deleted. All others were deleted.
        """
        old = self.store.hidden_before(time() - 2 * UNDO_SECONDS)
        failure: ChatFileError | None = None
        for chat_id in {*self.hidden, *old}:
            try:
                self._delete(chat_id)
            except ChatFileError as error:
                failure = error
        self.hidden.clear()
        if failure is not None:
            raise failure

    def _delete(self, chat_id: str) -> None:
        # Imported lazily to avoid delaying the first screen.
        from edgespec.api.saved_data import delete_chat

        with self._lock:
            self._forget_failure(chat_id)
            delete_chat(self.store, chat_id)
