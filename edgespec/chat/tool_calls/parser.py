"""Parse the tool calls in a reply while it streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from edgespec.chat.tool_calls.calls import ToolCallDelta
from edgespec.chat.tool_calls.form import CallForm, CallWriter
from edgespec.chat.tool_calls.reader import SPACE, TextReader, Wait

__all__ = ["CallSyntax", "ParsedText", "ToolCallParser"]


class ParsedText(NamedTuple):
    """Newly generated text, split into text to show and parts of tool calls."""

    text: str
    calls: tuple[ToolCallDelta, ...]


@dataclass(frozen=True)
class CallSyntax:
    """The format, schemas and ids with which to parse the tool calls of one reply.

    Attributes:
        form: How the model writes calls.
        schemas: The JSON schema of each tool's parameters, by the tool's name.
        id_prefix: The start of the ids of the calls, which must differ between replies.
    """

    form: CallForm
    schemas: Mapping[str, Mapping[str, Any]]
    id_prefix: str

    def parser(self) -> ToolCallParser:
        """Return a parser for the reply."""
        return ToolCallParser(self.form, self.schemas, lambda index: f"{self.id_prefix}{index}")

    @cached_property
    def markers(self) -> frozenset[bytes]:
        """The texts of the control tokens that occur in calls."""
        return frozenset(marker.encode() for marker in self.form.markers)


class ToolCallParser:
    """Splits an answer into text and tool calls as it arrives.

    The result does not depend on how the answer is divided into parts. Text that turns out not to be a call
    is returned as text. If this becomes clear only after the first arguments were reported, the call ends
    there, and the rest is returned as text. Whitespace around calls is part of the calls.

    Args:
        form: How the model writes calls.
        schemas: The JSON schema of each tool's parameters, by the tool's name.
        new_id: Returns the id of the call with the given index.
    """

    def __init__(
        self, form: CallForm, schemas: Mapping[str, Mapping[str, Any]], new_id: Callable[[int], str]
    ) -> None:
        self._form = form
        self._reader = TextReader()
        self._text: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self._writer = CallWriter(self._reader, schemas, new_id, self._report)
        self._parsing = self._parse()
        # Whether a call may begin at the current position without a marker.
        self._starts_bare = form.starts_bare

    def feed(self, text: str) -> ParsedText:
        """Add text of the answer. Return the text and parts of calls that can already be told apart."""
        self._reader.text += text
        next(self._parsing, None)
        return self._drain()

    def finish(self, text: str = "") -> ParsedText:
        """Add the last text of the answer, and return everything that `feed` has not returned."""
        self._reader.text += text
        self._reader.ended = True
        next(self._parsing, None)
        return self._drain()

    def _drain(self) -> ParsedText:
        parsed = ParsedText("".join(self._text), tuple(self._deltas))
        self._text.clear()
        self._deltas.clear()
        return parsed

    def _report(self, delta: ToolCallDelta) -> None:
        if self._deltas and self._deltas[-1].index == delta.index:
            last = self._deltas.pop()
            delta = ToolCallDelta(delta.index, last.id, last.name, last.arguments + delta.arguments)
        self._deltas.append(delta)

    def _parse(self) -> Wait[None]:
        reader, writer = self._reader, self._writer
        while (opening_end := (yield from self._find_opening())) is not None:
            writer.used = 0
            if (yield from self._form.read(reader, writer)) and writer.used:
                yield from reader.space()
                self._starts_bare = self._form.starts_bare
            else:
                used = writer.used
                writer.end()
                self._starts_bare = False
                reader.at = max(used, opening_end)
                self._text.append(reader.text[used : reader.at])

    def _find_opening(self) -> Wait[int | None]:
        """Read up to and including the next opening marker, and show the text before it.

        Returns:
            The end of the marker, or None if the answer has no further marker. Only whitespace is left before
            the marker.
        """
        reader = self._reader
        reader.drop_read_text()
        if self._starts_bare:
            yield from reader.space()
            if (yield from reader.peek()) == "{":
                return reader.at
            reader.at = 0
        while True:
            found = [(at, opening) for opening in self._form.opens if (at := reader.text.find(opening)) >= 0]
            if found:
                at, opening = min(found)
                reader.at = self._show(at) + len(opening)
                return reader.at
            if reader.ended:
                self._text.append(reader.text)
                return None
            self._show(len(reader.text) - reader.partial_length(self._form.opens))
            yield

    def _show(self, end: int) -> int:
        """Show the text before `end` without trailing whitespace. Return the length of the whitespace."""
        reader = self._reader
        shown = reader.text[:end].rstrip(SPACE)
        self._text.append(shown)
        reader.at = len(shown)
        reader.drop_read_text()
        return end - len(shown)
