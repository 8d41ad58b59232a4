"""Saved chats. Each is a versioned JSON file that is written atomically and validated when read.

A file that cannot be read is reported and left unchanged.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from edgespec.chat.message import Message, Role
from edgespec.errors import ChatFileError
from edgespec.files import (
    data_folder,
    delete_stale_temporaries,
    error_reason,
    regular_file_bytes,
    write_private_file,
)

__all__ = ["ChatStore", "SavedChat", "Setting", "StoredChat", "title_of"]

Setting = str | int | float | bool | list[str]
"""Type of the value of one setting in a chat file."""

VERSION = 1
# Maximum length, in characters, of a title made from the first message.
_MAX_TITLE = 60
# Maximum time to wait while another program is saving.
_LOCK_SECONDS = 5.0
# Files above this size are rejected without being read. No real chat gets this long.
_MAX_FILE_BYTES = 64 * 1024 * 1024
_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}")
_ROLES: dict[str, Role] = {"user": "user", "assistant": "assistant", "system": "system"}


def title_of(messages: Sequence[Message]) -> str:
    """Return a short title made from the first user message."""
    first = next((m.content for m in messages if m.role == "user"), "")
    line = " ".join(first.split())
    if len(line) <= _MAX_TITLE:
        return line or "New chat"
    head, _, _ = line[: _MAX_TITLE - 1].rpartition(" ")
    return (head or line[: _MAX_TITLE - 1]) + "…"


@dataclass(frozen=True, slots=True)
class SavedChat:
    """A chat as it is saved to a file.

    Attributes:
        id: Identifier of the chat, which is also its file name.
        messages: The conversation.
        created: Time of creation, in UTC.
        updated: Time of the last change, in UTC.
        title: The title. Made from the first message if empty.
        target: Name of the model.
        system: The system prompt.
        sampling: Settings that differ from their defaults.
    """

    id: str
    messages: tuple[Message, ...]
    created: datetime
    updated: datetime
    title: str = ""
    target: str = ""
    system: str | None = None
    sampling: Mapping[str, Setting] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """Return the chat as the JSON object of format version 1."""
        return {
            "version": VERSION,
            "id": self.id,
            "title": self.title or title_of(self.messages),
            "created": self.created.isoformat(),
            "updated": self.updated.isoformat(),
            "target": self.target,
            "system": self.system,
            "messages": [{"role": m.role, "content": m.content} for m in self.messages],
            "sampling": dict(self.sampling),
        }


@dataclass(frozen=True, slots=True)
class StoredChat:
    """An entry of the list of saved chats.

    Attributes:
        id: Identifier of the chat.
        path: The file.
        title: The title, or the file name if the file cannot be read.
        updated: Time of the last change.
        message_count: Number of messages.
        problem: Why the file cannot be read; empty if it can.
    """

    id: str
    path: Path
    title: str
    updated: datetime
    message_count: int
    problem: str = ""


class ChatStore:
    """Folder of saved chats. Defaults to `chats` in the user's data folder if None."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder if folder is not None else data_folder() / "chats"

    def new_id(self) -> str:
        """Return a new, unused id made of the current time and random digits."""
        while True:
            stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
            chat_id = f"{stamp}-{secrets.token_hex(4)}"
            if not self._path(chat_id).exists():
                return chat_id

    def save(self, chat: SavedChat) -> Path:
        """Save a chat atomically, replacing the older version. Raises ChatFileError."""
        path = self._path(chat.id)
        # Pasted text can contain lone surrogates, which cannot be encoded as UTF-8.
        text = json.dumps(chat.to_json(), ensure_ascii=False, indent=1)
        payload = text.encode("utf-8", "replace") + b"\n"
        if not path.exists():
            delete_stale_temporaries(self.folder)
        try:
            write_private_file(path, payload)
        except OSError as error:
            raise ChatFileError(
                f"cannot save the chat to {path}: {error_reason(error)}",
                "free some space or set EDGESPEC_DATA_DIR to a folder you can write to",
            ) from error
        return path

    def save_after(self, chat: SavedChat, known: datetime | None) -> SavedChat:
        """Save a chat unless another program has changed its file.

        If another program has changed it, the file is left unchanged and the chat is saved under a new id.

        Args:
            chat: The chat to save.
            known: The time `updated` of the saved version that this chat is based on, or None if there is
                none.

        Returns:
            The chat with the id that it was saved under.

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
            # Recreate a deleted file. Keep a file that cannot be read, because a newer version may have
            # written it.
            return self._path(chat_id).exists()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the folder against other programs while the block runs, if the file system supports locks."""
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
        """Read a chat by its id. Raises ChatFileError."""
        return read_chat(self._path(chat_id))

    def delete(self, chat_id: str) -> None:
        """Delete a chat by its id. Does nothing if it does not exist. Raises ChatFileError."""
        path = self._path(chat_id)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise ChatFileError(
                f"cannot delete {path}: {error_reason(error)}", "check the permissions of its folder"
            ) from error

    def list(self) -> list[StoredChat]:
        """Return all chats, newest first. Unreadable files are included, with the problem."""
        try:
            paths = [p for p in self.folder.iterdir() if p.suffix == ".json" and not p.name.startswith(".")]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ChatFileError(
                f"cannot list the chats in {self.folder}: {error_reason(error)}",
                "set EDGESPEC_DATA_DIR to a folder you can read",
            ) from error
        return sorted(
            (_entry(path) for path in paths), key=lambda chat: (chat.updated, chat.id), reverse=True
        )

    def _path(self, chat_id: str) -> Path:
        # The id becomes a file name, so reject ids that could lead to another folder.
        if not _ID.fullmatch(chat_id):
            raise ChatFileError(f"{chat_id!r} is not a chat id", "use an id from the list of saved chats")
        return self.folder / f"{chat_id}.json"


def _entry(path: Path) -> StoredChat:
    try:
        chat = read_chat(path)
    except ChatFileError as error:
        try:
            updated = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        except OSError:
            updated = datetime.fromtimestamp(0, UTC)
        return StoredChat(path.stem, path, path.name, updated, 0, problem=error.what)
    return StoredChat(path.stem, path, chat.title, chat.updated, len(chat.messages))


def read_chat(path: Path) -> SavedChat:
    """Read and validate one chat file. Raises ChatFileError."""
    try:
        size_bytes = regular_file_bytes(path)
        if size_bytes > _MAX_FILE_BYTES:
            raise _broken(path, f"it has {size_bytes:,} bytes, more than a chat can have")
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise ChatFileError(f"there is no saved chat at {path}", "pick one from the list of chats") from None
    except OSError as error:
        raise ChatFileError(
            f"cannot read {path.name}: {error_reason(error)}", f"check the permissions of {path}"
        ) from error
    except UnicodeDecodeError as error:
        raise _broken(path, f"it is not UTF-8 text (byte {error.start})") from None
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise _broken(path, f"it is not complete JSON ({error.msg} at {where})") from None
    except (RecursionError, ValueError):
        raise _broken(path, "its JSON cannot be read") from None
    return _checked(path, data)


def _checked(path: Path, data: object) -> SavedChat:
    if not isinstance(data, dict):
        raise _broken(path, f"it must hold a chat object, not {_kind(data)}")
    version = data.get("version")
    if isinstance(version, bool) or not isinstance(version, int):
        raise _broken(path, f"its version must be a whole number, not {version!r}")
    if version != VERSION:
        raise ChatFileError(
            f"{path.name} has format version {version}, and this edgespec reads version {VERSION}",
            "open it with the edgespec that wrote it, or upgrade edgespec",
        )
    messages = data.get("messages")
    if not isinstance(messages, list):
        raise _broken(path, f"`messages` must be a list, not {_kind(messages)}")
    system = data.get("system")
    if system is not None and not isinstance(system, str):
        raise _broken(path, f"`system` must be text, not {_kind(system)}")
    checked = tuple(_message(path, number, item) for number, item in enumerate(messages, 1))
    chat_id = _text(path, data, "id")
    if chat_id != path.stem:
        raise _broken(path, f"its id {chat_id[:80]!r} is not its file name")
    return SavedChat(
        id=chat_id,
        messages=checked,
        created=_time(path, data, "created"),
        updated=_time(path, data, "updated"),
        title=" ".join(_text(path, data, "title").split()) or title_of(checked),
        target=_text(path, data, "target"),
        system=system,
        sampling=_sampling(path, data.get("sampling")),
    )


def _message(path: Path, number: int, item: object) -> Message:
    if not isinstance(item, dict):
        raise _broken(path, f"message {number} must be an object, not {_kind(item)}")
    name, content = item.get("role"), item.get("content")
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise _broken(path, f"message {number} has the role {name!r}")
    if not isinstance(content, str):
        raise _broken(path, f"the content of message {number} must be text, not {_kind(content)}")
    return Message(role, content)


def _text(path: Path, data: dict[str, object], name: str) -> str:
    value = data.get(name)
    if not isinstance(value, str):
        raise _broken(path, f"`{name}` must be text, not {_kind(value)}")
    return value


def _time(path: Path, data: dict[str, object], name: str) -> datetime:
    text = _text(path, data, name)
    try:
        moment = datetime.fromisoformat(text)
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        raise _broken(path, f"`{name}` must be a time, not {text[:40]!r}") from None


def _sampling(path: Path, value: object) -> dict[str, Setting]:
    if not isinstance(value, dict):
        raise _broken(path, f"`sampling` must be an object, not {_kind(value)}")
    settings: dict[str, Setting] = {}
    for name, setting in value.items():
        if isinstance(setting, list) and all(isinstance(item, str) for item in setting):
            settings[name] = list(setting)
        elif isinstance(setting, str | bool | int) or (isinstance(setting, float) and math.isfinite(setting)):
            settings[name] = setting
        else:
            raise _broken(path, f"the setting {name[:40]!r} is {_kind(setting)}")
    return settings


def _broken(path: Path, why: str) -> ChatFileError:
    return ChatFileError(
        f"{path.name} is not a readable chat: {why}", f"repair or move {path}; other chats are not affected"
    )


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "missing"}
    return names.get(type(value), "a number")
