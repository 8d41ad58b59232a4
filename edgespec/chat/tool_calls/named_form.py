"""Tool calls written as the tool's name followed by a JSON object with the arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.chat.tool_calls.form import (
    MAX_NAME_CHARACTERS,
    CallWriter,
    JsonPart,
    Part,
    read_arguments_object,
    read_closes,
)
from edgespec.chat.tool_calls.reader import TextReader, Wait

__all__ = ["NamedForm"]


@dataclass(frozen=True)
class NamedForm:
    """Tool calls such as `[TOOL_CALLS]add[ARGS]{"a": 1}`.

    Attributes:
        opens: The markers before a call, including any marker that only the first of several calls has.
        separators: The texts between the name and the arguments.
        closes: The markers after a call, including any marker that only the last of several calls has.
        around: The texts before the name, between the name and the arguments, and after the arguments, in the
            form that the model was trained on.
        header: Regular expression for the text before the separator. Its first group is the name.
        markers: The texts in calls that may be control tokens.
        reasoning_ends: The markers that begin a call and also end the reasoning.
    """

    opens: tuple[str, ...]
    separators: tuple[str, ...]
    around: tuple[str, str, str]
    markers: tuple[str, ...]
    closes: tuple[str, ...] = ()
    header: str = r"([\w.:/-]+)"
    starts_bare: bool = False
    reasoning_ends: tuple[str, ...] = ()

    def read(self, reader: TextReader, writer: CallWriter) -> Wait[bool]:
        yield from read_closes(reader, self.opens)
        header = yield from reader.until(self.separators, MAX_NAME_CHARACTERS)
        found = re.fullmatch(self.header, header.strip()) if header else None
        if not found or not writer.begin(found[1]):
            return False
        yield from reader.literal(*self.separators)
        yield from reader.space()
        if not (yield from read_arguments_object(reader, writer.write)):
            return False
        writer.end()
        yield from read_closes(reader, self.closes)
        return True

    def spell(self, name: str, parameters: Mapping[str, Any]) -> Sequence[Part]:
        before, between, after = self.around
        return before + name + between, JsonPart(parameters), after
