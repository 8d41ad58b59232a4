"""Store and search chats, saved as JSON files that are written atomically and validated when read."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from difflib import SequenceMatcher
from pathlib import Path
from typing import NamedTuple, TypeAlias

from edgespec.chat.saved_chat import SavedChat, in_utc, read_chat
from edgespec.errors import ChatFileError
from edgespec.system.files import (
    data_folder,
    delete_stale_temporaries,
    error_reason,
    write_advice,
    write_private_file,
)

__all__ = ["ChatStore", "FoundChat", "StoredChat", "closest_chats", "find_chat", "search"]

# Maximum number of chats to suggest for a title that does not exist, and the least similarity of their words,
# from 0 to 1. The values were chosen.
_MAX_SIMILAR = 3
_MIN_SIMILARITY = 0.7

# Timeout in seconds for acquiring the lock while another program is saving a chat.
_LOCK_SECONDS = 5.0
_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}")
_FileState: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class StoredChat:
    """An entry in the list of saved chats.

    Attributes:
        id: Identifier of the chat.
        path: The file.
        title: The title, or the file name if the file is unreadable.
        updated: Time of the last change.
        message_count: Number of messages.
        unfinished: Whether the last message has no complete reply. See `SavedChat`.
        problem: Why the file is unreadable. Empty if it is readable.
        pinned: Whether the chat stays at the top of the list.
        text: The text of all messages and of the files attached to them, for searching.
        folded_text: `text`, case-folded for case-insensitive searches.
    """

    id: str
    path: Path
    title: str
    updated: datetime
    message_count: int
    unfinished: bool = False
    problem: str = ""
    pinned: bool = False
    text: str = field(default="", repr=False)
    folded_text: str = field(default="", repr=False)


class ChatStore:
    """A folder of saved chats, by default `chats` in the user's data folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder if folder is not None else data_folder() / "chats"
        # Cached entries, keyed by file name, with the file's modification time and size to detect changes.
        self._entries: dict[str, tuple[tuple[int, int], StoredChat]] = {}
        # The state of each file that this store has written, and the chat's time of change, keyed by chat ID.
        self._written: dict[str, tuple[_FileState, datetime]] = {}
        self._is_cleaned = False

    def new_id(self) -> str:
        """Return an unused chat ID, made from the current time and random digits."""
        while True:
            chat_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"
            if not os.path.exists(self._path(chat_id)):
                return chat_id

    def save(self, chat: SavedChat) -> Path:
        """Save a chat atomically, replacing any older version. Raises ChatFileError."""
        path, data = self._path(chat.id), chat.encoded()
        try:
            if not self._is_cleaned:
                # Do this only once, because looking for these files takes a long time if there are many
                # chats.
                self._is_cleaned = True
                delete_stale_temporaries(self.folder)
            write_private_file(path, data)
        except OSError as error:
            is_blocked = self.folder.exists() and not self.folder.is_dir()
            reason = f"{self.folder} is not a folder" if is_blocked else error_reason(error)
            raise ChatFileError(
                f"cannot save the chat to {path}: {reason}",
                write_advice(error, self.folder, "EDGESPEC_DATA_DIR"),
                code="file_not_written",
            ) from error
        if (state := _file_state(path)) is not None:
            self._written[chat.id] = state, chat.updated
        return path

    def add(self, chat: SavedChat) -> SavedChat:
        """Save an imported chat under a new ID, and return it with that ID. Raises ChatFileError."""
        added = replace(chat, id=self.new_id())
        self.save(added)
        return added

    def save_after(self, chat: SavedChat, known: datetime | None) -> SavedChat:
        """Save a chat. If another program has changed its file, save it under a new ID.

        Args:
            chat: The chat to save.
            known: The value of `updated` in the saved version that this chat is based on, or None.

        Returns:
            The chat, with the ID under which it was saved.

        Raises:
            ChatFileError: The chat could not be saved.
        """
        with self._locked():
            if known is not None and self._changed(chat.id, known):
                chat = replace(chat, id=self.new_id())
            self.save(chat)
        return chat

    def _changed(self, chat_id: str, known: datetime) -> bool:
        """Return whether another program has changed a chat since the time `known`."""
        path = self._path(chat_id)
        # Avoid reading the chat, which takes a long time if it contains images, because it is saved every
        # second during a reply.
        if self._written.get(chat_id) == (_file_state(path), known):
            return False
        try:
            return read_chat(path, chat_id, with_images=False).updated != known
        except ChatFileError:
            # Do not overwrite an unreadable file, which a newer version of edgespec may have written.
            return path.exists()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the folder during the `with` block, if the file system supports locks."""
        from filelock import FileLock, Timeout

        lock = FileLock(self.folder / ".lock", timeout=_LOCK_SECONDS, mode=0o600)
        with suppress(OSError, Timeout, NotImplementedError):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def size_bytes(self, chat_id: str) -> int:
        """Return the size of a chat's file, or 0 if it has none."""
        with suppress(OSError):
            return self._path(chat_id).stat().st_size
        return 0

    def load(self, chat_id: str) -> SavedChat:
        """Read the chat with this ID. Raises ChatFileError."""
        return read_chat(self._path(chat_id), chat_id)

    def delete(self, chat_id: str) -> None:
        """Delete the chat with this ID, hidden or not, if it exists.

        If another program has saved the chat again since it was hidden, that version is kept.

        Raises:
            ChatFileError: The chat could not be deleted.
        """
        path, hidden = self._path(chat_id), self._hidden_path(chat_id)
        try:
            (hidden if hidden.exists() else path).unlink(missing_ok=True)
        except OSError as error:
            raise ChatFileError(
                f"cannot delete {path}: {error_reason(error)}",
                write_advice(error, self.folder),
                code="file_not_written",
            ) from error

    def hide(self, chat_id: str) -> None:
        """Remove a chat from the list until it is restored or deleted. Raises ChatFileError on failure."""
        self._move(self._path(chat_id), self._hidden_path(chat_id), "delete")
        with suppress(OSError):
            os.utime(self._hidden_path(chat_id))

    def restore(self, chat_id: str) -> str:
        """Put a hidden chat back into the list.

        Returns:
            The chat's ID, which is new if another program has saved the chat again since it was hidden.

        Raises:
            ChatFileError: The chat could not be restored.
        """
        path, hidden = self._path(chat_id), self._hidden_path(chat_id)
        with self._locked():
            if not path.exists():
                self._move(hidden, path, "restore")
                return chat_id
            chat = replace(read_chat(hidden, chat_id), id=self.new_id())
            self.save(chat)
            with suppress(OSError):
                hidden.unlink()
        return chat.id

    def _move(self, path: Path, target: Path, purpose: str) -> None:
        try:
            path.rename(target)
        except OSError as error:
            raise ChatFileError(
                f"cannot {purpose} the chat {path}: {error_reason(error)}",
                write_advice(error, self.folder),
                code="file_not_written",
            ) from error

    def hidden_before(self, time: float) -> Sequence[str]:
        """Return the IDs of chats that were hidden before `time`, given in seconds since 1970."""
        hidden = []
        for path in self.folder.glob(".*.deleted"):
            chat_id = path.name[1 : -len(".deleted")]
            with suppress(OSError):
                if _ID.fullmatch(chat_id) and path.is_file() and path.stat().st_mtime < time:
                    hidden.append(chat_id)
        return hidden

    def _hidden_path(self, chat_id: str) -> Path:
        return self._path(chat_id).with_name(f".{chat_id}.deleted")

    def list(self) -> list[StoredChat]:
        """Return all chats, newest first. Unreadable files are listed too, each with the reason."""
        try:
            with os.scandir(self.folder) as files:
                found = [e for e in files if e.name.endswith(".json") and not e.name.startswith(".")]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ChatFileError(
                f"cannot list the chats in {self.folder}: {error_reason(error)}",
                f"check the permissions of {self.folder}, or set EDGESPEC_DATA_DIR to another folder",
                code="chat_file_unreadable",
            ) from error
        self._entries = dict(map(self._read_entry, found))
        entries = [entry for _, entry in self._entries.values()]
        return sorted(entries, key=lambda chat: (chat.updated, chat.id), reverse=True)

    def _read_entry(self, file: os.DirEntry[str]) -> tuple[str, tuple[tuple[int, int], StoredChat]]:
        """Return a file's name and its value in `_entries`, reading the file only if it has changed."""
        state = (0, 0)
        with suppress(OSError):
            status = file.stat()
            state = (status.st_mtime_ns, status.st_size)
        known = self._entries.get(file.name)
        if known is None or known[0] != state:
            known = state, _entry(self.folder / file.name)
        return file.name, known

    def _path(self, chat_id: str) -> Path:
        # The ID becomes a file name, so an invalid one could escape the folder.
        if not _ID.fullmatch(chat_id):
            raise ChatFileError(
                f"{chat_id!r} is not a chat ID",
                "choose one from the list of saved chats",
                code="chat_not_found",
            )
        return self.folder / f"{chat_id}.json"


def _file_state(path: Path) -> _FileState | None:
    """Return a value that changes whenever the file is written, or None if there is no such file."""
    with suppress(OSError):
        status = path.stat()
        # Each save replaces the file, so the inode differs even if the clock is too coarse.
        return status.st_ino, status.st_mtime_ns, status.st_size
    return None


def _entry(path: Path) -> StoredChat:
    try:
        chat = read_chat(path, path.stem, with_images=False)
    except ChatFileError as error:
        updated = datetime.fromtimestamp(0, UTC)
        with suppress(OSError, ValueError, OverflowError):
            updated = in_utc(datetime.fromtimestamp(path.stat().st_mtime, UTC))
        return StoredChat(path.stem, path, path.name, updated, 0, problem=error.what)
    text = "\n".join(
        each
        for message in chat.tree.messages
        for each in (message.content, *(text for file in message.files for text in (file.name, file.text)))
    )
    return StoredChat(
        *(path.stem, path, chat.title, chat.updated, len(chat.messages), chat.unfinished),
        pinned=chat.pinned,
        text=text,
        folded_text=text.casefold(),
    )


class FoundChat(NamedTuple):
    """A chat that contains all words of a query.

    Attributes:
        chat: The chat.
        line: The best-matching line in the messages. Empty if the title contains all words.
    """

    chat: StoredChat
    line: str = ""


def search(chats: Sequence[StoredChat], query: str) -> list[FoundChat]:
    """Return the chats whose title or messages contain all words of `query`, ignoring case.

    Pinned chats come first. Otherwise, the order is unchanged. An empty query matches all chats.
    """
    words = query.casefold().split()
    found = []
    for chat in chats:
        title = chat.title.casefold()
        missing = [word for word in words if word not in title]
        if not missing:
            found.append(FoundChat(chat))
        elif all(word in chat.folded_text for word in missing):
            found.append(FoundChat(chat, _best_line(chat, missing)))
    return sorted(found, key=lambda each: not each.chat.pinned)


def find_chat(chats: Sequence[StoredChat], wanted: str) -> StoredChat | None:
    """Return the chat with the ID `wanted`, or else the first chat whose title contains `wanted`.

    Args:
        chats: The chats, newest first.
        wanted: An ID, part of a title, or `last` for the newest readable chat.

    Returns:
        The chat, or None if there is no such chat.
    """
    if wanted == "last":
        return next((chat for chat in chats if not chat.problem), None)
    words = wanted.casefold()
    same_id = next((chat for chat in chats if chat.id == wanted), None)
    return same_id or next((chat for chat in chats if words in chat.title.casefold()), None)


def closest_chats(chats: Sequence[StoredChat], wanted: str) -> list[StoredChat]:
    """Return the chats whose titles are most similar to `wanted`, at most three, the most similar first."""
    words = wanted.casefold().split()
    scores = {}
    for chat in chats:
        title = chat.title.casefold().split()
        best = (
            max((SequenceMatcher(None, word, each).ratio() for each in title), default=0.0) for word in words
        )
        scores[chat.id] = sum(best) / max(1, len(words))
    similar = [chat for chat in chats if not chat.problem and scores[chat.id] >= _MIN_SIMILARITY]
    return sorted(similar, key=lambda chat: -scores[chat.id])[:_MAX_SIMILAR]


def _best_line(chat: StoredChat, words: Sequence[str]) -> str:
    """Return the line that contains the most of `words`, trimmed to start shortly before the first match."""
    lines = chat.folded_text.splitlines()
    with_all = (number for number, line in enumerate(lines) if all(word in line for word in words))
    number = next(with_all, -1)
    if number < 0:
        number = max(range(len(lines)), key=lambda each: sum(word in lines[each] for word in words))
    folded, best = lines[number], chat.text.splitlines()[number]
    first = min((at for word in words if (at := folded.find(word)) >= 0), default=0)
    start = best.rfind(" ", 0, max(0, first - 12)) + 1
    return ("…" if start else "") + best[start:].strip()
