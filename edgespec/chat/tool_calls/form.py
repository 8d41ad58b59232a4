"""The interface between the tool-call parser and the formats that models use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from edgespec.chat.tool_calls.calls import ToolCallDelta, parse_object, read_arguments
from edgespec.chat.tool_calls.reader import TextReader, Wait

__all__ = [
    "MAX_NAME_CHARACTERS",
    "CallForm",
    "CallWriter",
    "ChoicePart",
    "JsonPart",
    "OptionalPart",
    "Part",
    "TextPart",
    "read_arguments_object",
    "read_closes",
]

MAX_NAME_CHARACTERS = 256
# A call is reported once this many characters of its arguments are known to be valid JSON. Text such as
# `{'city': ...}` therefore stays text.
_FIRST_CHARACTERS = 2


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


Part: TypeAlias = "str | JsonPart | TextPart | ChoicePart | OptionalPart"
"""A part of a tool call. A string stands for itself."""


class CallForm(Protocol):
    """A tool-call format. Implementations are stateless, so replies can share them."""

    @property
    def opens(self) -> tuple[str, ...]:
        """The markers that begin one or more calls. None of them is a prefix of another."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers in calls that may be control tokens. Other control tokens add no text to a reply."""

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
        """Return the schema of a parameter of the called tool, or an empty one if it is unknown."""
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
    """Read arguments: a JSON object, JSON in a string, or any way of writing no arguments."""
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
    """Read the markers after calls. Small models forget them, so they may be missing."""
    yield from reader.space()
    while closes and (yield from reader.literal(*closes)):
        yield from reader.space()
