"""Print the report of `edgespec bench`, which consists of tables, a legend and a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from edgespec.cli.screen import print_table, printable, terminal_width
from edgespec.files import format_bytes

if TYPE_CHECKING:
    from edgespec.bench import Report
    from edgespec.bench.figures import MethodFigures, OracleComparison

__all__ = ["print_report"]

_PIPE_COLUMNS = 100  # chart width in columns if stdout is not a terminal
_MIN_SPEED_UP = 1.03  # a smaller difference could be measurement noise
_LEGEND = """\
SPEED-UP      tokens per second divided by those of plain decoding on the same prompt, without prefill
95 %          confidence interval of SPEED-UP
WORST         SPEED-UP of the worst prompt
WHOLE         SPEED-UP with prefill included
TOKENS/PASS   tokens produced per pass of the target
ACCEPTED      share of the drafted tokens that the target accepted
DRAFT ...     memory that drafting needs besides the target
IDENTICAL     replies equal to plain decoding, token for token
ORACLE        SPEED-UP if every prompt had used its best method, known in hindsight"""
_ENDINGS = {
    "cancelled": "interrupted",
    "time": "time limit reached",
    "failed": "an error occurred",
}


def print_report(report: Report, machine: Mapping[str, object], *, plot: bool) -> None:
    """Print the tables, notes, legend and verdict, and charts if `plot` is true."""
    from edgespec.bench.charts import charts

    click.echo(
        printable(
            f"target {report.target} ({report.target_quantisation}), draft {report.draft or 'none'},"
            f" {report.acceptance} acceptance, {len(report.rows)} replies of up to {report.max_tokens}"
            f" tokens, on {machine['cpu']}"
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
        click.echo("No reply of plain decoding was measured, so there is nothing to compare with.")
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
    print_table(("CATEGORY", "METHOD", "SPEED-UP", "95 %", "WORST", "WHOLE", "TOKENS/PASS", "ACCEPTED"), rows)


def _print_details(figures: Sequence[MethodFigures]) -> None:
    click.echo("")
    print_table(
        (
            *("METHOD", "TOKENS/S", "TTFT MS", "TPOT MS"),
            *("DRAFT WEIGHTS", "DRAFT CACHE", "DRAFT OTHER", "J/TOKEN", "IDENTICAL"),
        ),
        [
            [
                each.config.name,
                _number(each.tokens_per_second),
                _ms(each.ttft_seconds),
                _ms(each.tpot_seconds),
                format_bytes(each.draft_weight_bytes) if each.draft_weight_bytes else "-",
                format_bytes(each.draft_kv_bytes) if each.draft_kv_bytes else "-",
                format_bytes(each.draft_other_bytes) if each.draft_other_bytes else "-",
                "-" if each.joules_per_token is None else _number(each.joules_per_token),
                f"{each.identical} of {each.compared}" if each.compared else "-",
            ]
            for each in figures
        ],
    )
    click.echo("")
    phases = [phase for phase in figures[0].seconds if phase != "prefill"]
    print_table(
        ("MS PER TOKEN", *(phase.upper() for phase in phases), "PREFILL PER REPLY"),
        [
            [
                each.config.name,
                *(_ms(each.seconds[phase] / each.generated_tokens) for phase in phases),
                _ms(each.seconds["prefill"] / each.replies),
            ]
            for each in figures
        ],
    )


def _print_oracle(figures: Sequence[OracleComparison]) -> None:
    if not figures:
        return
    click.echo("")
    print_table(
        ("CATEGORY", "BEST FIXED", "SPEED-UP", "ORACLE", "AUTO", "AUTO/BEST", "AUTO/ORACLE"),
        [
            [
                each.category or "all",
                each.best.name,
                _times(each.best_speed_up),
                _times(each.oracle_speed_up),
                _times(each.auto_speed_up),
                _share(each.share_of_best),
                _share(each.share_of_oracle),
            ]
            for each in figures
        ],
    )


def _print_notes(report: Report) -> None:
    click.echo("")
    click.echo(f"Peak memory over all methods: {format_bytes(report.peak_memory_bytes)}.")
    if report.no_energy:
        click.echo(f"Energy was not measured: {report.no_energy}.")
    of_all = [each for each in report.figures if each.category is None]
    silent = [each for each in of_all if each.config.method != "none" and not each.drafted_tokens]
    for each in silent:
        why = f": {each.note}" if each.note else ""
        click.echo(printable(f"{each.config.name} drafted nothing at temperature {each.temperature:g}{why}"))
    if report.differing:
        click.echo(
            f"{report.differing} replies differ from plain decoding. `edgespec verify` shows whether rounding"
            " explains it."
        )


def _verdict(report: Report) -> str:
    """Return a one-sentence summary of the report."""
    of_all = [
        each
        for each in report.figures
        if each.category is None and each.speed_up is not None and each.config.method != "none"
    ]
    if not of_all:
        return "Only plain decoding was measured."
    best = max(of_all, key=lambda each: each.speed_up or 0.0)
    where = f"at temperature {best.temperature:g}"
    if best.speed_up is None or best.speed_up < _MIN_SPEED_UP:
        return f"No method is clearly faster than plain decoding here (best: {best.config.name}, {where})."
    certainty = "" if best.low is None or best.low > 1.0 else ", but the confidence interval includes 1.00x"
    return (
        f"The fastest method is {best.config.name}: {best.speed_up:.2f}x plain decoding {where}{certainty}."
    )


def _ms(seconds: float) -> str:
    return _number(1e3 * seconds)


def _number(value: float) -> str:
    """Format a number with three significant digits and no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.001 else "0"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
