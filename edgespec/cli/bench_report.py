"""Print the report of `edgespec bench`: tables, an explanation of the columns, and a conclusion."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import click

from edgespec.cli.screen import print_table, printable, terminal_width
from edgespec.system.files import format_bytes

if TYPE_CHECKING:
    from edgespec.bench import BenchReport
    from edgespec.bench.figures import MethodFigures, OracleComparison

__all__ = ["print_report"]

_Item = TypeVar("_Item")
_PIPE_COLUMNS = 100
# Minimum speed-up to report. Smaller ones could be measurement noise.
_MIN_SPEED_UP = 1.03
_LEGEND = """\
SPEED-UP      how many times as fast as without the speed-up, not counting the time to read the prompt
95% CI        95% confidence interval of SPEED-UP
WORST         SPEED-UP on the worst prompt
WHOLE         SPEED-UP including the time to read the prompt
TOKENS/PASS   tokens that the model generates at a time, on average
ACCEPTED      share of the proposed tokens that the model accepted
TTFT, TPOT    time to first token, and time per token after that
DRAFT ...     additional memory that the speed-up uses
IDENTICAL     replies with exactly the same tokens as without the speed-up
PREFILL       time to read the prompt
BEST SINGLE   the one method that is fastest for the category as a whole
BEST EACH     SPEED-UP if every prompt used the method that is fastest for it
AUTO/...      speed-up of auto, the default method, as a share of BEST SINGLE or BEST EACH"""
_ENDINGS = {"cancelled": "interrupted", "time": "time limit reached", "failed": "an error occurred"}


def print_report(report: BenchReport, machine: Mapping[str, object], *, plot: bool) -> None:
    """Print a benchmark report, with bar charts if `plot` is set."""
    from edgespec.bench.charts import charts

    click.echo(
        printable(
            f"model {report.target} ({report.target_quantisation}), draft model {report.draft or 'none'},"
            f" {report.acceptance} acceptance\n"
            f"{len(report.rows)} replies of up to {report.max_tokens} tokens, on {machine['cpu']}"
        )
    )
    if report.ending != "complete":
        click.echo(f"incomplete: {len(report.rows)} of {report.planned} replies ({_ENDINGS[report.ending]})")
    for temperature in dict.fromkeys(each.temperature for each in report.figures):
        figures = [each for each in report.figures if each.temperature == temperature]
        _print_speeds(temperature, figures)
        _print_details([each for each in figures if each.category is None])
        _print_oracle([each for each in report.oracle_comparisons if each.temperature == temperature])
    if not report.figures:
        click.echo(
            "No prompt was answered both with and without the speed-up, so there is nothing to compare."
        )
    if plot:
        click.echo("")
        for line in charts(report, terminal_width() or _PIPE_COLUMNS):
            click.echo(printable(line))
    _print_notes(report)
    if report.figures:
        click.echo(f"\n{_LEGEND}\n")
        click.echo(printable(_verdict(report)))


def _print_speeds(temperature: float, figures: Sequence[MethodFigures]) -> None:
    click.echo("")
    click.echo(f"temperature {temperature:g}")
    rows, last_category = [], ""
    for each in figures:
        if each.config.name != "none":
            category = each.category or "all"
            interval = "-" if each.low is None or each.high is None else f"{each.low:.2f}-{each.high:.2f}"
            speeds = [_times(each.speed_up), interval, _times(each.worst), _times(each.whole_speed_up)]
            passes = [f"{each.tokens_per_pass:.2f}", _share(each.acceptance)]
            rows.append(["" if category == last_category else category, each.config.name, *speeds, *passes])
            last_category = category
    print_table(
        ("CATEGORY", "METHOD", "SPEED-UP", "95% CI", "WORST", "WHOLE", "TOKENS/PASS", "ACCEPTED"), rows
    )


def _print_details(figures: Sequence[MethodFigures]) -> None:
    phases = [phase for phase in figures[0].seconds if phase != "prefill"]
    speeds: dict[str, Callable[[MethodFigures], str]] = {
        "METHOD": lambda each: each.config.name,
        "TOKENS/S": lambda each: _number(each.tokens_per_second),
        "TTFT MS": lambda each: _ms(each.ttft_seconds),
        "TPOT MS": lambda each: _ms(each.tpot_seconds),
        "DRAFT WEIGHTS": lambda each: _size(each.draft_weight_bytes),
        "DRAFT CACHE": lambda each: _size(each.draft_kv_bytes),
        "DRAFT OTHER": lambda each: _size(each.draft_other_bytes),
        "IDENTICAL": lambda each: f"{each.identical} of {each.compared}" if each.compared else "-",
    }
    _print_columns(speeds, figures)
    rows = [
        [
            each.config.name,
            *(_ms(each.milliseconds_per_token(phase) / 1e3) for phase in phases),
            _ms(each.seconds["prefill"] / each.replies),
        ]
        for each in figures
    ]
    click.echo("")
    print_table(("MS PER TOKEN", *(phase.upper() for phase in phases), "PREFILL PER REPLY"), rows)


def _print_oracle(comparisons: Sequence[OracleComparison]) -> None:
    if comparisons:
        columns: dict[str, Callable[[OracleComparison], str]] = {
            "CATEGORY": lambda each: each.category or "all",
            "BEST SINGLE": lambda each: each.best.name,
            "SPEED-UP": lambda each: _times(each.best_speed_up),
            "BEST EACH": lambda each: _times(each.oracle_speed_up),
            "AUTO": lambda each: _times(each.auto_speed_up),
            "AUTO/SINGLE": lambda each: _share(each.share_of_best),
            "AUTO/EACH": lambda each: _share(each.share_of_oracle),
        }
        _print_columns(columns, comparisons)


def _print_columns(columns: Mapping[str, Callable[[_Item], str]], items: Sequence[_Item]) -> None:
    click.echo("")
    print_table(tuple(columns), [[cell(item) for cell in columns.values()] for item in items])


def _print_notes(report: BenchReport) -> None:
    click.echo("")
    if report.rows:
        click.echo(f"Peak memory across all methods: {format_bytes(report.peak_memory_bytes)}.")
    of_all = [each for each in report.figures if each.category is None]
    silent = [each for each in of_all if each.config.method != "none" and not each.drafted_tokens]
    for each in silent:
        why = f": {each.note}" if each.note else ""
        click.echo(
            printable(f"{each.config.name} proposed no tokens at temperature {each.temperature:g}{why}")
        )
    if report.differing:
        click.echo(
            f"{report.differing} replies differ from those without the speed-up. Run `edgespec verify` to see"
            " whether rounding explains the differences."
        )


def _verdict(report: BenchReport) -> str:
    """Return the report's conclusion in one sentence."""
    of_all = [
        each
        for each in report.figures
        if each.category is None and each.speed_up is not None and each.config.method != "none"
    ]
    if not of_all:
        return "Only replies without the speed-up were measured."
    # A method that drafted nothing is plain decoding, so any difference in speed is noise.
    drafting = [each for each in of_all if each.drafted_tokens]
    if not drafting:
        return "No method drafted any tokens, so that none could be faster than plain decoding."
    best = max(drafting, key=lambda each: each.speed_up or 0.0)
    where = f"at temperature {best.temperature:g}"
    if best.speed_up is None or best.speed_up < _MIN_SPEED_UP:
        return f"No method is clearly faster than plain decoding here (best: {best.config.name}, {where})."
    certainty = "" if best.low is None or best.low > 1.0 else ", but this could be chance"
    return f"The fastest method is {best.config.name}: speed-up {best.speed_up:.2f}x {where}{certainty}."


def _ms(seconds: float) -> str:
    return _number(1e3 * seconds)


def _number(value: float) -> str:
    """Format a number with three significant digits and no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.001 else "0"


def _size(size_bytes: int) -> str:
    return format_bytes(size_bytes) if size_bytes else "-"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
