"""Draw the bar charts of a benchmark report with text characters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.bench.figures import PHASES, BenchReport, MethodFigures
from edgespec.methods.costs.curve import CostCurve

__all__ = ["Bar", "bar_chart", "charts"]

_FULL, _UNCERTAIN = "█", "▒"
_SHADES = dict(zip(PHASES[:-1], "░█▒▓·", strict=True))
_MIN_BAR_COLUMNS = 10


@dataclass(frozen=True, slots=True)
class Bar:
    """A labelled bar of a bar chart.

    Attributes:
        label: Text before the bar.
        parts: (length, fill character) pairs, drawn from left to right.
        value: Text after the bar.
    """

    label: str
    parts: tuple[tuple[float, str], ...]
    value: str


def bar_chart(title: str, bars: Sequence[Bar], width: int, full: float = 0.0) -> list[str]:
    """Return the lines of a bar chart: the title, then one line per bar.

    Args:
        title: First line.
        bars: Bars to draw.
        width: Maximum line length in characters.
        full: The bar length that fills a line. If a bar is longer than this, the longest bar fills the line.
    """
    labels = max((len(bar.label) for bar in bars), default=0)
    value_width = max((len(bar.value) for bar in bars), default=0)
    room = max(_MIN_BAR_COLUMNS, width - labels - value_width - 2)
    longest = max((sum(length for length, _ in bar.parts) for bar in bars), default=0.0)
    longest = max(longest, full) or 1.0
    return [title, *(f"{bar.label:{labels}} {_drawn(bar, longest, room)} {bar.value}" for bar in bars)]


def _drawn(bar: Bar, longest: float, room: int) -> str:
    drawn, reached = "", 0.0
    for length, character in bar.parts:
        reached += length
        drawn += character * (round(reached / longest * room) - len(drawn))
    return drawn


def charts(report: BenchReport, width: int) -> list[str]:
    """Draw bar charts of the speed-up, the acceptance rate, the time per phase and verify pass costs."""
    lines: list[str] = []
    for temperature in dict.fromkeys(each.temperature for each in report.figures):
        found = [each for each in report.figures if (each.temperature, each.category) == (temperature, None)]
        for chart in (_speeds(found, width), _depths(found, width), _phases(found, width)):
            if len(chart) > 1:
                lines += [f"{chart[0]}, temperature {temperature:g}", *chart[1:], ""]
    return [*lines, *_passes(report.curve, width)]


def _speeds(found: Sequence[MethodFigures], width: int) -> list[str]:
    bars = []
    for each in found:
        if each.speed_up is not None:
            low, high = each.low or each.speed_up, each.high or each.speed_up
            value = f"{each.speed_up:.2f}x"
            bars.append(Bar(each.config.name, ((low, _FULL), (high - low, _UNCERTAIN)), value))
    return bar_chart(f"speed-up over plain decoding ({_UNCERTAIN}: 95% confidence interval)", bars, width)


def _depths(found: Sequence[MethodFigures], width: int) -> list[str]:
    bars = [
        Bar(f"{each.config.name} {depth}", ((share, _FULL),), f"{share:.0%}")
        for each in found
        for depth, share in enumerate(each.acceptance_by_depth, 1)
    ]
    return bar_chart("accepted draft tokens, by depth", bars, width, full=1.0)


def _phases(found: Sequence[MethodFigures], width: int) -> list[str]:
    bars = []
    for each in found:
        per_token = {phase: each.milliseconds_per_token(phase) for phase in _SHADES}
        parts = tuple((max(0.0, spent), _SHADES[phase]) for phase, spent in per_token.items())
        bars.append(Bar(each.config.name, parts, f"{sum(per_token.values()):.3g} ms"))
    legend = ", ".join(f"{shade} {phase}" for phase, shade in _SHADES.items())
    return bar_chart(f"time per token by phase ({legend})", bars, width)


def _passes(curve: CostCurve, width: int) -> list[str]:
    bars = [Bar(str(rows), ((curve.v(rows), _FULL),), f"{curve.v(rows):.2f}") for rows in curve.widths]
    return bar_chart("time per pass, relative to a pass over one token, by number of tokens", bars, width)
