"""Parse the tool calls in a reply while it streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from edgespec.chat.reasoning import MIN_CUT_CHARACTERS
from edgespec.chat.tool_calls.calls import ToolCallDelta
from edgespec.chat.tool_calls.form import SPACE, CallForm, CallWriter, TextReader, Wait

__all__ = ["CallSyntax", "ParsedText", "ToolCallParser"]


class ParsedText(NamedTuple):
    """Newly generated text, split into text to show and parts of tool calls."""

    text: str
    calls: tuple[ToolCallDelta, ...]


@dataclass(frozen=True)
class CallSyntax:
    """The format, schemas and ids used to parse the tool calls in one reply.

    Attributes:
        form: The model's tool-call format.
        schemas: The JSON schema of each tool's parameters, keyed by tool name.
        id_prefix: Prefix of the call ids. It must differ between replies.
        calls_or_answer: See `ToolCallParser`.
        single: Whether the reply ends after its first call.
    """

    form: CallForm
    schemas: Mapping[str, Mapping[str, Any]]
    id_prefix: str
    calls_or_answer: bool = False
    single: bool = False

    def parser(self) -> ToolCallParser:
        """Return a parser for the reply."""
        return ToolCallParser(
            self.form,
            self.schemas,
            lambda index: f"{self.id_prefix}{index}",
            calls_or_answer=self.calls_or_answer,
        )

    @cached_property
    def markers(self) -> frozenset[bytes]:
        """The text of each control token that occurs in calls."""
        return frozenset(marker.encode() for marker in self.form.markers)


class ToolCallParser:
    """Splits an answer into text and tool calls as it arrives.

    The result does not depend on how the answer is split into chunks. Text that turns out not to be a call is
    returned as text. If that becomes clear only after arguments have been reported, the call ends there, and
    the rest is returned as text. Whitespace around calls belongs to the calls.

    Args:
        form: The model's tool-call format.
        schemas: The JSON schema of each tool's parameters, keyed by tool name.
        new_id: Returns the id of the call with the given index.
        calls_or_answer: Whether the reply is either calls to known tools or an answer without calls, such as
            JSON. Text that resembles a call in such an answer is not treated as one.

    Attributes:
        after_call: Number of characters that follow the first call, or the first list of calls in models that
            write lists. None until that call is known to be complete, which may take one more character.
    """

    def __init__(
        self,
        form: CallForm,
        schemas: Mapping[str, Mapping[str, Any]],
        new_id: Callable[[int], str],
        *,
        calls_or_answer: bool = False,
    ) -> None:
        self._form = form
        self.after_call: int | None = None
        # Whether the reply is either calls or an answer, and whether an answer has begun.
        self._calls_or_answer, self._is_answer = calls_or_answer, False
        self._reader = TextReader()
        self._text: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self._writer = CallWriter(
            self._reader, schemas, new_id, self._report, known_tools_only=calls_or_answer
        )
        self._parsing = self._parse()
        # Whether a marker has started a call, and whether to drop the call because the reply was truncated.
        # Calls without a marker are not dropped, because a JSON answer could look like the start of a call.
        self._in_call = self._drops_rest = False
        # Whether a call may start at the current position without a marker.
        self._starts_bare = form.starts_bare

    @property
    def pending(self) -> int:
        """Number of characters that are held back and may turn out to be text."""
        return len(self._reader.text) - self._writer.used

    def feed(self, text: str) -> ParsedText:
        """Add answer text, and return all text and parts of calls that can be distinguished so far."""
        self._reader.text += text
        next(self._parsing, None)
        return self._drain()

    def finish(self, text: str = "", *, cut: bool = False) -> ParsedText:
        """Add the final text of the answer, and return everything that was held back.

        Args:
            text: The final text.
            cut: Whether the reply reached its maximum length. If so, an incomplete marker or call at its end
                is omitted, because it is not text for the user.
        """
        reader = self._reader
        reader.text += text
        next(self._parsing, None)
        if cut and self._in_call:
            self._drops_rest = True
        elif (
            cut
            and not self._is_answer
            and (length := reader.partial_length(self._form.opens)) >= MIN_CUT_CHARACTERS
        ):
            reader.text = reader.text[:-length]
        reader.ended = True
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
            is_call = yield from self._form.read(reader, writer)
            self._in_call = False
            if self._drops_rest:
                writer.end()
                return
            if is_call and writer.used:
                if self.after_call is None:
                    self.after_call = len(reader.text) - reader.at
                yield from reader.space()
                self._starts_bare = self._form.starts_bare
            else:
                used = writer.used
                writer.end()
                self._starts_bare = False
                self._is_answer = self._calls_or_answer
                reader.at = max(used, opening_end)
                self._text.append(reader.text[used : reader.at])

    def _find_opening(self) -> Wait[int | None]:
        """Output the text before the next opening marker, and read past the marker.

        Returns:
            The position after the marker, or None if there is no further marker. Only whitespace
            remains before the marker.
        """
        reader = self._reader
        reader.drop_read_text()
        self._writer.used = 0
        if self._starts_bare:
            yield from reader.space()
            if (yield from reader.peek()) == "{":
                return reader.at
            reader.at = 0
        if self._calls_or_answer:
            return (yield from self._find_opening_at_start())
        while True:
            found = [(at, opening) for opening in self._form.opens if (at := reader.text.find(opening)) >= 0]
            if found:
                at, opening = min(found)
                reader.at = self._show(at) + len(opening)
                self._in_call = True
                return reader.at
            if reader.ended:
                self._text.append(reader.text)
                reader.at = len(reader.text)
                reader.drop_read_text()
                return None
            self._show(len(reader.text) - reader.partial_length(self._form.opens))
            yield

    def _find_opening_at_start(self) -> Wait[int | None]:
        """Read an opening marker if it comes next. Otherwise, output the rest of the answer."""
        reader = self._reader
        if not self._is_answer:
            yield from reader.space()
            if (yield from reader.literal(*self._form.opens)):
                self._in_call = True
                return reader.at
            self._is_answer = True
        while True:
            self._text.append(reader.text)
            reader.at = len(reader.text)
            reader.drop_read_text()
            if reader.ended:
                return None
            yield

    def _show(self, end: int) -> int:
        """Output the text before `end`, except trailing whitespace. Return the length of that whitespace."""
        reader = self._reader
        shown = reader.text[:end].rstrip(SPACE)
        self._text.append(shown)
        reader.at = len(shown)
        reader.drop_read_text()
        return end - len(shown)
