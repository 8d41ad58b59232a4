"""What passes cost now: a measured curve, kept true by the passes of real replies."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.costs.curve import CostCurve

__all__ = ["LiveCosts"]

# Longer contexts cost more, and other widths pay: from so many tokens on something is learnt anew.
_LENGTHS = (2048, 8192, 32768)
# So many replies at once are as good as more.
_MOST_REPLIES = 8
# So many passes tell what they take among other replies: each is disturbed in its own way.
_ENOUGH = 3
_MANY = 20


@dataclass(slots=True)
class _Found:
    """What was found at one length of context, with so many replies at once.

    extra: by rows, and common for others, the logarithm of what a pass costs over what the curve says.
    seen, wide: plain steps and other passes with so many replies.
    """

    plain_seconds: float
    extra: dict[int, float] = field(default_factory=dict)
    common: float = 0.0
    seen: int = _ENOUGH
    wide: int = _MANY


class LiveCosts:
    """A cost curve that follows the machine: another load, a hotter chip, a longer context, more replies.

    Plain steps say what a plain step takes; wider passes say what theirs cost beside that, each for its own
    width and, while that is unknown, for others. Where wider passes change together it is the machine that
    changed, and `doubted` asks for a plain step; so it does with more replies at once than there were before.
    """

    # Of what a pass takes beside what was expected, so much is believed: a few passes settle it.
    _PLAIN_RATE = 0.25
    _WIDE_RATE = 0.15
    # A single pass is believed to be so many times dearer or cheaper, and no more.
    _MOST = math.log(4.0)
    # Wide passes that are so far from what was expected say that plain steps have changed as well.
    _DOUBT = math.log(1.25)
    _DOUBT_RATE = 0.3

    def __init__(self, curve: CostCurve) -> None:
        self.curve = curve
        self._here = _Found(curve.target_step_seconds)
        # By length of context, and the number of replies at once.
        self._place = (0, 1)
        self._found = {self._place: self._here}
        self._surprise = 0.0
        self._seen, self._spread = 0, 0.0
        self._settled = replace(self._here, extra={})

    @property
    def plain_seconds(self) -> float:
        """What a plain step takes now."""
        return self._here.plain_seconds

    def at(self, context_tokens: int) -> None:
        """The text is so long by now."""
        self._go(bisect_right(_LENGTHS, context_tokens), self._place[1])

    @property
    def replies(self) -> int:
        """How many replies at once it goes by."""
        return self._place[1]

    def among(self, replies: int) -> None:
        """So many replies are being made at once."""
        self._go(self._place[0], max(1, min(replies, _MOST_REPLIES)))

    def _go(self, length: int, replies: int) -> None:
        place = (length, replies)
        if place == self._place:
            return
        if place not in self._found:
            nearest = min(self._found, key=lambda known: (abs(known[1] - replies), abs(known[0] - length)))
            found = _copied(self._found[nearest])
            if nearest[1] != replies:
                found.seen = found.wide = 0
            self._found[place] = found
        self._place, self._here = place, self._found[place]
        self._settled, self._surprise = _copied(self._here), 0.0

    def v(self, rows: int) -> float:
        """The cost of a pass of `rows` rows, in plain steps."""
        if rows <= 1:
            return 1.0
        return self.curve.v(rows) * math.exp(self._here.extra.get(rows, self._here.common))

    def seconds(self, rows: int) -> float:
        """What a pass of `rows` rows takes."""
        return self.v(rows) * self.plain_seconds

    @property
    def doubted(self) -> bool:
        """Whether a plain step may cost something else by now: passes say so, or too few were seen."""
        return self._here.seen < _ENOUGH or self._surprising

    @property
    def _surprising(self) -> bool:
        return abs(self._surprise) > self._DOUBT

    @property
    def uncertainty(self) -> float:
        """One standard error of `plain_seconds`, as a share of it, by how much plain steps vary."""
        return self._spread / math.sqrt(max(1, min(self._seen, 4)))

    def saw(self, rows: int, seconds: float) -> None:
        """A pass of so many rows took so long."""
        here = self._here
        off = max(-self._MOST, min(math.log(max(seconds, 1e-9) / self.seconds(rows)), self._MOST))
        if rows > 1:
            rate = max(self._WIDE_RATE, _ENOUGH / (here.wide + _ENOUGH))
            believed = here.extra.get(rows, here.common)
            here.extra[rows] = believed + rate * off
            here.common += 0.5 * rate * (believed + off - here.common)
            here.wide += 1
            self._surprise += self._DOUBT_RATE * (off - self._surprise)
            return
        self._seen += 1
        self._spread += (abs(off) - self._spread) / min(self._seen, 10)
        if self._surprising and off / self._surprise > 0.5:
            # It is the machine that has changed: what widths seemed to cost since the last plain step goes.
            here.plain_seconds *= math.exp(off)
            here.extra, here.common = dict(self._settled.extra), self._settled.common
        else:
            here.plain_seconds *= math.exp(max(self._PLAIN_RATE, 1.0 / (here.seen + 1)) * off)
        self._surprise, here.seen = 0.0, here.seen + 1
        self._settled = _copied(here)

    def kept(self) -> dict[str, NDArray[Any]]:
        """What was found with one reply at a time, for another run over the same curve.

        What more replies at once cost depends on what the others were.
        """
        plain = self.curve.target_step_seconds
        alone = {length: found for (length, replies), found in self._found.items() if replies == 1}
        return {
            "found": np.array([(at, f.plain_seconds / plain, f.common) for at, f in alone.items()]),
            "extra": np.array(
                [(at, rows, extra) for at, f in alone.items() for rows, extra in f.extra.items()]
            ).reshape(-1, 3),
        }

    def restore(self, values: Mapping[str, NDArray[Any]]) -> None:
        """Take over what was found in another run. Raises KeyError, ValueError for what makes no sense."""
        found = {}
        for at, plain, common in values["found"].reshape(-1, 3).tolist():
            known = 0 <= at <= len(_LENGTHS)
            if not (known and plain > 0.0 and max(abs(math.log(plain)), abs(common)) < _NONSENSE):
                raise ValueError(f"costs of {plain} plain steps and {common} are none")
            found[int(at)] = _Found(plain * self.curve.target_step_seconds, common=common)
        for at, rows, extra in values["extra"].reshape(-1, 3).tolist():
            if not (abs(extra) < _NONSENSE and 1 < rows < math.inf):
                raise ValueError(f"a cost of {extra} for {rows} rows is none")
            found[int(at)].extra[int(rows)] = extra
        self._found = {(length, 1): one for length, one in found.items()}
        self._place = (0, 1)
        self._here = self._found.setdefault(self._place, _Found(self.curve.target_step_seconds))
        self._settled = _copied(self._here)


# Costs so many times what was measured, as a logarithm, are no costs.
_NONSENSE = math.log(1000.0)


def _copied(found: _Found) -> _Found:
    return replace(found, extra=dict(found.extra))
