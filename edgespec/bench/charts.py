"""The pictures of a report as lines of text, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.bench.figures import PHASES, Figures
from edgespec.bench.report import Report
from edgespec.costs.curve import CostCurve

__all__ = ["Bar", "bar_chart", "charts"]

_FULL, _UNSURE = "█", "▒"
_SHADES = dict(zip(PHASES[:-1], "░█▒▓·", strict=True))
_LEAST_WIDTH = 10


@dataclass(frozen=True, slots=True)
class Bar:
    """A labelled bar of several parts, each a length and its character, and what is said after it."""

    label: str
    parts: tuple[tuple[float, str], ...]
    says: str


def bar_chart(title: str, bars: Sequence[Bar], width: int, full: float = 0.0) -> list[str]:
    """A title, then a line for each bar, all to one scale and at most `width` characters long.

    full: the length that fills a line, where no bar is longer.
    """
    labels = max((len(bar.label) for bar in bars), default=0)
    says = max((len(bar.says) for bar in bars), default=0)
    room = max(_LEAST_WIDTH, width - labels - says - 2)
    longest = max((sum(length for length, _ in bar.parts) for bar in bars), default=0.0)
    longest = max(longest, full) or 1.0
    return [title, *(f"{bar.label:{labels}} {_drawn(bar, longest, room)} {bar.says}" for bar in bars)]


def _drawn(bar: Bar, longest: float, room: int) -> str:
    """The parts, each ending where its sum rounds to: what is rounded does not add up."""
    drawn, reached = "", 0.0
    for length, character in bar.parts:
        reached += length
        drawn += character * (round(reached / longest * room) - len(drawn))
    return drawn


def charts(report: Report, width: int) -> list[str]:
    """Speed by method, acceptance by depth, time by phase, and what passes cost: all categories together."""
    lines: list[str] = []
    for temperature in dict.fromkeys(each.temperature for each in report.figures):
        found = [each for each in report.figures if (each.temperature, each.category) == (temperature, None)]
        for chart in (_speeds(found, width), _depths(found, width), _phases(found, width)):
            if len(chart) > 1:
                lines += [f"{chart[0]}, temperature {temperature:g}", *chart[1:], ""]
    return [*lines, *_passes(report.curve, width)]


def _speeds(found: Sequence[Figures], width: int) -> list[str]:
    bars = []
    for each in found:
        if each.speed_up is not None:
            low, high = each.low or each.speed_up, each.high or each.speed_up
            says = f"{each.speed_up:.2f}x"
            bars.append(Bar(each.way.name, ((low, _FULL), (high - low, _UNSURE)), says))
    return bar_chart(f"speed over plain decoding ({_UNSURE} 95 % interval)", bars, width)


def _depths(found: Sequence[Figures], width: int) -> list[str]:
    bars = [
        Bar(f"{each.way.name} {depth}", ((share, _FULL),), f"{share:.0%}")
        for each in found
        for depth, share in enumerate(each.acceptance_by_depth, 1)
    ]
    return bar_chart("guesses accepted, by depth", bars, width, full=1.0)


def _phases(found: Sequence[Figures], width: int) -> list[str]:
    bars = []
    for each in found:
        per_token = {phase: 1e3 * each.seconds[phase] / each.generated_tokens for phase in _SHADES}
        parts = tuple((max(0.0, spent), _SHADES[phase]) for phase, spent in per_token.items())
        bars.append(Bar(each.way.name, parts, f"{sum(per_token.values()):.3g} ms"))
    legend = ", ".join(f"{shade} {phase}" for phase, shade in _SHADES.items())
    return bar_chart(f"time for a token by phase ({legend})", bars, width)


def _passes(curve: CostCurve, width: int) -> list[str]:
    bars = [Bar(str(rows), ((curve.v(rows), _FULL),), f"{curve.v(rows):.2f}") for rows in curve.widths]
    return bar_chart("a pass of so many tokens, in plain steps", bars, width)
