"""Draw a benchmark report as text bar charts, or plot it as PNG files.

This is the only module in the package that imports matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.bench.figures import PHASES, BenchReport, MethodFigures
from edgespec.bench.runs import PLAIN
from edgespec.errors import BackendMissingError
from edgespec.methods.costs.curve import CostCurve
from edgespec.system.files import format_number
from edgespec.system.installation import setup_command

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Bar", "bar_chart", "charts", "check_plots", "save_plots"]

_FULL, _UNCERTAIN = "█", "▒"
_SHADES = dict(zip(PHASES[:-1], "░█▒▓·", strict=True))
_MIN_BAR_COLUMNS = 10
_WIDTH_INCHES, _HEIGHT_INCHES = 11.0, 4.5
_DOTS = 120


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
        full: Bar length that fills the line. If a bar is longer, the longest bar fills the line instead.
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
    return bar_chart("accepted draft tokens, by position in the draft", bars, width, full=1.0)


def _phases(found: Sequence[MethodFigures], width: int) -> list[str]:
    bars = []
    for each in found:
        per_token = {phase: each.milliseconds_per_token(phase) for phase in _SHADES}
        parts = tuple((max(0.0, spent), _SHADES[phase]) for phase, spent in per_token.items())
        bars.append(Bar(each.config.name, parts, f"{format_number(sum(per_token.values()))} ms"))
    legend = ", ".join(f"{shade} {phase}" for phase, shade in _SHADES.items())
    return bar_chart(f"time per token, by phase ({legend})", bars, width)


def _passes(curve: CostCurve, width: int) -> list[str]:
    bars = [Bar(str(rows), ((curve.v(rows), _FULL),), f"{curve.v(rows):.2f}") for rows in curve.widths]
    return bar_chart("time to check several tokens at once, relative to one token", bars, width)


def check_plots() -> None:
    """Raise BackendMissingError if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise BackendMissingError(
            "plots require matplotlib, which is not installed",
            f"install matplotlib with `{setup_command('dev')}`, or use --plot to draw in the terminal",
        )


def save_plots(report: BenchReport, folder: Path) -> list[Path]:
    """Plot speed by method, acceptance by depth, time by phase and pass costs.

    Returns:
        Paths of the PNG files. Existing files are replaced.

    Raises:
        BackendMissingError: matplotlib is not installed.
        OSError: The folder cannot be written.
    """
    check_plots()
    folder.mkdir(parents=True, exist_ok=True)
    temperatures = list(dict.fromkeys(each.temperature for each in report.figures))
    by_temperature = {
        "speed.png": _plot_speed,
        "acceptance.png": _plot_acceptance,
        "phases.png": _plot_phases,
    }
    files = [
        _save(folder / name, len(temperatures), _for_each(report, temperatures, draw))
        for name, draw in by_temperature.items()
        if temperatures
    ]
    return [*files, _save(folder / "passes.png", 1, lambda axes: _plot_passes(report, axes[0]))]


def _save(path: Path, count: int, draw: Callable[[Sequence[Axes]], None]) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES * count), layout="constrained")
    draw([figure.add_subplot(count, 1, i + 1) for i in range(count)])
    figure.savefig(path, dpi=_DOTS, format="png")
    return path


def _for_each(
    report: BenchReport, temperatures: Sequence[float], draw: Callable[[Axes, Sequence[MethodFigures]], None]
) -> Callable[[Sequence[Axes]], None]:
    def draw_all(all_axes: Sequence[Axes]) -> None:
        for axes, temperature in zip(all_axes, temperatures, strict=True):
            draw(axes, [each for each in report.figures if each.temperature == temperature])
            axes.set_title(f"{axes.get_title()}: {report.target}, temperature {temperature:g}")

    return draw_all


def _plot_speed(axes: Axes, found: Sequence[MethodFigures]) -> None:
    categories = list(dict.fromkeys(each.category for each in found))
    configs = [config for config in dict.fromkeys(each.config for each in found) if config != PLAIN]
    for i, config in enumerate(configs):
        own = [each for each in found if each.config == config and each.speed_up is not None]
        places = [categories.index(each.category) + (i + 0.5) / len(configs) * 0.8 - 0.4 for each in own]
        heights = [each.speed_up or 0.0 for each in own]
        below = [height - (each.low or height) for each, height in zip(own, heights, strict=True)]
        above = [(each.high or height) - height for each, height in zip(own, heights, strict=True)]
        # Clip errors at 0, because matplotlib rejects negative ones.
        errors = [[max(0.0, error) for error in side] for side in (below, above)]
        axes.bar(places, heights, 0.8 / len(configs), label=config.name, yerr=errors, error_kw={"lw": 0.8})
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(
        range(len(categories)), ["all" if category is None else category for category in categories]
    )
    axes.set_ylabel("speed-up over plain decoding")
    axes.set_title("Speed-up by method, with 95% confidence intervals")
    _add_legend(axes)


def _plot_acceptance(axes: Axes, found: Sequence[MethodFigures]) -> None:
    from matplotlib.ticker import MaxNLocator

    for each in found:
        if each.category is None and each.acceptance_by_depth:
            depths = range(1, len(each.acceptance_by_depth) + 1)
            axes.plot(depths, each.acceptance_by_depth, marker="o", label=each.config.name)
    axes.set_ylim(0.0, 1.05)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("position of the token in the draft")
    axes.set_ylabel("acceptance rate")
    axes.set_title("Acceptance rate by position in the draft")
    _add_legend(axes)


def _plot_phases(axes: Axes, found: Sequence[MethodFigures]) -> None:
    own = [each for each in found if each.category is None]
    names = [each.config.name for each in own]
    reached = [0.0] * len(own)
    for phase in PHASES:
        spent = [max(0.0, each.milliseconds_per_token(phase)) for each in own]
        axes.barh(names, spent, left=reached, label=phase)
        reached = [before + more for before, more in zip(reached, spent, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms per token, including prefill time")
    axes.set_title("Time by phase")
    _add_legend(axes)


def _plot_passes(report: BenchReport, axes: Axes) -> None:
    from matplotlib.ticker import FormatStrFormatter

    widths = report.curve.widths
    axes.plot(widths, [report.curve.v(width) for width in widths], marker="o", label="measured")
    axes.plot(widths, widths, linestyle="--", color="grey", label="one token at a time")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FormatStrFormatter("%g"))
    axes.set_xlabel("tokens checked at once")
    axes.set_ylabel("time relative to one token")
    axes.set_title(f"Time for {report.target} to check several tokens at once")
    _add_legend(axes)


def _add_legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
