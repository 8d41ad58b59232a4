"""Tool calls written as JSON objects that contain the name and the arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.chat.tool_calls.form import CallWriter, JsonPart, Part, read_arguments_object, read_closes
from edgespec.chat.tool_calls.reader import TextReader, Wait

__all__ = ["JsonForm"]

_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass(frozen=True)
class JsonForm:
    """Tool calls such as `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`.

    A list of calls can appear in place of a single call.

    Attributes:
        opens: The texts before the calls.
        closes: The texts after the calls.
        around: The texts before the name's key and after the arguments of a call, in the form that the model
            was trained on.
        argument_key: The key of the arguments that the model was trained on.
        name_key: The key of the name that the model was trained on.
        starts_bare: Whether calls can begin without a marker at the start of the answer.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...] = ()
    around: tuple[str, str] = ("{", "}")
    argument_key: str = "arguments"
    name_key: str = "name"
    starts_bare: bool = False
    reasoning_ends: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return self.opens + self.closes

    def read(self, reader: TextReader, writer: CallWriter) -> Wait[bool]:
        yield from reader.space()
        in_list = yield from reader.literal("[")
        while True:
            yield from reader.space()
            if not (yield from self._read_call(reader, writer)):
                return False
            yield from reader.space()
            if not (in_list and (yield from reader.literal(","))):
                break
        if in_list and not (yield from reader.literal("]")):
            return False
        yield from read_closes(reader, self.closes)
        return True

    def _read_call(self, reader: TextReader, writer: CallWriter) -> Wait[bool]:
        if not (yield from reader.literal("{")):
            return False
        named = has_arguments = False
        # Holds the arguments if they come before the name.
        held: list[str] = []
        separator = ","
        while separator == ",":
            yield from reader.space()
            key = yield from reader.json_string()
            yield from reader.space()
            if key is None or not (yield from reader.literal(":")):
                return False
            yield from reader.space()
            if key in _NAME_KEYS and not named:
                name = yield from reader.json_string()
                if name is None or not writer.begin(name):
                    return False
                named = True
                writer.write("".join(held))
            elif key in _ARGUMENT_KEYS and not has_arguments:
                if not (yield from read_arguments_object(reader, writer.write if named else held.append)):
                    return False
                has_arguments = True
            elif not (yield from reader.json_value(_ignore)):
                return False
            yield from reader.space()
            separator = yield from reader.literal(",", "}")
        if not separator or not named or (self.starts_bare and not has_arguments):
            return False
        if not has_arguments:
            writer.write("{}")
        writer.end()
        return True

    def spell(self, name: str, parameters: Mapping[str, Any]) -> Sequence[Part]:
        before, after = self.around
        return (
            f'{before}"{self.name_key}": {json.dumps(name, ensure_ascii=False)}, "{self.argument_key}": ',
            JsonPart(parameters),
            after,
        )


def _ignore(text: str) -> None:
    """Ignore the value of an irrelevant key, such as the index of the call."""
