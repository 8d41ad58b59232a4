"""Tool calls written as tags, with one tag per argument and values in plain text or JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.chat.tool_calls.form import (
    MAX_NAME_CHARACTERS,
    CallWriter,
    ChoicePart,
    JsonPart,
    OptionalPart,
    Part,
    TextPart,
    read_closes,
)
from edgespec.chat.tool_calls.reader import TextReader, Wait

__all__ = ["TaggedForm"]

# Python's spellings of JSON values, which some templates use.
_PYTHON_VALUES = {"True": "true", "False": "false", "None": "null"}
_JSON_TYPES: dict[type, frozenset[str]] = {
    str: frozenset({"string"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
    type(None): frozenset({"null"}),
}


@dataclass(frozen=True)
class TaggedForm:
    """Tool calls such as `<function=add><parameter=a>1</parameter></function>`.

    The parser converts the arguments to JSON. The parameter's schema decides whether a value is text.

    Attributes:
        opens: The texts before a tool's name, including those before the first of several calls.
        name_end: The text after the name. It may be missing.
        key: The texts before and after the name of a parameter.
        value_open: The text before a value, in addition to the key, if any.
        value_end: The text after a value.
        call_end: The text after the last parameter.
        padded: Whether each value is on lines of its own. The line breaks around it are not part of the
            value.
        closes: The texts after a call, including those after the last of several calls. They may be missing.
    """

    opens: tuple[str, ...]
    name_end: str
    key: tuple[str, str]
    value_end: str
    call_end: str
    value_open: str = ""
    padded: bool = False
    closes: tuple[str, ...] = ()
    starts_bare: bool = False
    reasoning_ends: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.opens, *self.key, self.value_open, self.value_end, self.call_end, *self.closes)

    def read(self, reader: TextReader, writer: CallWriter) -> Wait[bool]:
        yield from read_closes(reader, self.opens)
        key_open, key_end = self.key
        name = yield from reader.until((self.name_end, key_open, self.call_end), MAX_NAME_CHARACTERS)
        if name is None or not writer.begin(name.strip()):
            return False
        yield from reader.literal(self.name_end)
        separator = "{"
        while True:
            yield from reader.space()
            if (yield from reader.literal(self.call_end)):
                break
            if not (yield from reader.literal(key_open)):
                return False
            key = yield from reader.until((key_end,), MAX_NAME_CHARACTERS)
            if key is None:
                return False
            yield from reader.literal(key_end)
            if self.value_open:
                yield from reader.space()
                if not (yield from reader.literal(self.value_open)):
                    return False
            writer.write(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            if not (yield from self._read_value(reader, writer, _types(writer.parameter(key)))):
                return False
        writer.write("{}" if separator == "{" else "}")
        writer.end()
        yield from read_closes(reader, self.closes)
        return True

    def _read_value(self, reader: TextReader, writer: CallWriter, types: frozenset[str]) -> Wait[bool]:
        ends = (f"\n{self.value_end}", self.value_end) if self.padded else (self.value_end,)
        if self.padded:
            yield from reader.literal("\n")
        parts: list[str] = []
        is_text = types == {"string"}
        if is_text:
            writer.write('"')
        write = (lambda text: writer.write(_quoted(text))) if is_text else parts.append
        if not (yield from reader.stream_until(ends, write)):
            return False
        yield from reader.literal(*ends)
        writer.write('"' if is_text else _as_json("".join(parts), types))
        return True

    def spell(self, name: str, parameters: Mapping[str, Any]) -> Sequence[Part]:
        line = "" if self.name_end == "\n" else "\n"
        parts: list[Part] = ["\n".join(self.opens) + name + self.name_end + line]
        properties, required = parameters.get("properties") or {}, parameters.get("required") or ()
        for key, schema in properties.items():
            argument = self._spell_argument(key, schema, parameters)
            parts += argument if key in required else [OptionalPart(argument)]
        return [*parts, "\n".join((self.call_end, *self.closes))]

    def _spell_argument(self, key: str, schema: Any, parameters: Mapping[str, Any]) -> list[Part]:
        key_open, key_end = self.key
        padding = "\n" if self.padded else ""
        before = key_open + key + key_end + (f"\n{self.value_open}" if self.value_open else "") + padding
        end = f"{padding}{self.value_end}"
        if isinstance(schema, dict) and _types(schema) == {"string"}:
            texts = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
            return (
                [before, ChoicePart(texts), f"{end}\n"] if texts else [before, TextPart(self.value_end), "\n"]
            )
        definitions = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
        with_definitions = {**schema, **definitions} if isinstance(schema, dict) else {}
        return [before, JsonPart(with_definitions), f"{end}\n"]


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that a schema allows. Empty if the schema does not specify any."""
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list):
        return frozenset(each for each in declared if isinstance(each, str))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset().union(*(_JSON_TYPES.get(type(value), frozenset()) for value in values))
    choices = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(choices, list) and all(isinstance(choice, dict) for choice in choices):
        return frozenset().union(*map(_types, choices))
    return frozenset()


def _as_json(text: str, types: frozenset[str]) -> str:
    """Return `text` unchanged if it is JSON of an allowed type, or else as a JSON string."""
    candidate = text.strip()
    candidate = _PYTHON_VALUES.get(candidate, candidate)
    try:
        found = _JSON_TYPES[type(json.loads(candidate))]
    except (ValueError, RecursionError):
        found = frozenset()
    return candidate if found and (found & types or not types) else f'"{_quoted(text)}"'


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
