"""From tokens to text as it streams: whole characters only, stop strings held back until they are decided."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

__all__ = ["ReplyText"]


class ReplyText:
    """Collects the text of one reply token by token.

    A character spread over several tokens appears with its last byte. Text that may be the beginning
    of a stop string is held back until it is clear that it is not.
    """

    def __init__(
        self, piece: Callable[[int], bytes], is_end: Callable[[int], bool], stop: Sequence[str]
    ) -> None:
        self._piece = piece
        self._is_end = is_end
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._said: list[str] = []
        self._fresh: list[str] = []

    @property
    def text(self) -> str:
        """All text that is certain."""
        return "".join(self._said)

    def feed(self, token: int) -> bool:
        """Take one emitted token; True when the reply ends with it."""
        if self._is_end(token):
            self._fresh.append("")
            return True
        self._held += self._decoder.decode(self._piece(token))
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self._release(min(found))
            self._held = ""
            self._decoder.reset()
            return True
        self._release(len(self._held) - self._undecided())
        return False

    def _undecided(self) -> int:
        """The length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0

    def _release(self, length: int) -> None:
        said, self._held = self._held[:length], self._held[length:]
        self._said.append(said)
        self._fresh.append(said)

    def drain(self) -> list[str]:
        """What each token since the last call added to the text."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def finish(self) -> str:
        """The reply is over: the text still held back, an unfinished character as U+FFFD."""
        rest = self._held + self._decoder.decode(b"", final=True)
        self._held = ""
        self._said.append(rest)
        return rest
