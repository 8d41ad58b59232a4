"""Saved chats. Each is a versioned JSON file that is written atomically and validated when read.

A file that cannot be read is reported and left unchanged.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from edgespec.chat.message import Message, as_message
from edgespec.chat.message_tree import MessageTree
from edgespec.errors import ChatFileError, OptionError
from edgespec.files import (
    data_folder,
    delete_stale_temporaries,
    error_reason,
    regular_file_bytes,
    write_advice,
    write_private_file,
)

__all__ = ["ChatStore", "SavedChat", "Setting", "StoredChat", "chat_from_json", "title_of"]

Setting = str | int | float | bool | list[str]
"""Type of the value of one setting in a chat file."""

# The version of the file format. Files of version 1, which had no versions of messages, can still be read.
VERSION = 2
# Maximum length, in characters, of a title taken from the first message.
_MAX_TITLE = 60
# Maximum time in seconds to wait while another program is saving a chat.
_LOCK_SECONDS = 5.0
# Files above this size are rejected without being read. No real chat gets this long.
_MAX_FILE_BYTES = 64 * 1024 * 1024
_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}")
_TEXTS = ("id", "created", "updated", "title", "target")
_KINDS: dict[type, str] = {
    dict: "an object", list: "a list", str: "text", int: "an integer", bool: "true or false",
    type(None): "missing",
}  # fmt: skip
_T = TypeVar("_T")


def title_of(messages: Sequence[Message]) -> str:
    """Return a short title taken from the first user message."""
    first = next((m.content for m in messages if m.role == "user"), "")
    line = " ".join(first.split())
    if len(line) <= _MAX_TITLE:
        return line or "New chat"
    head, _, _ = line[: _MAX_TITLE - 1].rpartition(" ")
    return (head or line[: _MAX_TITLE - 1]) + "…"


@dataclass(frozen=True, slots=True)
class SavedChat:
    """A chat as saved to a file.

    Attributes:
        id: Identifier of the chat, which is also its file name.
        tree: All messages, including earlier versions of edited messages and earlier replies.
        created: Time of creation, in UTC.
        updated: Time of the last change, in UTC.
        title: The title. If empty, it is taken from the first message.
        target: Name of the model.
        system: The system prompt.
        sampling: Settings that differ from their defaults.
        unfinished: Whether the last message has no reply or an incomplete one, because the program ended
            early.
        pinned: Whether the chat stays at the top of the list of chats.
    """

    id: str
    tree: MessageTree[Message]
    created: datetime
    updated: datetime
    title: str = ""
    target: str = ""
    system: str | None = None
    sampling: Mapping[str, Setting] = field(default_factory=dict)
    unfinished: bool = False
    pinned: bool = False

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages on the current branch, with one version of each."""
        return self.tree.open_messages

    def to_json(self) -> dict[str, object]:
        """Return the chat as a JSON object of the current format version."""
        return {
            "version": VERSION,
            "id": self.id,
            "title": self.title or title_of(self.messages),
            "created": self.created.isoformat(),
            "updated": self.updated.isoformat(),
            "target": self.target,
            "system": self.system,
            "messages": _tree_json(self.tree),
            "open": self.tree.tip,
            "sampling": dict(self.sampling),
            **({"unfinished": True} if self.unfinished else {}),
            **({"pinned": True} if self.pinned else {}),
        }


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
        text: The text of all messages, for searching.
        folded_text: `text` with case folded, for searches that ignore case.
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
        # The entries read so far. Each has the file's modification time and size, to notice changes.
        self._entries: dict[Path, tuple[tuple[int, int], StoredChat]] = {}

    def new_id(self) -> str:
        """Return an unused chat ID made of the current time and random digits."""
        while True:
            chat_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"
            if not os.path.exists(self._path(chat_id)):
                return chat_id

    def save(self, chat: SavedChat) -> Path:
        """Save a chat atomically, replacing any older version. Raises ChatFileError."""
        path = self._path(chat.id)
        # Pasted text can contain lone surrogates, which cannot be encoded as UTF-8 and are replaced.
        text = json.dumps(chat.to_json(), ensure_ascii=False, indent=1) + "\n"
        try:
            if not path.exists():
                delete_stale_temporaries(self.folder)
            write_private_file(path, text.encode("utf-8", "replace"))
        except OSError as error:
            raise ChatFileError(
                f"cannot save the chat to {path}: {error_reason(error)}",
                write_advice(error, self.folder, "EDGESPEC_DATA_DIR"),
            ) from error
        return path

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
        try:
            return self.load(chat_id).updated != known
        except ChatFileError:
            # Do not overwrite an unreadable file, because a newer version of edgespec may have written it.
            return self._path(chat_id).exists()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock out other programs during the `with` block, if the file system supports locks."""
        from filelock import FileLock, Timeout

        lock = FileLock(self.folder / ".lock", timeout=_LOCK_SECONDS, mode=0o600)
        with suppress(OSError, Timeout, NotImplementedError):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def load(self, chat_id: str) -> SavedChat:
        """Read the chat with this ID. Raises ChatFileError."""
        return read_chat(self._path(chat_id), chat_id)

    def delete(self, chat_id: str) -> None:
        """Delete the chat with this ID, hidden or not, if it exists.

        If another program still had a hidden chat open and has saved it again, that version is kept.

        Raises:
            ChatFileError: The chat could not be deleted.
        """
        path, hidden = self._path(chat_id), self._hidden_path(chat_id)
        try:
            (hidden if hidden.exists() else path).unlink(missing_ok=True)
        except OSError as error:
            raise ChatFileError(
                f"cannot delete {path}: {error_reason(error)}", write_advice(error, self.folder)
            ) from error

    def hide(self, chat_id: str) -> None:
        """Remove a chat from the list until it is restored or deleted. Raises ChatFileError on failure."""
        self._move(self._path(chat_id), self._hidden_path(chat_id))
        with suppress(OSError):
            os.utime(self._hidden_path(chat_id))

    def restore(self, chat_id: str) -> str:
        """Put a hidden chat back into the list.

        Returns:
            The ID of the chat. It is a new one if another program still had the chat open and has saved it
            again.

        Raises:
            ChatFileError: The chat could not be restored.
        """
        path, hidden = self._path(chat_id), self._hidden_path(chat_id)
        with self._locked():
            if not path.exists():
                self._move(hidden, path)
                return chat_id
            chat = replace(read_chat(hidden, chat_id), id=self.new_id())
            self.save(chat)
            with suppress(OSError):
                hidden.unlink()
        return chat.id

    def _move(self, path: Path, target: Path) -> None:
        try:
            path.rename(target)
        except OSError as error:
            raise ChatFileError(
                f"cannot rename {path} to {target.name}: {error_reason(error)}",
                write_advice(error, self.folder),
            ) from error

    def hidden_before(self, time: float) -> Sequence[str]:
        """Return the IDs of chats that were hidden before `time`, given in seconds since 1970."""
        hidden = []
        for path in self.folder.glob(".*.deleted"):
            with suppress(OSError):
                if path.stat().st_mtime < time:
                    hidden.append(path.name[1 : -len(".deleted")])
        return hidden

    def _hidden_path(self, chat_id: str) -> Path:
        return self._path(chat_id).with_name(f".{chat_id}.deleted")

    def list(self) -> list[StoredChat]:
        """Return all chats, newest first, including unreadable files and why they cannot be read."""
        try:
            paths = [p for p in self.folder.iterdir() if p.suffix == ".json" and not p.name.startswith(".")]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ChatFileError(
                f"cannot list the chats in {self.folder}: {error_reason(error)}",
                "set EDGESPEC_DATA_DIR to a folder you can read",
            ) from error
        self._entries = {path: self._read_entry(path) for path in paths}
        entries = [entry for _, entry in self._entries.values()]
        return sorted(entries, key=lambda chat: (chat.updated, chat.id), reverse=True)

    def _read_entry(self, path: Path) -> tuple[tuple[int, int], StoredChat]:
        """Return the entry of a file, and the file's modification time and size. Read only changed files."""
        state = (0, 0)
        with suppress(OSError):
            state = (path.stat().st_mtime_ns, path.stat().st_size)
        known = self._entries.get(path)
        return known if known is not None and known[0] == state else (state, _entry(path))

    def _path(self, chat_id: str) -> Path:
        # The ID becomes a file name, so an invalid one could point to another folder.
        if not _ID.fullmatch(chat_id):
            raise ChatFileError(f"{chat_id!r} is not a chat ID", "choose one from the list of saved chats")
        return self.folder / f"{chat_id}.json"


def _message_json(message: Message) -> dict[str, object]:
    data: dict[str, object] = {"role": message.role, "content": message.content}
    if message.reasoning:
        data["reasoning"] = message.reasoning
    if any(message.markers):
        data["markers"] = list(message.markers)
    if message.files:
        data["files"] = [file.to_json() for file in message.files]
    if message.tool_calls:
        data["tool_calls"] = [call.to_json() for call in message.tool_calls]
    if message.role == "tool":
        data |= {"tool_call_id": message.tool_call_id, "name": message.name}
    return data


def _tree_json(tree: MessageTree[Message]) -> list[dict[str, object]]:
    """Return all messages. `parent` is the index of a message's parent, omitted if it is the previous one."""
    previous: int | None = None
    items = []
    for place, (message, parent) in enumerate(zip(tree.messages, tree.parents, strict=True)):
        items.append(_message_json(message) | ({} if parent == previous else {"parent": parent}))
        previous = place
    return items


def _entry(path: Path) -> StoredChat:
    try:
        chat = read_chat(path, path.stem)
    except ChatFileError as error:
        updated = datetime.fromtimestamp(0, UTC)
        with suppress(OSError):
            updated = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        return StoredChat(path.stem, path, path.name, updated, 0, problem=error.what)
    text = "\n".join(message.content for message in chat.tree.messages)
    return StoredChat(
        *(path.stem, path, chat.title, chat.updated, len(chat.messages), chat.unfinished),
        pinned=chat.pinned,
        text=text,
        folded_text=text.casefold(),
    )


def read_chat(path: Path, chat_id: str) -> SavedChat:
    """Read and validate the file of the chat with this ID. Raises ChatFileError."""
    try:
        size_bytes = regular_file_bytes(path)
        if size_bytes > _MAX_FILE_BYTES:
            raise ValueError(f"the file has {size_bytes:,} bytes, which is too large for a chat")
        return _checked(path, chat_id, json.loads(path.read_bytes().decode("utf-8")))
    except FileNotFoundError:
        raise ChatFileError(f"there is no saved chat at {path}", "choose from the list of chats") from None
    except OSError as error:
        raise ChatFileError(
            f"cannot read {path.name}: {error_reason(error)}", f"check the permissions of {path}"
        ) from error
    except UnicodeDecodeError as error:
        reason = f"the file is not UTF-8 text (byte {error.start})"
    except json.JSONDecodeError as error:
        reason = f"the file is not complete JSON ({error.msg} at line {error.lineno}, column {error.colno})"
    except RecursionError:
        reason = "its JSON is nested too deeply"
    except OptionError as error:
        reason = error.what
    except ValueError as error:
        reason = str(error)
    raise ChatFileError(
        f"{path.name} is not a valid chat file: {reason}",
        f"repair or move {path}; other chats are not affected",
    )


def _checked(path: Path, chat_id: str, json_value: object) -> SavedChat:
    data = _typed(json_value, dict, "the file")
    version = _typed(data.get("version"), int, "`version`")
    if not 1 <= version <= VERSION:
        raise ChatFileError(
            f"{path.name} has format version {version}, but this version of edgespec reads only versions 1"
            f" to {VERSION}",
            "upgrade edgespec, or open the chat with the version that wrote it",
        )
    chat = _from_json(data, version)
    if chat.id != chat_id:
        raise ValueError(f"the chat ID {chat.id[:80]!r} does not match the file name")
    return chat


def chat_from_json(data: Mapping[str, object]) -> SavedChat:
    """Return the chat, without an ID, from a JSON object created by `SavedChat.to_json`.

    Raises:
        ValueError: The object is invalid.
    """
    version = _typed(data.get("version"), int, "`version`")
    if not 1 <= version <= VERSION:
        raise ValueError(
            f"the chat has format version {version}, but only versions 1 to {VERSION} are supported"
        )
    return replace(_from_json(data, version), id="")


def _from_json(data: Mapping[str, object], version: int) -> SavedChat:
    texts = {name: _typed(data.get(name), str, f"`{name}`") for name in _TEXTS}
    items = _typed(data.get("messages"), list, "`messages`")
    tree = MessageTree.linear(as_message(number, item) for number, item in enumerate(items, 1))
    if version > 1:
        parents = tuple(_parent(place, item) for place, item in enumerate(items))
        tip = _place("`open`", data.get("open"), len(items))
        tree = MessageTree(tree.messages, parents, tree.tip if tip is None else tip)
    system = data.get("system")
    sampling = _typed(data.get("sampling"), dict, "`sampling`")
    return SavedChat(
        id=texts["id"],
        tree=tree,
        created=_time("created", texts["created"]),
        updated=_time("updated", texts["updated"]),
        title=" ".join(texts["title"].split()) or title_of(tree.open_messages),
        target=texts["target"],
        system=None if system is None else _typed(system, str, "`system`"),
        sampling={name: _setting(name, value) for name, value in sampling.items()},
        unfinished=_typed(data.get("unfinished", False), bool, "`unfinished`"),
        pinned=_typed(data.get("pinned", False), bool, "`pinned`"),
    )


def _parent(place: int, item: Mapping[str, object]) -> int | None:
    """Return the index of a message's parent. Raises ValueError unless the parent precedes the message."""
    previous = place - 1 if place else None
    return _place(f"`parent` of message {place + 1}", item.get("parent", previous), place)


def _place(name: str, value: object, end: int) -> int | None:
    if value is None:
        return None
    place = _typed(value, int, name)
    if not 0 <= place < end:
        raise ValueError(f"{name} must be at least 0 and less than {end}, not {place}")
    return place


def _typed(value: object, kind: type[_T], name: str) -> _T:
    if type(value) is not kind:
        raise ValueError(f"{name} must be {_KINDS[kind]}, not {_KINDS.get(type(value), 'a number')}")
    return value


def _time(name: str, text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        raise ValueError(f"`{name}` must be an ISO 8601 time, not {text[:40]!r}") from None


def _setting(name: str, value: object) -> Setting:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    if isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise ValueError(f"the setting {name[:40]!r} must not be {_KINDS.get(type(value), value)}")
