"""Streaming detokenization that emits only whole characters and stops at stop strings."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from edgespec.chat.stop_strings import CallLimit, StopSearch

__all__ = ["ReleasedText", "ReplyText"]


class ReleasedText(NamedTuple):
    """Text that has become part of a reply.

    Attributes:
        text: The text.
        tokens: Number of tokens so far that definitely belong to the reply's text. Tokens of a stop string
            never do.
        cut_bytes: Number of trailing bytes of the last of these tokens that belong to the stop string.
    """

    text: str
    tokens: int = 0
    cut_bytes: int = 0


class ReplyText:
    """Collects the text of one reply token by token.

    A character that spans several tokens is emitted once it is complete. Text that could be the start of a
    stop string is held back until later tokens decide it.

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
        # The start and end positions of the tokens that may not belong to the text.
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
        # Bytes pending in the decoder belong to the next character.
        waiting, _ = self._decoder.getstate()
        self._undecided.append((start, start + len(text) + bool(waiting)))
        ends = [search.feed(text) for search in self._searches]
        self._fresh.append(self._release(ends))
        return self._is_stopped

    def _release(self, ends: Sequence[int]) -> ReleasedText:
        """Release the text up to the first stop string found, or else up to the smallest of `ends`.

        Args:
            ends: The text length that each search allows to be released.
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
            # Without a search, an incomplete character belongs to the text as well.
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
        """Return what each token released since the last call."""
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
        # Without a stop string, all tokens belong to the text.
        tokens = rest.tokens + len(self._undecided)
        self._undecided.clear()
        return rest._replace(tokens=tokens)
