"""What passes cost now: a measured curve, kept true by the passes of real replies."""

from __future__ import annotations

import math

from edgespec.policy.curve import CostCurve

__all__ = ["LiveCosts"]


class LiveCosts:
    """A cost curve that follows the machine: another load, a hotter chip, a longer context.

    Plain steps say what a plain step takes; wider passes say what theirs cost beside that, each for its own
    width and, while that is unknown, for others. Where wider passes change together it is the machine that
    changed, and `doubted` asks for a plain step. plain_seconds: what one takes now.
    """

    # Of what a pass takes beside what was expected, so much is believed: a few passes settle it.
    _PLAIN_RATE = 0.25
    _WIDE_RATE = 0.15
    # A single pass is believed to be so many times dearer or cheaper, and no more.
    _MOST = 4.0
    # Wide passes that are so far from what was expected say that plain steps have changed as well.
    _DOUBT = math.log(1.25)
    _DOUBT_RATE = 0.3

    def __init__(self, curve: CostCurve) -> None:
        self.curve = curve
        self.plain_seconds = curve.plain_step_seconds
        self._extra: dict[int, float] = {}
        self._common = self._surprise = 0.0
        self._seen, self._spread = 0, 0.0
        self._settled: tuple[dict[int, float], float] = {}, 0.0

    def v(self, rows: int) -> float:
        """The cost of a pass of `rows` rows, in plain steps."""
        if rows <= 1:
            return 1.0
        return self.curve.v(rows) * math.exp(self._extra.get(rows, self._common))

    def seconds(self, rows: int) -> float:
        """What a pass of `rows` rows takes."""
        return self.v(rows) * self.plain_seconds

    @property
    def doubted(self) -> bool:
        """Whether the last passes say that a plain step may cost something else by now."""
        return abs(self._surprise) > self._DOUBT

    @property
    def uncertainty(self) -> float:
        """One standard error of `plain_seconds`, as a share of it, by how much plain steps vary."""
        return self._spread / math.sqrt(max(1, min(self._seen, 4)))

    def saw(self, rows: int, seconds: float) -> None:
        """A pass of so many rows took so long."""
        most = math.log(self._MOST)
        most = math.log(self._MOST)
        off = max(-most, min(math.log(max(seconds, 1e-9) / self.seconds(rows)), most))
        if rows > 1:
            self._extra[rows] = self._extra.get(rows, self._common) + self._WIDE_RATE * off
            self._common += 0.5 * self._WIDE_RATE * off
            self._surprise += self._DOUBT_RATE * (off - self._surprise)
            return
        self._seen += 1
        self._spread += (abs(off) - self._spread) / min(self._seen, 10)
        if self.doubted:
            # It is the machine that has changed: what widths seemed to cost since the last plain step goes.
            self.plain_seconds *= math.exp(off)
            self._extra, self._common = dict(self._settled[0]), self._settled[1]
        else:
            self.plain_seconds *= math.exp(self._PLAIN_RATE * off)
        self._surprise = 0.0
        self._settled = dict(self._extra), self._common
