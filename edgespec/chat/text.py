"""Streaming token-to-text decoding, which emits only whole characters and detects stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

__all__ = ["ReplyText"]


class ReplyText:
    """Collects the text of one reply token by token.

    A character that spans several tokens is emitted when it is complete. Text that could be the start of a
    stop string is withheld until later tokens show whether it is.

    Attributes:
        stop_string: The stop string that ended the reply. Empty if none has.
    """

    def __init__(
        self, piece: Callable[[int], bytes], is_end: Callable[[int], bool], stop: Sequence[str]
    ) -> None:
        self._piece = piece
        self._is_end = is_end
        self._stop = tuple(stop)
        self.stop_string = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._released: list[str] = []
        self._fresh: list[str] = []

    @property
    def text(self) -> str:
        """The reply's text so far, without text that could be the start of a stop string."""
        return "".join(self._released)

    def feed(self, token: int) -> bool:
        """Add a token to the reply's text. Return True if the token ends the reply."""
        if self._is_end(token):
            self._fresh.append("")
            return True
        self._held += self._decoder.decode(self._piece(token))
        found = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.stop_string = min(found)
            self._release(at)
            self._held = ""
            self._decoder.reset()
            return True
        self._release(len(self._held) - self._undecided())
        return False

    def _undecided(self) -> int:
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0

    def _release(self, length: int) -> None:
        released, self._held = self._held[:length], self._held[length:]
        self._released.append(released)
        self._fresh.append(released)

    def drain(self) -> list[str]:
        """Return the text that each token added to the reply since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def finish(self) -> str:
        """End the reply and return the rest of its text. An incomplete character becomes U+FFFD."""
        rest = self._held + self._decoder.decode(b"", final=True)
        self._held = ""
        self._released.append(rest)
        return rest
