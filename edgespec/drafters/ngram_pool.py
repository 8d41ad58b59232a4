"""The n-gram pool of lookahead decoding: what was seen to follow a token, the latest first."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

__all__ = ["NgramPool"]


class NgramPool:
    """N-grams by their first token (Fu et al. 2024, arXiv 2402.02057, section 3.2).

    Bounded: `EACH` for one token and `MOST` in all; what was added longest ago goes first.
    """

    MOST = 1 << 14
    EACH = 16

    def __init__(self) -> None:
        self._after: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        """How many n-grams it holds."""
        return self._count

    def add(self, ngram: tuple[int, ...]) -> None:
        """Take note of an n-gram of at least two tokens; one that is known becomes the latest."""
        token, rest = ngram[0], ngram[1:]
        known = self._after.setdefault(token, OrderedDict())
        self._after.move_to_end(token)
        self._count += rest not in known
        known[rest] = None
        known.move_to_end(rest)
        if len(known) > self.EACH:
            known.popitem(last=False)
            self._count -= 1
        if self._count > self.MOST:
            oldest = next(iter(self._after))
            self._after[oldest].popitem(last=False)
            self._count -= 1
            if not self._after[oldest]:
                del self._after[oldest]

    def after(self, token: int, count: int) -> list[tuple[int, ...]]:
        """Up to `count` continuations of a token, the latest first."""
        return list(islice(reversed(self._after.get(token, OrderedDict())), count))
