"""Import chats from files exported by ChatGPT, Claude, Open WebUI and edgespec."""

from __future__ import annotations

import io
import json
import shutil
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from edgespec.chat.message import Message, Role
from edgespec.chat.saved_chat import MAX_SAVED_BYTES, MessageTree, SavedChat, chat_from_json, in_utc
from edgespec.errors import ChatFileError
from edgespec.system.files import error_reason, regular_file_bytes

__all__ = ["ExportedChats", "ItemTooLargeError", "json_items"]

# Initial read size in characters. Doubles on each further read for the same item, so that the total time
# stays linear in the item's length.
_PART_CHARACTERS = 1 << 20


class ItemTooLargeError(Exception):
    """Raised when an item in the list exceeds the maximum length."""


def json_items(stream: TextIO, max_characters: int) -> Iterator[Any]:
    """Yield the items of a JSON list, or the value itself if it is not a list.

    Memory use is bounded by the largest item rather than the length of the list.

    Args:
        stream: The JSON text.
        max_characters: Maximum length of an item.

    Raises:
        ItemTooLargeError: An item is too long.
        RecursionError: An item is nested too deeply.
        ValueError: The text is not valid JSON.
    """
    reader = _Reader(stream, max_characters)
    if not reader.skip("["):
        yield reader.value()
    elif not reader.skip("]"):
        yield reader.value()
        while reader.skip(","):
            yield reader.value()
        if not reader.skip("]"):
            raise ValueError("the list is incomplete")
    if not reader.is_at_end():
        raise ValueError("there is more text after the JSON value")


class _Reader:
    def __init__(self, stream: TextIO, max_characters: int) -> None:
        self._stream, self._max_characters = stream, max_characters
        self._decode = json.JSONDecoder().raw_decode
        # `_at` is the position of the first character that has not been parsed yet.
        self._text, self._at = "", 0

    def skip(self, mark: str) -> bool:
        """Skip the character `mark` if it comes next, and return whether it did."""
        if self.is_at_end() or self._text[self._at] != mark:
            return False
        self._at += 1
        return True

    def is_at_end(self) -> bool:
        """Skip whitespace, and return whether the text has ended."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text):
                return False
            if not self._read(_PART_CHARACTERS):
                return True

    def value(self) -> Any:
        """Parse the next JSON value. Raises ValueError or ItemTooLargeError."""
        if self.is_at_end():
            raise ValueError("a value is missing")
        size = _PART_CHARACTERS
        while True:
            try:
                value, end = self._decode(self._text, self._at)
                # A number at the end of the text may be incomplete.
                if end < len(self._text) or not self._read(size):
                    self._at = end
                    return value
            except ValueError:
                # The value may just be incomplete, so read more.
                if len(self._text) - self._at > self._max_characters:
                    raise ItemTooLargeError from None
                if not self._read(size):
                    raise
            size *= 2

    def _read(self, characters: int) -> bool:
        """Read more text, and discard the text before `_at`. Return False at the end of the text."""
        more = self._stream.read(characters)
        if more:
            self._text, self._at = self._text[self._at :] + more, 0
        return bool(more)


# Maximum size of a file in bytes. Larger files are rejected without being read.
_MAX_FILE_BYTES = 1 << 30
# Maximum length of one chat in a file, in characters. Every chat that edgespec can save can be exported and
# imported again. Limits memory use to about 4 GiB, even if the file is malicious.
_MAX_CHAT_CHARACTERS = MAX_SAVED_BYTES
# Name of the file that contains the chats in the ZIP exports of ChatGPT and Claude.
_CHATS_IN_ZIP = "conversations.json"
_WITHOUT_MESSAGES = "chats without messages"
_ROLES: dict[str, Role] = {"user": "user", "human": "user", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True, slots=True)
class _Node:
    """A message from another program.

    `message` is None if the message itself cannot be imported. Its replies may still be importable.
    """

    parent: object
    message: Message | None


class ExportedChats:
    """The chats in an exported file: a JSON file, or a ZIP file that contains `conversations.json`.

    Iteration reads the file and yields the chats one at a time, each with an empty ID, so that large files
    need little memory. It raises ChatFileError if the file is unreadable or contains no chats in a known
    format.

    Args:
        path: The file.

    Attributes:
        path: The file.
        read_count: The number of chats read so far.
        left_out: Number of items that could not be imported so far, by kind, such as `attached files`.
    """

    def __init__(self, path: Path) -> None:
        self.read_count = 0
        self.left_out: Counter[str] = Counter()
        self.path = path

    def __iter__(self) -> Iterator[SavedChat]:
        for item in self._items():
            try:
                chat = _chat(item, self.left_out)
            except (ValueError, ChatFileError, OverflowError):
                self.left_out["chats that are damaged or in an unknown format"] += 1
            else:
                if chat.tree.messages:
                    self.read_count += 1
                    yield chat
                else:
                    self.left_out[_WITHOUT_MESSAGES] += 1
        if not self.read_count and not self.left_out[_WITHOUT_MESSAGES]:
            raise ChatFileError(
                f"{self.path.name} contains no chats in a known format",
                "choose a file exported from ChatGPT, Claude, Open WebUI or edgespec",
                code="wrong_file",
            )

    def _items(self) -> Iterator[Any]:
        path = self.path
        try:
            with _opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig") as text:
                yield from json_items(text, _MAX_CHAT_CHARACTERS)
        except OSError as error:
            raise ChatFileError(
                f"cannot read {path}: {error_reason(error)}",
                "check the path and the permissions of the file",
                code="chat_file_unreadable",
            ) from error
        except ItemTooLargeError as error:
            raise ChatFileError(
                f"cannot read {path}: a chat in it has more than {_MAX_CHAT_CHARACTERS:,} characters",
                "remove that chat from the file",
                code="chat_too_large",
            ) from error
        except (ValueError, RecursionError) as error:
            raise ChatFileError(
                f"{path.name} is not a chat export: it is not valid JSON",
                "choose a JSON or ZIP file exported from ChatGPT, Claude, Open WebUI or edgespec",
                code="wrong_file",
            ) from error


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open the JSON text in an exported file. Raises OSError if that fails."""
    if regular_file_bytes(path) > _MAX_FILE_BYTES:
        raise OSError(f"the file is larger than {_MAX_FILE_BYTES >> 30} GiB")
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            yield file
        return
    # Decompress the whole file up front, because a damaged archive raises errors only while it is being read.
    with tempfile.TemporaryFile() as unpacked:
        _unpack(path, unpacked)
        unpacked.seek(0)
        yield unpacked


def _unpack(path: Path, unpacked: BinaryIO) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            entry = archive.getinfo(_CHATS_IN_ZIP)
            if entry.file_size > _MAX_FILE_BYTES:
                raise OSError(f"{_CHATS_IN_ZIP} is larger than {_MAX_FILE_BYTES >> 30} GiB")
            with archive.open(entry) as packed:
                shutil.copyfileobj(packed, unpacked)
    except KeyError:
        raise OSError(f"the ZIP file contains no {_CHATS_IN_ZIP}") from None
    except OSError:
        raise
    except Exception as error:
        # A damaged file can raise various errors, depending on its compression method, so catch all of them.
        raise OSError("the ZIP file is damaged or encrypted") from error


def _chat(item: Any, left_out: Counter[str]) -> SavedChat:
    """Convert a chat in any known format. Raises ValueError or ChatFileError if the format is unknown."""
    if not isinstance(item, dict):
        raise ValueError("a chat in the file is not a JSON object")
    if "version" in item and "created" in item:
        return chat_from_json(item)
    if isinstance(item.get("mapping"), dict):
        nodes = {key: _chatgpt_node(node, left_out) for key, node in item["mapping"].items()}
        tip, title, times = item.get("current_node"), item.get("title"), ("create_time", "update_time")
    elif isinstance(item.get("chat_messages"), list):
        nodes = _listed(item["chat_messages"], "uuid", "parent_message_uuid", _claude_message, left_out)
        tip, title = item.get("current_leaf_message_uuid"), item.get("name")
        times = ("created_at", "updated_at")
    elif isinstance(chat := item.get("chat"), dict):
        history = _object(chat.get("history"))
        messages = _objects([*_object(history.get("messages")).values()]) or _objects(chat.get("messages"))
        nodes = _listed(messages, "id", "parentId", _open_webui_message, left_out)
        tip, title = history.get("currentId"), item.get("title") or chat.get("title")
        times = ("created_at", "updated_at")
    else:
        raise ValueError("the format of the chat is unknown")
    created = _time(item.get(times[0]))
    updated = max(created, _time(item.get(times[1])))
    return SavedChat(
        "", _tree(nodes, tip), created, updated, " ".join(title.split()) if isinstance(title, str) else ""
    )


def _tree(nodes: Mapping[object, _Node], tip: object) -> MessageTree[Message]:
    """Build a message tree whose current branch ends at `tip`, or at the last message if `tip` is unknown."""
    tree: MessageTree[Message] = MessageTree()
    messages: list[Message] = []
    parents: list[int | None] = []
    places: dict[object, int | None] = {}
    for key in nodes:
        # Add the ancestors of this message first. Stop if they form a cycle.
        waiting: dict[object, None] = {}
        while key in nodes and key not in places and key not in waiting:
            waiting[key] = None
            key = nodes[key].parent
        place = places.get(key)
        for each in reversed(waiting):
            message = nodes[each].message
            if message is not None:
                messages.append(message)
                parents.append(place)
                place = len(messages) - 1
            places[each] = place
    if not messages:
        return tree
    end = places.get(tip) if isinstance(tip, str | int) else None
    tree = MessageTree(tuple(messages), tuple(parents))
    return tree.ending_at(len(messages) - 1) if end is None else tree.ending_at(end)


def _listed(
    items: Sequence[Any],
    id_key: str,
    parent_key: str,
    convert: Callable[[dict[str, Any], Counter[str]], Message | None],
    left_out: Counter[str],
) -> dict[object, _Node]:
    """Convert a list of messages to tree nodes. A message without a parent key follows the previous one."""
    nodes: dict[object, _Node] = {}
    previous: object = None
    for number, item in enumerate(_objects(items)):
        key = item.get(id_key) if isinstance(item.get(id_key), str) else number
        parent = item.get(parent_key, previous)
        nodes[key] = _Node(parent if isinstance(parent, str | int) else None, convert(item, left_out))
        previous = key
    return nodes


def _chatgpt_node(node: Any, left_out: Counter[str]) -> _Node:
    node = node if isinstance(node, dict) else {}
    parent = node.get("parent")
    return _Node(parent if isinstance(parent, str) else None, _chatgpt_message(node.get("message"), left_out))


def _chatgpt_message(message: Any, left_out: Counter[str]) -> Message | None:
    if not isinstance(message, dict):
        return None
    metadata, author = _object(message.get("metadata")), _object(message.get("author"))
    if metadata.get("is_visually_hidden_from_conversation"):
        return None
    content = _object(message.get("content"))
    listed = content.get("parts")
    parts = listed if isinstance(listed, list) else [content.get("text")]
    role, text = _ROLES.get(str(author.get("role"))), _joined(parts, left_out)
    if role is None or message.get("recipient", "all") != "all" or "parts" not in content:
        left_out["reasoning, tool calls and their results"] += bool(text or role is None)
        return None
    left_out["attached files"] += len(_objects(metadata.get("attachments")))
    return Message(role, text) if text else None


def _claude_message(message: dict[str, Any], left_out: Counter[str]) -> Message | None:
    blocks = _objects(message.get("content"))
    texts = [block.get("text") for block in blocks if block.get("type") == "text"]
    thoughts = [block.get("thinking") for block in blocks if block.get("type") == "thinking"]
    left_out["reasoning, tool calls and their results"] += sum(
        block.get("type") not in ("text", "thinking") for block in blocks
    )
    pasted = [each.get("extracted_content") for each in _objects(message.get("attachments"))]
    left_out["attached files"] += len(_objects(message.get("files")))
    text = _joined([*(texts or [message.get("text")]), *pasted], left_out)
    role = _ROLES.get(str(message.get("sender")))
    if role is None or not (text or thoughts):
        return None
    return Message(role, text, _joined(thoughts, left_out) if role == "assistant" else "")


def _open_webui_message(message: dict[str, Any], left_out: Counter[str]) -> Message | None:
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    text = _joined([part.get("text", part) if isinstance(part, dict) else part for part in parts], left_out)
    left_out["attached files"] += len(_objects(message.get("files")))
    role = _ROLES.get(str(message.get("role")))
    return Message(role, text) if role is not None and text else None


def _joined(parts: Sequence[Any], left_out: Counter[str]) -> str:
    """Join the text parts of a message, and count the skipped ones, such as images, audio and video.

    ChatGPT stores the words of a voice chat as a text part next to the recording.
    """
    said = "audio_transcription"
    parts = [part.get("text") if _object(part).get("content_type") == said else part for part in parts]
    left_out["images, audio and video"] += sum(isinstance(part, dict) for part in parts)
    return "\n\n".join(part for part in parts if isinstance(part, str) and part.strip())


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _time(value: Any) -> datetime:
    """Parse a Unix timestamp or an ISO 8601 time. Return the Unix epoch if the format is unknown."""
    try:
        if isinstance(value, str):
            return in_utc(datetime.fromisoformat(value))
        return in_utc(datetime.fromtimestamp(float(value or 0), UTC))
    except (ValueError, OverflowError, TypeError, OSError):
        return datetime.fromtimestamp(0, UTC)
