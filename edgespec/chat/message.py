"""The `Message` type, used in prompts, saved chats and the terminal chat, and its attachment types."""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, Literal, NamedTuple

from edgespec.chat.reasoning import leading_marker, split_reasoning
from edgespec.chat.tool_calls.calls import ToolCall, as_tool_calls
from edgespec.errors import AttachmentError, OptionError
from edgespec.model.image import Image

__all__ = [
    "EARLY_ENDS",
    "VETOES",
    "AttachedFile",
    "Message",
    "PlacedImage",
    "Role",
    "as_attached_files",
    "as_message",
    "as_messages",
    "reply_message",
    "with_files",
    "with_system",
]


class PlacedImage(NamedTuple):
    """An image in the text of a message.

    Attributes:
        image: The image.
        at: Number of characters of the text that precede the image.
    """

    image: Image
    at: int = 0


Role = Literal["user", "assistant", "system", "tool"]
EARLY_ENDS = ("cancelled", "length", "context_full")
"""The values of `Message.ended_early` for replies that ended before the model was done."""

VETOES = ("refused", "stopped")
"""The values of `Message.ended_early` for tool calls that the user refused or stopped."""

# The default text before and after a message's reasoning.
_DEFAULT_MARKERS = ("<think>\n", "\n</think>\n\n")
_ROLES: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


@dataclass(frozen=True, slots=True)
class Message:
    """A chat message.

    Attributes:
        role: The author of the message.
        content: The text. For a model's reply, this is the answer without reasoning and tool calls. For a
            message with the role `tool`, it is the result of the call.
        reasoning: The reasoning before the answer. Empty if the model did not reason.
        markers: The text before and after the reasoning, such as `<think>` and whitespace.
        tool_calls: The tool calls in a model's reply.
        tool_call_id: For a message with the role `tool`, the id of the call.
        name: For a message with the role `tool`, the name of the tool.
        files: The files attached to a user message. In the prompt, they precede `content`.
        images: The images in `content`, in order of appearance.
        reasoning_seconds: The time that the model spent on `reasoning`. None if it was not measured.
        ended_early: Why a model's reply ended before the model was done: `cancelled` (it was stopped),
            `length` (it reached its maximum length) or `context_full`. For a message with the role `tool`,
            `refused` or `stopped` if the user prevented or ended the call. Empty for a complete reply or
            call.
    """

    role: Role
    content: str
    reasoning: str = ""
    markers: tuple[str, str] = field(default=("", ""), compare=False)
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    files: tuple[AttachedFile, ...] = ()
    reasoning_seconds: float | None = field(default=None, compare=False)
    ended_early: str = field(default="", compare=False)
    images: tuple[PlacedImage, ...] = ()

    @property
    def text(self) -> str:
        """The whole text of the message, including any reasoning and its markers."""
        before, after = self.markers
        if self.reasoning and not before:
            # A reply without an answer was cut off during its reasoning.
            before, after = _DEFAULT_MARKERS if self.content else (_DEFAULT_MARKERS[0], "")
        return before + self.reasoning + after + self.content

    @property
    def prompt_texts(self) -> tuple[str, ...]:
        """The texts that most templates include in a prompt, excluding reasoning."""
        calls = (text for call in self.tool_calls for text in (call.id, call.name, call.arguments))
        return (self.content, self.tool_call_id, self.name, *calls)

    def with_files_as_text(self) -> Message:
        """Return the message with its files prepended to `content`, as the model sees them."""
        if not self.files:
            return self
        content = with_files(self.content, self.files)
        added = len(content) - len(self.content)
        attached = (PlacedImage(file.image) for file in self.files if file.image)
        images = (*attached, *(PlacedImage(image, at + added) for image, at in self.images))
        return replace(self, content=content, files=(), images=images)

    def with_marked_images(self, mark: Callable[[Image], str]) -> Message:
        """Return the message with each image replaced by the text that `mark` returns for it."""
        if not self.images:
            return self
        content, begin = "", 0
        for image, at in self.images:
            content += self.content[begin:at] + mark(image)
            begin = max(begin, at)
        return replace(self, content=content + self.content[begin:], images=())


def as_messages(items: Sequence[Message | Mapping[str, Any]]) -> list[Message]:
    """Convert `items` to a list of `Message` and check that it ends with a message to reply to.

    System messages alone are allowed, because some programs send their whole prompt as one.

    Args:
        items: `Message` objects, or dictionaries with the keys `role`, `content` and optionally `reasoning`
            (or `reasoning_content`), `tool_calls`, `tool_call_id`, `name`, `files` and `images`, a list of
            `PlacedImage`. If a tool result has no name, the name of its call is used.

    Raises:
        OptionError: A role is unknown, a value has the wrong type, or the last message is not from the user
            or a tool, unless all messages are from the system.
    """
    if isinstance(items, str | Mapping) or not isinstance(items, Iterable):
        raise OptionError(
            f"messages must be a list, not {type(items).__name__}",
            "for example, pass [{'role': 'user', 'content': 'Hello'}]",
            code="messages_invalid",
        )
    messages = [as_message(number, item) for number, item in enumerate(items, 1)]
    only_system = all(message.role == "system" for message in messages)
    if not messages or not (only_system or messages[-1].role in ("user", "tool")):
        last = f"ends with a message whose role is `{messages[-1].role}`" if messages else "is empty"
        raise OptionError(
            f"the list of messages {last}",
            "the last message must have the role `user` or `tool`",
            code="messages_invalid",
        )
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    return [
        replace(message, name=names.get(message.tool_call_id, ""))
        if message.role == "tool" and not message.name
        else message
        for message in messages
    ]


def as_message(
    number: int,
    item: Message | Mapping[str, Any],
    *,
    allows_damage: bool = False,
    with_images: bool = True,
) -> Message:
    """Convert item `number` of a list to a `Message`. Raises OptionError if it is invalid.

    Reasoning at the start of an assistant message's content is moved to `reasoning`.

    Args:
        number: The number of the item, for error messages.
        item: The item.
        allows_damage: See `as_attached_files`.
    """
    if isinstance(item, Message):
        _check_images(number, item.images, item.content)
        return item
    if not isinstance(item, Mapping):
        raise OptionError(
            f"message {number} must be a Message or a dictionary, not {type(item).__name__}",
            "pass dictionaries with the keys `role` and `content`",
            code="messages_invalid",
        )
    role = _ROLES.get(str(item.get("role")))
    if role is None:
        raise OptionError(
            f"message {number} has an unknown role: {item.get('role')!r}",
            f"use one of {', '.join(_ROLES)}",
            code="messages_invalid",
        )
    calls = as_tool_calls(number, item.get("tool_calls") or ()) if role == "assistant" else ()
    content = item.get("content")
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise OptionError(
            f"the content of message {number} must be a string, not {type(content).__name__}",
            "for example, pass {'role': 'user', 'content': 'Hello'}",
            code="messages_invalid",
        )
    reasoning = item.get("reasoning") or item.get("reasoning_content") or ""
    if not isinstance(reasoning, str):
        raise OptionError(
            f"the reasoning of message {number} must be a string, not {type(reasoning).__name__}",
            "pass the reasoning as a string, or leave it out",
            code="messages_invalid",
        )
    markers = item.get("markers") or ["", ""]
    if not isinstance(markers, list) or [type(marker) for marker in markers] != [str, str]:
        raise OptionError(
            f"the reasoning markers of message {number} must be a list of two strings",
            "pass two strings, such as <think> and </think>, or leave the markers out",
            code="messages_invalid",
        )
    early_ends = {"assistant": EARLY_ENDS, "tool": VETOES}.get(role, ())
    ended_early = item.get("ended_early")
    ended_early = str(ended_early) if ended_early in early_ends else ""
    if role == "assistant" and not reasoning and not any(markers):
        return replace(reply_message(content), tool_calls=calls, ended_early=ended_early)
    call_id, name = (_text(number, item, key) if role == "tool" else "" for key in ("tool_call_id", "name"))
    items = item.get("files") or [] if role == "user" else []
    files = as_attached_files(number, items, allows_damage=allows_damage, with_images=with_images)
    seconds = _seconds(number, item.get("reasoning_seconds"))
    images = tuple(item.get("images") or ())
    _check_images(number, images, content)
    return Message(
        *(role, content, reasoning, (markers[0], markers[1]), calls, call_id, name, files, seconds),
        ended_early=ended_early,
        images=images,
    )


def _check_images(number: int, images: tuple[Any, ...], content: str) -> None:
    for image in images:
        if not (isinstance(image, PlacedImage) and 0 <= image.at <= len(content)):
            raise OptionError(
                f"the images of message {number} must be PlacedImage objects, each with a position within the"
                " message's content",
                "pass edgespec.PlacedImage(image, at), where `at` is the position of the image in the"
                " content",
                code="messages_invalid",
            )


def _seconds(number: int, value: object) -> float | None:
    if value is None:
        return None
    # A Python integer can be larger than any float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise OptionError(
            f"the reasoning_seconds of message {number} must be a non-negative number, not {value!r}",
            "pass a number that is at least 0, or leave it out",
            code="messages_invalid",
        )
    return float(value)


def _text(number: int, item: Mapping[str, Any], key: str) -> str:
    value = item.get(key) or ""
    if not isinstance(value, str):
        raise OptionError(
            f"the {key} of message {number} must be a string, not {type(value).__name__}",
            "use the value from the model's tool call",
            code="messages_invalid",
        )
    return value


def with_system(system: str | None, messages: Sequence[Message]) -> list[Message]:
    """Return the messages of a conversation, preceded by its system prompt if it has one."""
    return [*([Message("system", system)] if system else []), *messages]


def reply_message(text: str) -> Message:
    """Convert the full text of a reply to a message, separating its reasoning."""
    opening = leading_marker(text)
    if not opening:
        return Message("assistant", text)
    reasoning, answer = split_reasoning(text)
    reasoning_end = len(opening) + len(reasoning)
    markers = (opening, text[reasoning_end : len(text) - len(answer)])
    return Message("assistant", answer, reasoning, markers)


@dataclass(frozen=True, slots=True)
class AttachedFile:
    """A file attached to a message.

    Attributes:
        name: The path of the file, relative to the working folder if the file is inside it.
        text: The text of the file. Empty if it is an image.
        token_count: Number of prompt tokens that the file takes up. 0 if unknown.
        image: The file as an image, or None if it is text.
    """

    name: str
    text: str
    token_count: int = 0
    image: Image | None = None

    def to_json(self) -> dict[str, object]:
        """Return the file in the format of saved chats."""
        image = {"image": base64.b64encode(self.image.data).decode()} if self.image else {}
        return {"name": self.name, "text": self.text, "token_count": self.token_count, **image}

    @property
    def block(self) -> str:
        """The file as Markdown: its name, and its text in a code block."""
        # Make the fence longer than any run of backticks in the text, because programs disagree on where a
        # line starts.
        longest = max(map(len, re.findall("`+", self.text)), default=0)
        fence = "`" * max(3, longest + 1)
        line_break = "" if self.text.endswith("\n") or not self.text else "\n"
        # Ignore unusual file extensions, because a backtick after the fence would end the code block.
        language = re.fullmatch(r"\.([\w+#-]+)", PurePath(self.name).suffix)
        return f"{self.name}:\n{fence}{language[1] if language else ''}\n{self.text}{line_break}{fence}"


def as_attached_files(
    number: int, items: object, *, allows_damage: bool = False, with_images: bool = True
) -> tuple[AttachedFile, ...]:
    """Convert the `files` of message `number`.

    Args:
        number: The number of the message, for error messages.
        items: The files.
        allows_damage: Whether to replace a damaged image with text that reports the damage.
        with_images: Whether to read images. If not, they become files without a text.

    Raises:
        OptionError: The files are invalid.
    """
    if not isinstance(items, list):
        raise _invalid_files(number)
    return tuple(_as_attached_file(number, item, allows_damage, with_images) for item in items)


def _as_attached_file(number: int, item: object, allows_damage: bool, with_images: bool) -> AttachedFile:
    kinds = {"name": str, "text": str, "token_count": int}
    optional = {"image": str}
    given = {key: type(value) for key, value in item.items()} if isinstance(item, dict) else {}
    if not isinstance(item, dict) or given not in (kinds, kinds | optional):
        raise _invalid_files(number)
    reads_image = with_images and "image" in item
    try:
        image = Image.from_base64(item["image"], item["name"]) if reads_image else None
    except AttachmentError as error:
        if allows_damage:
            return AttachedFile(item["name"], error.what)
        raise OptionError(
            f"a file attached to message {number} is not a usable image: {error.what}",
            error.next_step,
            code="messages_invalid",
        ) from error
    return AttachedFile(item["name"], item["text"], item["token_count"], image)


def _invalid_files(number: int) -> OptionError:
    return OptionError(
        f"the files of message {number} must be a list of objects with the keys `name`, `text` and"
        " `token_count`, and, for images, `image`",
        "pass each file's name, text and token count, or leave `files` out",
        code="messages_invalid",
    )


def with_files(text: str, files: Sequence[AttachedFile]) -> str:
    """Return a message's text preceded by its attached text files. Images are left out."""
    blocks = [file.block for file in files if file.image is None]
    return "\n\n".join((*blocks, text)) if blocks else text
