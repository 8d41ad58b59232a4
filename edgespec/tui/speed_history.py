"""The speed of a reply over time, shown as a sparkline."""

from __future__ import annotations

from time import monotonic

__all__ = ["SpeedHistory", "sparkline"]

_BARS = "▁▂▃▄▅▆▇█"
# Initial duration of one bar of the sparkline, in seconds. It doubles when a reply exceeds `_MAX_BARS` bars.
_BAR_SECONDS = 0.25
_MAX_BARS = 64
# Minimum number of bars of a sparkline. Fewer bars would show mostly noise.
_MIN_BARS = 6


class SpeedHistory:
    """The number of tokens generated in each time interval of a reply.

    An interval lasts a quarter of a second at first. Its length doubles whenever there would be more than
    64 intervals.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._bar_seconds = _BAR_SECONDS
        self._began: float | None = None

    def add(self, tokens: int, now: float | None = None) -> None:
        """Add tokens that arrived at `now` (default: the current time). The first call starts the clock."""
        now = monotonic() if now is None else now
        if self._began is None:
            self._began = now
        while (place := int((now - self._began) / self._bar_seconds)) >= _MAX_BARS:
            self._tokens += [0] * (len(self._tokens) % 2)
            self._tokens = [sum(self._tokens[i : i + 2]) for i in range(0, len(self._tokens), 2)]
            self._bar_seconds *= 2
        self._tokens += [0] * (place + 1 - len(self._tokens))
        self._tokens[place] += tokens

    def rates(self) -> list[float]:
        """Return the tokens per second of each complete interval. Empty if there are too few intervals."""
        complete = self._tokens[:-1]
        return [tokens / self._bar_seconds for tokens in complete] if len(complete) >= _MIN_BARS else []


def sparkline(rates: list[float], width: int) -> str:
    """Return at most `width` bars, oldest rate first. Their heights are relative to the highest rate."""
    if not rates or width < 1:
        return ""
    count = min(width, len(rates))
    groups = [rates[i * len(rates) // count : (i + 1) * len(rates) // count] for i in range(count)]
    means = [sum(group) / len(group) for group in groups]
    highest = max(means) or 1.0
    return "".join(_BARS[round(mean / highest * (len(_BARS) - 1))] for mean in means)
