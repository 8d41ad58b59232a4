"""The interface between the tool-call parser and the formats that models use.

Formats read streamed text with generators that pause until more text arrives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from edgespec.chat.tool_calls.calls import ToolCallDelta, parse_object, read_arguments

__all__ = [
    "MAX_NAME_CHARACTERS",
    "SPACE",
    "CallForm",
    "CallWriter",
    "ChoicePart",
    "EitherPart",
    "JsonPart",
    "OptionalPart",
    "Part",
    "TextPart",
    "TextReader",
    "Wait",
    "read_arguments_object",
    "read_closes",
]

MAX_NAME_CHARACTERS = 256
# Number of characters of a call's arguments that must be valid JSON before the call is reported. Text such as
# `{'city': ...}` is therefore not mistaken for a call.
_FIRST_CHARACTERS = 2
_Result = TypeVar("_Result")
Wait: TypeAlias = Generator[None, None, _Result]
"""A generator that yields whenever it needs more text, and returns its result."""

# The characters that JSON regards as whitespace.
SPACE = " \t\r\n"
_SPACE_RUN = re.compile(f"[{SPACE}]*")
_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_SCALAR_RUN = re.compile(r"[-+.\w]*")
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null", re.ASCII)
# Length of the longest escape in a JSON string, such as \u00e9.
_ESCAPE_CHARACTERS = 6
_CLOSING = {"{": "}", "[": "]"}


@dataclass(frozen=True)
class JsonPart:
    """A JSON value that matches a schema."""

    schema: Mapping[str, Any]


@dataclass(frozen=True)
class TextPart:
    """Any text, up to and including `end`."""

    end: str


@dataclass(frozen=True)
class ChoicePart:
    """One of several strings."""

    texts: Sequence[str]


@dataclass(frozen=True)
class OptionalPart:
    """A sequence of parts that the model may omit."""

    parts: Sequence[Part]


@dataclass(frozen=True)
class EitherPart:
    """One of several sequences of parts."""

    choices: Sequence[Sequence[Part]]


Part: TypeAlias = "str | JsonPart | TextPart | ChoicePart | OptionalPart | EitherPart"
"""A part of a tool call. A string is literal text."""


class CallForm(Protocol):
    """A tool-call format. Implementations are stateless, so replies can share them."""

    @property
    def opens(self) -> tuple[str, ...]:
        """The markers that begin one or more calls. None of them is a prefix of another."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Tool-call markers that may be control tokens. Other control tokens are omitted from the reply."""

    @property
    def starts_bare(self) -> bool:
        """Whether a `{` at the start of the answer also begins a call."""

    @property
    def reasoning_ends(self) -> tuple[str, ...]:
        """The markers that begin a call and also end the reasoning."""

    def read(self, reader: TextReader, writer: CallWriter) -> Wait[bool]:
        """Read calls after an opening marker. Return False if the text is invalid.

        Calls already reported to `writer` are kept.
        """

    def spell(self, name: str, parameters: Mapping[str, Any]) -> Sequence[Part]:
        """Return the parts of a call to one tool, in the form that the model was trained on."""


class CallWriter:
    """Receives the tool calls that a `CallForm` reads.

    Attributes:
        used: The position after the last text that definitely belongs to a call. 0 if there is none.
    """

    def __init__(
        self,
        reader: TextReader,
        schemas: Mapping[str, Mapping[str, Any]],
        new_id: Callable[[int], str],
        report: Callable[[ToolCallDelta], None],
        *,
        known_tools_only: bool = False,
    ) -> None:
        self.used = 0
        self._reader = reader
        self._schemas = schemas
        self._new_id = new_id
        self._report = report
        self._known_tools_only = known_tools_only
        # The number of earlier calls. The next three attributes describe the current call.
        self._count = 0
        self._name = ""
        self._held = ""
        self._reported = False

    def parameter(self, name: str) -> Mapping[str, Any]:
        """Return the schema of the current call's parameter `name`, or an empty schema if it has none."""
        properties = self._schemas.get(self._name, {}).get("properties")
        schema = properties.get(name) if isinstance(properties, dict) else None
        return schema if isinstance(schema, dict) else {}

    def begin(self, name: str) -> bool:
        """Begin a call. Return False if `name` cannot be the name of a tool."""
        self._name, self._held, self._reported = name, "", False
        if self._known_tools_only and name not in self._schemas:
            return False
        return name.isprintable() and 0 < len(name) <= MAX_NAME_CHARACTERS

    def write(self, arguments: str) -> None:
        """Add text to the call's arguments. The reader must already have read past the text."""
        if self._reported:
            self._report(ToolCallDelta(self._count, "", "", arguments))
            self.used = self._reader.at
            return
        self._held += arguments
        if len("".join(self._held.split())) >= _FIRST_CHARACTERS:
            self._reported = True
            self._report(ToolCallDelta(self._count, self._new_id(self._count), self._name, self._held))
            self.used = self._reader.at

    def end(self) -> None:
        """End the call, whether it is complete or the text has become invalid."""
        self._count += self._reported
        self._reported = False
        self.used = self._reader.at


def read_arguments_object(reader: TextReader, write: Callable[[str], None]) -> Wait[bool]:
    """Read arguments: a JSON object, JSON in a string, or an empty value that means no arguments."""
    if (yield from reader.peek()) == "{":
        return (yield from reader.json_value(write))
    parts: list[str] = []
    if not (yield from reader.json_value(parts.append)):
        return False
    arguments = read_arguments("".join(parts))
    if parse_object(arguments) is None:
        return False
    write(arguments)
    return True


def read_closes(reader: TextReader, closes: tuple[str, ...]) -> Wait[None]:
    """Read the closing markers after calls. They are optional, because small models forget them."""
    yield from reader.space()
    while closes and (yield from reader.literal(*closes)):
        yield from reader.space()


class TextReader:
    """Text that arrives in parts, with a read position.

    The reading methods are generators: call them with `yield from`. They advance the position past the text
    that they read. If the text does not match, they leave the position unchanged, except for `json_value` and
    `json_string`.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False

    def drop_read_text(self) -> None:
        """Discard the text before the position, and set the position to 0."""
        self.text, self.at = self.text[self.at :], 0

    def peek(self) -> Wait[str]:
        """Return the next character, or an empty string at the end of the text."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def space(self) -> Wait[str]:
        """Read whitespace."""
        start = self.at
        while True:
            self.at = self._end(_SPACE_RUN)
            if self.at < len(self.text) or self.ended:
                return self.text[start : self.at]
            yield

    def literal(self, *literals: str) -> Wait[str]:
        """Read the longest literal that comes next and return it, or an empty string if there is none."""
        while True:
            matching = [each for each in literals if self.text.startswith(each, self.at)]
            longest = max(matching, key=len, default="")
            rest = self.text[self.at :]
            undecided = any(len(rest) < len(each) and each.startswith(rest) for each in literals)
            if self.ended or not undecided:
                self.at += len(longest)
                return longest
            yield

    def until(self, literals: tuple[str, ...], max_characters: int) -> Wait[str | None]:
        """Read the text up to, but not including, one of the literals.

        Returns:
            The text, or None if none of the literals follows within `max_characters`.
        """
        while True:
            found = [at for at in (self.text.find(each, self.at) for each in literals) if at >= 0]
            if found and min(found) - self.at <= max_characters:
                start, self.at = self.at, min(found)
                return self.text[start : self.at]
            if self.ended or len(self.text) - self.at > max_characters + max(map(len, literals)):
                return None
            yield

    def stream_until(self, literals: tuple[str, ...], write: Callable[[str], None]) -> Wait[bool]:
        """Pass the text before the next literal to `write` as it arrives.

        Returns:
            True at one of the literals, or False if the text ended without one.
        """
        while True:
            found = [at for at in (self.text.find(each, self.at) for each in literals) if at >= 0]
            write(self._take(min(found, default=len(self.text) - self.partial_length(literals))))
            if found or self.ended:
                return bool(found)
            yield

    def partial_length(self, literals: tuple[str, ...]) -> int:
        """Return the length of the longest incomplete literal at the end of the text."""
        longest = min(max(map(len, literals)) - 1, len(self.text) - self.at)
        for size in range(longest, 0, -1):
            if any(each.startswith(self.text[-size:]) for each in literals):
                return size
        return 0

    def json_value(self, write: Callable[[str], None]) -> Wait[bool]:
        """Read a JSON value, passing its text to `write` as soon as it is known to be valid.

        Returns:
            Whether the value is valid and complete. If not, the position is at the invalid character.
        """
        # The closing brackets of all open objects and arrays, and the kind of text that may come next.
        closing: list[str] = []
        expected = "value"
        while True:
            space = yield from self.space()
            if closing:
                write(space)
            character = yield from self.peek()
            if closing and character == closing[-1] and expected in ("first", "next"):
                write(self._take(self.at + 1))
                closing.pop()
                expected = "next"
            elif expected == "next":
                if character != ",":
                    return False
                write(self._take(self.at + 1))
                expected = "key" if closing[-1] == "}" else "value"
                continue
            elif expected == "key" or (expected == "first" and closing[-1] == "}"):
                if not (yield from self._json_key(write)):
                    return False
                expected = "value"
                continue
            elif character and character in _CLOSING:
                write(self._take(self.at + 1))
                closing.append(_CLOSING[character])
                expected = "first"
                continue
            else:
                read = self._json_string(write) if character == '"' else self._json_scalar(write)
                if not (yield from read):
                    return False
                expected = "next"
            if not closing:
                return True

    def json_string(self) -> Wait[str | None]:
        """Read a JSON string and return its value, or None if it is invalid."""
        parts: list[str] = []
        valid = yield from self._json_string(parts.append)
        return str(json.loads("".join(parts))) if valid else None

    def _json_key(self, write: Callable[[str], None]) -> Wait[bool]:
        if not (yield from self._json_string(write)):
            return False
        write((yield from self.space()))
        if not (yield from self.literal(":")):
            return False
        write(":")
        return True

    def _json_string(self, write: Callable[[str], None]) -> Wait[bool]:
        if not (yield from self.literal('"')):
            return False
        write('"')
        while True:
            write(self._take(self._end(_STRING_RUN)))
            character = yield from self.peek()
            if character == '"':
                write(self._take(self.at + 1))
                return True
            if character == "\\":
                while not self.ended and len(self.text) - self.at < _ESCAPE_CHARACTERS:
                    if _ESCAPE.match(self.text, self.at):
                        break
                    yield
                escape = _ESCAPE.match(self.text, self.at)
                if not escape:
                    return False
                write(self._take(escape.end()))
            elif character < " ":
                return False

    def _json_scalar(self, write: Callable[[str], None]) -> Wait[bool]:
        while self._end(_SCALAR_RUN) == len(self.text) and not self.ended:
            yield
        end = self._end(_SCALAR_RUN)
        if not _SCALAR.fullmatch(self.text, self.at, end):
            return False
        write(self._take(end))
        return True

    def _end(self, pattern: re.Pattern[str]) -> int:
        """Return the end of the pattern's match at the position, or the position itself if there is none."""
        found = pattern.match(self.text, self.at)
        return found.end() if found else self.at

    def _take(self, end: int) -> str:
        start, self.at = self.at, end
        return self.text[start:end]
