"""The `AttachedFile` type: a file whose text is sent to the model with a message."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from edgespec.errors import OptionError

__all__ = ["AttachedFile", "as_attached_files", "with_files"]


@dataclass(frozen=True, slots=True)
class AttachedFile:
    """A file attached to a message.

    Attributes:
        name: The path of the file, relative to the working folder if the file is inside it.
        text: The text of the file.
        token_count: Number of prompt tokens that the file takes up. 0 if unknown.
    """

    name: str
    text: str
    token_count: int = 0

    def to_json(self) -> dict[str, object]:
        """Return the file in the format of saved chats."""
        return {"name": self.name, "text": self.text, "token_count": self.token_count}

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


def as_attached_files(number: int, items: object) -> tuple[AttachedFile, ...]:
    """Convert the `files` of message `number`. Raises OptionError if they are invalid."""
    kinds = {"name": str, "text": str, "token_count": int}
    if not isinstance(items, list) or not all(
        isinstance(item, dict) and {key: type(value) for key, value in item.items()} == kinds
        for item in items
    ):
        raise OptionError(
            f"the files of message {number} must be a list of objects with the keys {', '.join(kinds)}",
            "pass the text of the files, or leave the files out",
            code="messages_invalid",
        )
    return tuple(AttachedFile(**item) for item in items)


def with_files(text: str, files: Sequence[AttachedFile]) -> str:
    """Return the text of a message, preceded by its files."""
    return "\n\n".join((*(file.block for file in files), text)) if files else text
