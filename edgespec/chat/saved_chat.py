"""The `SavedChat` type, its JSON format and its validation.

The messages form a tree, so that a message can have several versions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import MAXYEAR, MINYEAR, UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

from edgespec.chat.message import Message, as_message
from edgespec.errors import ChatFileError, OptionError
from edgespec.system.files import error_reason, format_bytes, regular_file_bytes

__all__ = [
    "MAX_CHAT_BYTES",
    "MAX_SAVED_BYTES",
    "NO_MODELS",
    "MessageTree",
    "ModelReferences",
    "SavedChat",
    "Setting",
    "chat_from_json",
    "in_utc",
    "read_chat",
    "title_of",
]

Setting = str | int | float | bool | list[str]
"""Type of a setting's value in a chat file."""

# Version of the file format. Version 1, which stored only one version of each message, can still be read.
VERSION = 2
# Maximum length, in characters, of a title taken from the first message.
_MAX_TITLE = 60
MAX_CHAT_BYTES = 64 << 20
"""File size in bytes at which a chat stops accepting messages."""

MAX_SAVED_BYTES = 2 * MAX_CHAT_BYTES
"""Maximum size in bytes of a chat's file for writing and reading. The margin above `MAX_CHAT_BYTES` is far
more than a reply needs, so that no reply is lost.
"""
_TEXTS = ("id", "created", "updated", "title", "target")
_KINDS: dict[type, str] = {
    dict: "an object", list: "a list", str: "text", int: "an integer", bool: "true or false",
    type(None): "missing",
}  # fmt: skip
_T = TypeVar("_T")
T = TypeVar("T")
S = TypeVar("S")


def title_of(messages: Sequence[Message]) -> str:
    """Return a short title taken from the first user message."""
    first = next((m.content for m in messages if m.role == "user"), "")
    line = " ".join(first.split())
    if len(line) <= _MAX_TITLE:
        return line or "New chat"
    head, _, _ = line[: _MAX_TITLE - 1].rpartition(" ")
    return (head or line[: _MAX_TITLE - 1]) + "…"


class ModelReferences(NamedTuple):
    """The models that a chat last used, in the format of `--target` and `--draft`, or empty if unknown.

    `options` contains other load options that the user changed in the chat, such as `context`.
    """

    target: str = ""
    draft: str = ""
    options: Mapping[str, Setting] = MappingProxyType({})

    def to_json(self) -> dict[str, object]:
        """Return the references in the format of saved chats."""
        options = {"options": dict(self.options)} if self.options else {}
        return {"target": self.target, "draft": self.draft, **options}


NO_MODELS = ModelReferences()


@dataclass(frozen=True, slots=True)
class SavedChat:
    """A chat as saved to a file.

    Attributes:
        id: Identifier of the chat, also used as its file name.
        tree: All messages, including earlier versions of edited messages and earlier replies.
        created: Time of creation, in UTC.
        updated: Time of the last change, in UTC.
        title: The title. If empty, it is taken from the first message.
        target: Name of the model.
        models: References to the model and its draft model.
        system: The system prompt.
        sampling: Settings that differ from their defaults.
        unfinished: Whether the last message has no reply or an incomplete one, because the program exited
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
    models: ModelReferences = NO_MODELS

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages on the current branch, one version of each."""
        return self.tree.open_messages

    def encoded(self) -> bytes:
        """Return the contents of the chat's file. Raises ChatFileError if it is too large to read."""
        text = json.dumps(self.to_json(), ensure_ascii=False, indent=1) + "\n"
        # Replace lone surrogates, which pasted text can contain and UTF-8 cannot encode.
        data = text.encode("utf-8", "replace")
        if len(data) > MAX_SAVED_BYTES:
            raise ChatFileError(
                f"the chat takes up {format_bytes(len(data))}, which exceeds the limit of"
                f" {format_bytes(MAX_SAVED_BYTES)} for a chat",
                "start a new chat",
                code="chat_too_large",
            )
        return data

    def to_json(self) -> dict[str, object]:
        """Return the chat as a JSON object in the current format version."""
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
            **({"models": self.models.to_json()} if self.models.target else {}),
            **({"unfinished": True} if self.unfinished else {}),
            **({"pinned": True} if self.pinned else {}),
        }


def _message_json(message: Message) -> dict[str, object]:
    data: dict[str, object] = {"role": message.role, "content": message.content}
    if message.reasoning:
        data["reasoning"] = message.reasoning
    if message.reasoning_seconds is not None:
        data["reasoning_seconds"] = message.reasoning_seconds
    if message.ended_early:
        data["ended_early"] = message.ended_early
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
    """Return all messages as JSON. The key `parent` is omitted if the parent is the previous message."""
    previous: int | None = None
    items = []
    for place, (message, parent) in enumerate(zip(tree.messages, tree.parents, strict=True)):
        items.append(_message_json(message) | ({} if parent == previous else {"parent": parent}))
        previous = place
    return items


def read_chat(path: Path, chat_id: str, *, with_images: bool = True) -> SavedChat:
    """Read and validate the file of the chat with this ID.

    Args:
        path: The file.
        chat_id: The ID.
        with_images: Whether to read attached images, which takes much longer than all other data. A chat
            without its images must not be saved.

    Raises:
        ChatFileError: The file cannot be read, or is not a valid chat.
    """
    try:
        size_bytes = regular_file_bytes(path)
        if size_bytes > MAX_SAVED_BYTES:
            raise ValueError(
                f"the file has {size_bytes:,} bytes, which exceeds the limit of {MAX_SAVED_BYTES:,} bytes"
            )
        data = json.loads(path.read_bytes().decode("utf-8-sig"))
        return _checked(path, chat_id, data, with_images=with_images)
    except FileNotFoundError:
        raise ChatFileError(
            f"there is no saved chat at {path}", "choose one from the list of chats", code="chat_not_found"
        ) from None
    except OSError as error:
        raise ChatFileError(
            f"cannot read {path.name}: {error_reason(error)}",
            f"check the permissions of {path}",
            code="chat_file_unreadable",
        ) from error
    except UnicodeDecodeError as error:
        reason = f"the file is not UTF-8 text (byte {error.start})"
    except json.JSONDecodeError as error:
        reason = f"the file is not valid JSON ({error.msg} at line {error.lineno}, column {error.colno})"
    except RecursionError:
        reason = "its JSON is nested too deeply"
    except OptionError as error:
        reason = error.what
    except ValueError as error:
        reason = str(error)
    raise ChatFileError(
        f"{path.name} is not a valid chat file: {reason}",
        f"repair or move {path}; your other chats are not affected",
    )


def _checked(path: Path, chat_id: str, json_value: object, *, with_images: bool) -> SavedChat:
    data = _typed(json_value, dict, "the file")
    version = _typed(data.get("version"), int, "`version`")
    if not 1 <= version <= VERSION:
        raise ChatFileError(
            f"{path.name} has format version {version}, but this version of edgespec reads only versions 1"
            f" to {VERSION}",
            "upgrade edgespec, or open the chat with the version that wrote it",
            code="chat_version_unknown",
        )
    chat = _from_json(data, version, with_images=with_images)
    if chat.id != chat_id:
        raise ValueError(f"the chat ID {chat.id[:80]!r} does not match the file name")
    return chat


def chat_from_json(data: Mapping[str, object]) -> SavedChat:
    """Create a chat, without an ID, from a JSON object that `SavedChat.to_json` returned.

    Raises:
        ValueError: The object is invalid.
    """
    version = _typed(data.get("version"), int, "`version`")
    if not 1 <= version <= VERSION:
        raise ValueError(
            f"the chat has format version {version}, but only versions 1 to {VERSION} are supported"
        )
    return replace(_from_json(data, version), id="")


def _from_json(data: Mapping[str, object], version: int, *, with_images: bool = True) -> SavedChat:
    texts = {name: _typed(data.get(name), str, f"`{name}`") for name in _TEXTS}
    items = _typed(data.get("messages"), list, "`messages`")
    # Tolerate damaged images, so that the rest of the chat can still be read.
    tree = MessageTree.linear(
        as_message(number, item, allows_damage=True, with_images=with_images)
        for number, item in enumerate(items, 1)
    )
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
        models=_models(data.get("models")),
    )


def _models(value: object) -> ModelReferences:
    if value is None:
        return NO_MODELS
    references = _typed(value, dict, "`models`")
    target, draft = (_typed(references.get(name, ""), str, f"`{name}`") for name in ("target", "draft"))
    options = _typed(references.get("options", {}), dict, "`options`")
    return ModelReferences(target, draft, {name: _setting(name, each) for name, each in options.items()})


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


def in_utc(time: datetime) -> datetime:
    """Convert a time to UTC. A time without a time zone is assumed to be in UTC.

    Raises:
        ValueError, OverflowError: The year is the first or last that Python supports. Converting such times
            to local time can fail.
    """
    converted = time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    if not MINYEAR < converted.year < MAXYEAR:
        raise ValueError(f"the year must be between {MINYEAR + 1} and {MAXYEAR - 1}, not {converted.year}")
    return converted


def _time(name: str, text: str) -> datetime:
    try:
        return in_utc(datetime.fromisoformat(text))
    except (ValueError, OverflowError):
        raise ValueError(f"`{name}` must be an ISO 8601 time, not {text[:40]!r}") from None


def _setting(name: str, value: object) -> Setting:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    if isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise ValueError(f"the setting {name[:40]!r} must not be {_KINDS.get(type(value), value)}")


@dataclass(frozen=True, slots=True)
class MessageTree(Generic[T]):
    """A chat's messages as a tree, with a current branch, which is the conversation shown.

    Each message follows its parent. Messages with the same parent are versions of each other, such as several
    replies to one question. A message is identified by its index in `messages`, called its place. Trees are
    immutable: methods return a new tree in which existing messages keep their indexes, except for `pruned`,
    which renumbers them. Until then, deleted messages stay in the tree so that they can be restored.

    Attributes:
        messages: All messages, in the order in which they were added.
        parents: The index of each message's parent, which is always lower than its own. None for a first
            message.
        tip: Index of the last message on the current branch. None if the branch is empty.
        deleted: Indexes of the deleted messages, in order of deletion. Messages that follow a deleted one
            count as deleted too.
    """

    messages: tuple[T, ...] = ()
    parents: tuple[int | None, ...] = ()
    tip: int | None = None
    deleted: tuple[int, ...] = ()

    @classmethod
    def linear(cls, messages: Iterable[T]) -> MessageTree[T]:
        """Return a tree without branches, in which each message follows the previous one."""
        items = tuple(messages)
        places = (None, *range(len(items)))
        return cls(items, places[:-1], places[-1])

    @property
    def path(self) -> tuple[int, ...]:
        """The indexes of the messages on the current branch, from the first message to `tip`."""
        places, place = [], self.tip
        while place is not None:
            places.append(place)
            place = self.parents[place]
        return tuple(reversed(places))

    @property
    def open_messages(self) -> tuple[T, ...]:
        """The messages on the current branch."""
        return tuple(self.messages[place] for place in self.path)

    def versions(self, place: int) -> tuple[int, ...]:
        """Return the indexes of all versions of a message, oldest first, excluding deleted versions."""
        return self._children(self.parents[place])

    def _children(self, parent: int | None) -> tuple[int, ...]:
        start = 0 if parent is None else parent + 1
        places = range(start, len(self.parents))
        return tuple(p for p in places if self.parents[p] == parent and p not in self.deleted)

    def is_last(self, place: int) -> bool:
        """Return whether the message at `place` has no children."""
        return not self._children(place)

    def add(self, message: T, parent: int | None) -> MessageTree[T]:
        """Return a tree with `message` added after `parent`, as the last message of the current branch."""
        place = len(self.messages)
        return replace(self, messages=(*self.messages, message), parents=(*self.parents, parent), tip=place)

    def ending_at(self, tip: int | None) -> MessageTree[T]:
        """Return a tree whose current branch ends at the message `tip`, or is empty if `tip` is None."""
        return replace(self, tip=tip)

    def opened(self, place: int) -> MessageTree[T]:
        """Return a tree whose current branch runs through a message and then the newest versions after it."""
        while children := self._children(place):
            place = children[-1]
        return replace(self, tip=place)

    def with_message(self, place: int, message: T) -> MessageTree[T]:
        """Return a tree in which `message` replaces the message at `place`."""
        return replace(self, messages=(*self.messages[:place], message, *self.messages[place + 1 :]))

    def without(self, place: int) -> MessageTree[T]:
        """Return a tree in which a message and all messages after it are deleted.

        If the message was on the current branch, the branch switches to the nearest other version of it. If
        there is none, the branch ends before the message.
        """
        tree = replace(self, deleted=(*self.deleted, place))
        if place not in self.path:
            return tree
        others = tree.versions(place)
        if not others:
            return tree.ending_at(self.parents[place])
        return tree.opened(min(others, key=lambda other: (abs(other - place), other)))

    def restored(self) -> MessageTree[T]:
        """Return a tree in which the most recently deleted messages are restored and shown."""
        return replace(self, deleted=self.deleted[:-1]).opened(self.deleted[-1])

    def pruned(self) -> MessageTree[T]:
        """Return a tree without the deleted messages. The remaining messages get new indexes."""
        places: dict[int | None, int | None] = {None: None}
        for place, parent in enumerate(self.parents):
            if parent in places and place not in self.deleted:
                places[place] = len(places) - 1
        kept = [place for place in places if place is not None]
        return MessageTree(
            tuple(self.messages[place] for place in kept),
            tuple(places[self.parents[place]] for place in kept),
            places[self.tip],
        )

    def map(self, function: Callable[[T], S]) -> MessageTree[S]:
        """Return a tree of the same shape, with `function` applied to each message."""
        return MessageTree(tuple(map(function, self.messages)), self.parents, self.tip, self.deleted)
