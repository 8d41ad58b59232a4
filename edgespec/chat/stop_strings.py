"""Find where a reply ends while its text streams in: at a stop string, or after the only allowed call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from edgespec.chat.reasoning import split_at_markers
from edgespec.chat.reply_splitter import ReplySplitter

__all__ = ["CallLimit", "StopSearch", "stop_searches"]


class StopSearch:
    """Searches the text of one reply for stop strings.

    The first complete stop string ends the reply. If several end at the same character, the longest one wins.

    Args:
        stop: The stop strings.
        splitter: Separates the answer from reasoning and tool calls, which are not searched. If None, the
            whole text is searched.
        may_end: Returns whether the constraint allows the reply to end after an answer. Where it does not, a
            stop string is treated as part of the answer.

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
        """Add reply text. Returns:
        The length of the reply up to the stop string. If no stop string has been found, the length up to
        the first character that could still belong to one.
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
        """Search the text that was held back when the reply ended. Returns the same as `feed`."""
        rest = self._splitter.finish().answer if self._splitter else ""
        end = self._search(rest)
        return self._length if end is None else end

    @property
    def _answer_end(self) -> int:
        """The length of the whole text, up to the end of the answer so far."""
        return self._length - (self._splitter.pending if self._splitter else 0)

    def _search(self, text: str) -> int | None:
        """Search the next part of the answer. Return the position of a stop string in the whole text."""
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
        found: An empty string once the reply has ended, because no stop string ended it. Until then None.
    """

    def __init__(self, splitter: ReplySplitter) -> None:
        self.found: str | None = None
        self._splitter = splitter
        self._length = 0

    def feed(self, text: str) -> int:
        """Add text of the reply. Return the length of the text that may be shown."""
        for character in text:
            self._length += 1
            self._splitter.feed(character)
            if (after := self._splitter.after_single_call) is not None:
                self.found = ""
                return self._length - after
        return self._length - self._splitter.pending

    def finish(self) -> int:
        """Return the length of the reply."""
        return self._length


def stop_searches(
    stop: Sequence[str],
    new_splitter: Callable[[], ReplySplitter] | None,
    may_end: Callable[[str], bool] | None = None,
    *,
    single_call: bool = False,
) -> list[StopSearch | CallLimit]:
    """Return the objects that search a reply for its end.

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
