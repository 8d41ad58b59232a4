"""Process a reply's text while it streams: decode it, find its end, and split it into parts.

A reply ends at a stop string, or after its tool call if only one call is allowed. Its parts are reasoning,
answer and tool calls.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from edgespec.chat.reasoning import ReasoningSplitter, SplitText, split_at_markers
from edgespec.chat.tool_calls.calls import ToolCall, ToolCallDelta, collect_calls
from edgespec.chat.tool_calls.parser import CallSyntax

__all__ = [
    "CallLimit",
    "ReleasedText",
    "ReplyParts",
    "ReplySplitter",
    "ReplyText",
    "StopSearch",
    "split_reply",
    "stop_searches",
]


class ReleasedText(NamedTuple):
    """Text that has become part of a reply.

    Attributes:
        text: The text.
        tokens: Number of further tokens that are now known to belong to the reply's text. Tokens of a stop
            string never do.
        cut_bytes: Number of trailing bytes of the last of these tokens that belong to the stop string.
    """

    text: str
    tokens: int = 0
    cut_bytes: int = 0


class ReplyText:
    """Collects the text of one reply token by token.

    A character that spans several tokens is emitted once it is complete. Text that could be the start of a
    stop string is held back until later tokens show whether it is.

    Attributes:
        stop_string: The stop string that ended the reply. Empty if none has.
    """

    def __init__(
        self,
        piece: Callable[[int], bytes],
        is_end: Callable[[int], bool],
        searches: Sequence[StopSearch | CallLimit] = (),
    ) -> None:
        self._piece = piece
        self._is_end = is_end
        self._searches = tuple(searches)
        self.stop_string = ""
        self._is_stopped = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._released: list[str] = []
        self._released_length = 0
        self._fresh: list[ReleasedText] = []
        # The start and end positions of the tokens that may turn out not to belong to the text.
        self._undecided: deque[tuple[int, int]] = deque()

    @property
    def text(self) -> str:
        """The reply's text so far, without text that could be the start of a stop string."""
        return "".join(self._released)

    def feed(self, token: int) -> bool:
        """Add a token to the reply's text. Return True if the token ends the reply."""
        start = self._released_length + len(self._held)
        if self._is_end(token):
            self._undecided.append((start, start))
            self._fresh.append(ReleasedText("", *self._release_tokens()))
            return True
        text = self._decoder.decode(self._piece(token))
        self._held += text
        # Bytes pending in the decoder are the start of the next character.
        waiting, _ = self._decoder.getstate()
        self._undecided.append((start, start + len(text) + bool(waiting)))
        ends = [search.feed(text) for search in self._searches]
        self._fresh.append(self._release(ends))
        return self._is_stopped

    def _release(self, ends: Sequence[int]) -> ReleasedText:
        """Release the text up to the first stop string found, or else up to the smallest of `ends`.

        Args:
            ends: For each search, the length of the text that it allows to be released.
        """
        found = [
            (end, each.found)
            for end, each in zip(ends, self._searches, strict=True)
            if each.found is not None
        ]
        if found:
            end, self.stop_string = min(found)
            self._is_stopped = True
        else:
            end = min(ends, default=self._released_length + len(self._held))
        length = max(0, end - self._released_length)
        released, rest = self._held[:length], self._held[length:]
        self._held = "" if found else rest
        self._released.append(released)
        self._released_length += length
        return ReleasedText(released, *self._release_tokens(rest))

    def _release_tokens(self, dropped: str = "") -> tuple[int, int]:
        """Return how many tokens now belong to the text, and how many bytes of the last one do not.

        Args:
            dropped: The stop string that was found and any text after it.
        """
        count, cut, end = 0, 0, self._released_length
        if not self._searches:
            # If there is nothing to search for, an incomplete character at the end also counts as text.
            end += 1
        while self._undecided and self._undecided[0][1] <= end:
            self._undecided.popleft()
            count += 1
        if self._is_stopped:
            while self._undecided and self._undecided[0][0] < end:
                cut = len(dropped[: self._undecided.popleft()[1] - end].encode("utf-8", "replace"))
                count += 1
            self._undecided.clear()
        return count, cut

    def drain(self) -> list[ReleasedText]:
        """Return the text that each token has released since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def finish(self) -> ReleasedText:
        """End the reply and return the rest of its text. An incomplete character becomes U+FFFD."""
        if self._is_stopped:
            return ReleasedText("")
        text = self._decoder.decode(b"", final=True)
        self._held += text
        for search in self._searches:
            search.feed(text)
        rest = self._release([search.finish() for search in self._searches])
        # Without a stop string, all remaining tokens belong to the text.
        tokens = rest.tokens + len(self._undecided)
        self._undecided.clear()
        return rest._replace(tokens=tokens)


class StopSearch:
    """Searches the text of one reply for stop strings.

    The first complete stop string ends the reply. If several end at the same character, the longest one wins.

    Args:
        stop: The stop strings.
        splitter: Separates the answer from reasoning and tool calls, which are not searched. If None, the
            whole text is searched.
        may_end: Returns whether the constraint allows the reply to end after the given answer. If not, a stop
            string is treated as part of the answer.

    Attributes:
        found: The stop string that ends the reply, or None.
    """

    def __init__(
        self,
        stop: Sequence[str],
        splitter: ReplySplitter | None = None,
        may_end: Callable[[str], bool] | None = None,
    ) -> None:
        self.found: str | None = None
        self._stop, self._splitter, self._may_end = tuple(stop), splitter, may_end
        # The answer since the last tool call, and the length of the whole text.
        self._answer = ""
        self._length = 0

    def feed(self, text: str) -> int:
        """Add reply text, and return the length of the reply up to the stop string.

        If no stop string has been found, return the length up to the first character that could still belong
        to one.
        """
        # Feed the splitter character by character, to keep track of the answer's position in the whole text.
        for part in text if self._splitter else [text]:
            self._length += len(part)
            if self._splitter:
                parts = self._splitter.feed(part)
                if parts.calls:
                    self._answer = ""
                part = parts.answer
            if (end := self._search(part)) is not None:
                return end
        return self._answer_end - self._undecided()

    def finish(self) -> int:
        """Search the held-back text and end the search. Returns the same as `feed`."""
        rest = self._splitter.finish().answer if self._splitter else ""
        end = self._search(rest)
        return self._length if end is None else end

    @property
    def _answer_end(self) -> int:
        """Position in the whole text at which the answer so far ends."""
        return self._length - (self._splitter.pending if self._splitter else 0)

    def _search(self, text: str) -> int | None:
        """Search the next part of the answer. Return a stop string's position in the whole text, or None."""
        self._answer += text
        for at, stop in self._matches(len(text)):
            if self._may_end is None or self._may_end(self._answer[:at]):
                self.found = stop
                return self._answer_end - len(self._answer) + at
        return None

    def _matches(self, new: int) -> Iterator[tuple[int, str]]:
        """Yield the position and text of each stop string that ends within the last `new` characters."""
        for end in range(len(self._answer) - new + 1, len(self._answer) + 1):
            ending = [stop for stop in self._stop if self._answer.endswith(stop, 0, end)]
            for stop in sorted(ending, key=len, reverse=True):
                yield end - len(stop), stop

    def _undecided(self) -> int:
        """Return the length of the longest suffix of the answer that could become a stop string."""
        longest = max(map(len, self._stop)) - 1
        for length in range(min(longest, len(self._answer)), 0, -1):
            if any(stop.startswith(self._answer[-length:]) for stop in self._stop):
                return length
        return 0


class CallLimit:
    """Ends a reply after its first tool call, if only one call is allowed.

    Attributes:
        found: None until the reply has ended, and then an empty string, because no stop string ended it.
    """

    def __init__(self, splitter: ReplySplitter) -> None:
        self.found: str | None = None
        self._splitter = splitter
        self._length = 0

    def feed(self, text: str) -> int:
        """Add reply text, and return the length of the text that can be shown."""
        for character in text:
            self._length += 1
            self._splitter.feed(character)
            if (after := self._splitter.after_single_call) is not None:
                self.found = ""
                return self._length - after
        return self._length - self._splitter.pending

    def finish(self) -> int:
        """End the search when the reply is complete, and return the length of the reply."""
        return self._length


def stop_searches(
    stop: Sequence[str],
    new_splitter: Callable[[], ReplySplitter] | None,
    may_end: Callable[[str], bool] | None = None,
    *,
    single_call: bool = False,
) -> list[StopSearch | CallLimit]:
    """Return the searches that determine where a reply ends.

    Args:
        stop: The stop strings. A string with a reasoning marker, such as `</think>`, cannot occur in an
            answer, so it is searched for in the whole text.
        new_splitter: Returns a new splitter for the reply. If None, the whole text is searched for every
            string.
        may_end: See `StopSearch`.
        single_call: Whether the reply ends after its first tool call. Needs `new_splitter`.
    """
    if new_splitter is None:
        return [StopSearch(stop, None, may_end)] if stop else []
    marked = [each for each in stop if any(is_marker for _, is_marker in split_at_markers(each))]
    others = [each for each in stop if each not in marked]
    return [
        *([StopSearch(marked)] if marked else []),
        *([StopSearch(others, new_splitter(), may_end)] if others else []),
        *([CallLimit(new_splitter())] if single_call else []),
    ]


class ReplyParts(NamedTuple):
    """Newly generated text, split into reasoning, answer and parts of tool calls.

    Attributes:
        in_reasoning: Whether any of the new text belongs to the reasoning.
    """

    reasoning: str
    answer: str
    in_reasoning: bool
    calls: tuple[ToolCallDelta, ...]


class ReplySplitter:
    """Splits a reply as its text arrives. Tool calls are recognised in the answer, but not in the reasoning.

    Args:
        reply_start: Text at the end of the prompt that already belongs to the reply.
        syntax: The model's tool-call format. None if there are no tools.
    """

    def __init__(self, reply_start: str = "", syntax: CallSyntax | None = None) -> None:
        ends = syntax.form.reasoning_ends if syntax else ()
        self._reasoning = ReasoningSplitter(reply_start, ends)
        self._calls = syntax.parser() if syntax else None
        self._single = syntax is not None and syntax.single
        self._has_second_call = False

    @property
    def pending(self) -> int:
        """Number of characters that are held back and may turn out to be part of the answer."""
        return self._reasoning.pending or (self._calls.pending if self._calls else 0)

    @property
    def after_single_call(self) -> int | None:
        """Number of characters after the reply's only allowed call, or None until that call is complete."""
        if not self._single or self._calls is None:
            return None
        if self._has_second_call:
            return 0
        after = self._calls.after_call
        return None if after is None else after + self._reasoning.pending

    def feed(self, text: str) -> ReplyParts:
        """Add reply text, and return all parts that can be classified so far."""
        return self._parts(self._reasoning.feed(text), is_end=False)

    def finish(self, text: str = "", *, cut: bool = False) -> ReplyParts:
        """Add the final text of the reply, and return all parts that were held back.

        Args:
            text: The final text.
            cut: Whether the reply reached its maximum length. If so, an incomplete marker at its end is
                omitted.
        """
        return self._parts(self._reasoning.finish(text, cut=cut), is_end=True, cut=cut)

    def _parts(self, split: SplitText, is_end: bool, *, cut: bool = False) -> ReplyParts:
        if self._calls is None:
            return ReplyParts(*split, ())
        parsed = self._calls.finish(split.answer, cut=cut) if is_end else self._calls.feed(split.answer)
        calls = parsed.calls
        if self._single:
            # Some models write all their calls as one list, so keep only the first call.
            calls = tuple(call for call in calls if call.index == 0)
            self._has_second_call = self._has_second_call or len(calls) < len(parsed.calls)
        return ReplyParts(split.reasoning, parsed.text, split.in_reasoning, calls)


class SplitReply(NamedTuple):
    """The parts of a finished reply."""

    reasoning: str
    answer: str
    tool_calls: tuple[ToolCall, ...]


def split_reply(
    text: str, reply_start: str = "", syntax: CallSyntax | None = None, *, cut: bool = False
) -> SplitReply:
    """Split a finished reply. See `ReplySplitter` and `ReplySplitter.finish` for the arguments."""
    parts = ReplySplitter(reply_start, syntax).finish(text, cut=cut)
    return SplitReply(parts.reasoning, parts.answer, collect_calls(parts.calls))
