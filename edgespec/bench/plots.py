"""The pictures of a report as PNG files; the only place that imports matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.bench.figures import PHASES, Figures
from edgespec.bench.plan import PLAIN, Way
from edgespec.bench.report import Report
from edgespec.errors import BackendMissingError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["check_plots", "save_plots"]

_WIDTH, _HEIGHT = 11.0, 4.5  # inches
_DOTS = 120


def check_plots() -> None:
    """Raises BackendMissingError where nothing can draw."""
    if find_spec("matplotlib") is None:
        raise BackendMissingError(
            "plots need matplotlib, which is not installed",
            'run `pip install "edgespec[plots]"`, or leave --plots out: --plot draws in the terminal',
        )


def save_plots(report: Report, folder: Path) -> list[Path]:
    """Draw speed by method, acceptance by depth, time by phase, and what passes cost.

    Gives the files, which replace what is there. Raises BackendMissingError, OSError.
    """
    check_plots()
    folder.mkdir(parents=True, exist_ok=True)
    temperatures = list(dict.fromkeys(each.temperature for each in report.figures))
    by_temperature = {"speed.png": _speed, "acceptance.png": _acceptance, "phases.png": _phases}
    files = [
        _save(folder / name, len(temperatures), _for_each(report, temperatures, draw))
        for name, draw in by_temperature.items()
        if temperatures
    ]
    return [*files, _save(folder / "passes.png", 1, lambda axes: _passes(report, axes[0]))]


def _save(path: Path, count: int, draw: Callable[[Sequence[Axes]], None]) -> Path:
    """A figure of so many axes, one below the other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, _HEIGHT * count), layout="constrained")
    draw([figure.add_subplot(count, 1, i + 1) for i in range(count)])
    figure.savefig(path, dpi=_DOTS, format="png")
    return path


def _for_each(
    report: Report, temperatures: Sequence[float], draw: Callable[[Axes, Sequence[Figures]], None]
) -> Callable[[Sequence[Axes]], None]:
    """One picture of axes for each temperature."""

    def draw_all(all_axes: Sequence[Axes]) -> None:
        for axes, temperature in zip(all_axes, temperatures, strict=True):
            draw(axes, [each for each in report.figures if each.temperature == temperature])
            axes.set_title(f"{axes.get_title()}: {report.target}, temperature {temperature:g}")

    return draw_all


def _speed(axes: Axes, found: Sequence[Figures]) -> None:
    """A group of bars for each category, a bar with its interval for each way."""
    categories = list(dict.fromkeys(each.category for each in found))
    ways = [way for way in _ways(found) if way != PLAIN]
    for i, way in enumerate(ways):
        own = [each for each in found if each.way == way and each.speed_up is not None]
        places = [categories.index(each.category) + (i + 0.5) / len(ways) * 0.8 - 0.4 for each in own]
        heights = [each.speed_up or 0.0 for each in own]
        below = [height - (each.low or height) for each, height in zip(own, heights, strict=True)]
        above = [(each.high or height) - height for each, height in zip(own, heights, strict=True)]
        # The interval of a skewed few may lie beside their mean.
        errors = [[max(0.0, error) for error in side] for side in (below, above)]
        axes.bar(places, heights, 0.8 / len(ways), label=way.name, yerr=errors, error_kw={"lw": 0.8})
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(categories)), [_named(category) for category in categories])
    axes.set_ylabel("speed over plain decoding")
    axes.set_title("Speed by method, with 95 % intervals")
    _explain(axes)


def _acceptance(axes: Axes, found: Sequence[Figures]) -> None:
    from matplotlib.ticker import MaxNLocator

    for each in found:
        if each.category is None and each.acceptance_by_depth:
            depths = range(1, len(each.acceptance_by_depth) + 1)
            axes.plot(depths, each.acceptance_by_depth, marker="o", label=each.way.name)
    axes.set_ylim(0.0, 1.05)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("depth of the guess")
    axes.set_ylabel("share accepted")
    axes.set_title("Acceptance by depth")
    _explain(axes)


def _phases(axes: Axes, found: Sequence[Figures]) -> None:
    own = [each for each in found if each.category is None]
    names = [each.way.name for each in own]
    reached = [0.0] * len(own)
    for phase in PHASES:
        spent = [max(0.0, 1e3 * each.seconds[phase] / each.generated_tokens) for each in own]
        axes.barh(names, spent, left=reached, label=phase)
        reached = [before + more for before, more in zip(reached, spent, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms for a token, prefill shared out among the tokens of its reply")
    axes.set_title("Time by phase")
    _explain(axes)


def _passes(report: Report, axes: Axes) -> None:
    """v(m), and the line above which even guesses that are all right lose."""
    from matplotlib.ticker import FormatStrFormatter

    widths = report.curve.widths
    axes.plot(widths, [report.curve.v(width) for width in widths], marker="o", label="measured")
    axes.plot(widths, widths, linestyle="--", color="grey", label="as much as so many steps")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FormatStrFormatter("%g"))
    axes.set_xlabel("tokens in a pass")
    axes.set_ylabel("plain steps")
    axes.set_title(f"What a pass costs: {report.target}")
    _explain(axes)


def _explain(axes: Axes) -> None:
    """The legend, beside the picture: there is always something under it elsewhere."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _ways(found: Sequence[Figures]) -> list[Way]:
    return list(dict.fromkeys(each.way for each in found))


def _named(category: str | None) -> str:
    return "all" if category is None else category
