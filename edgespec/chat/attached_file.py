"""The `AttachedFile` type: a file whose text or image is sent to the model with a message."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from edgespec.errors import AttachmentError, OptionError
from edgespec.model.image import Image

__all__ = ["AttachedFile", "as_attached_files", "with_files"]


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
        # Make the fence longer than any run of backticks in the text, because programs disagree on what
        # starts a line.
        longest = max(map(len, re.findall("`+", self.text)), default=0)
        fence = "`" * max(3, longest + 1)
        line_break = "" if self.text.endswith("\n") or not self.text else "\n"
        # Ignore unusual file extensions, because a backtick after the fence would end the code block.
        language = re.fullmatch(r"\.([\w+#-]+)", PurePath(self.name).suffix)
        return f"{self.name}:\n{fence}{language[1] if language else ''}\n{self.text}{line_break}{fence}"


def as_attached_files(number: int, items: object, *, allows_damage: bool = False) -> tuple[AttachedFile, ...]:
    """Convert the `files` of message `number`.

    Args:
        number: The number of the message, for errors.
        items: The files.
        allows_damage: Whether the file of a damaged image becomes a text that says so.

    Raises:
        OptionError: The files are invalid.
    """
    if not isinstance(items, list):
        raise _invalid_files(number)
    return tuple(_as_attached_file(number, item, allows_damage) for item in items)


def _as_attached_file(number: int, item: object, allows_damage: bool) -> AttachedFile:
    kinds = {"name": str, "text": str, "token_count": int}
    optional = {"image": str}
    given = {key: type(value) for key, value in item.items()} if isinstance(item, dict) else {}
    if not isinstance(item, dict) or given not in (kinds, kinds | optional):
        raise _invalid_files(number)
    try:
        image = Image.from_base64(item["image"], item["name"]) if "image" in item else None
    except AttachmentError as error:
        if allows_damage:
            return AttachedFile(item["name"], error.what)
        raise OptionError(
            f"a file of message {number} is no image: {error.what}", error.next_step, code="messages_invalid"
        ) from error
    return AttachedFile(item["name"], item["text"], item["token_count"], image)


def _invalid_files(number: int) -> OptionError:
    return OptionError(
        f"the files of message {number} must be a list of objects with the keys name, text and token_count,"
        " and for images the key image",
        "pass the text of the files, or leave the files out",
        code="messages_invalid",
    )


def with_files(text: str, files: Sequence[AttachedFile]) -> str:
    """Return the text of a message, preceded by its files, without images."""
    blocks = [file.block for file in files if file.image is None]
    return "\n\n".join((*blocks, text)) if blocks else text
