"""What `edgespec bench` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from edgespec.cli.screen import print_table, printable, terminal_width
from edgespec.files import format_bytes

if TYPE_CHECKING:
    from edgespec.bench import Report
    from edgespec.bench.figures import Figures, Hindsight

__all__ = ["print_report"]

_PIPE_COLUMNS = 100
_ENDINGS = {
    "cancelled": "it was interrupted",
    "time": "the time was over",
    "failed": "it failed",
}


def print_report(report: Report, machine: Mapping[str, object], *, plot: bool) -> None:
    """The tables, then what is to be known of them; with `plot` the pictures as well."""
    from edgespec.bench.charts import charts

    click.echo(
        printable(
            f"target {report.target} ({report.target_quantisation}), draft {report.draft or 'none'},"
            f" {report.acceptance} acceptance, {len(report.rows)} replies of up to {report.max_tokens}"
            f" tokens, on {machine['cpu']}"
        )
    )
    if report.ending != "complete":
        click.echo(
            f"incomplete: {len(report.rows)} of {report.planned} replies, for {_ENDINGS[report.ending]}"
        )
    for temperature in dict.fromkeys(each.temperature for each in report.figures):
        found = [each for each in report.figures if each.temperature == temperature]
        _print_speeds(temperature, found)
        _print_details([each for each in found if each.category is None])
        _print_hindsight([each for each in report.hindsights if each.temperature == temperature])
    if not report.figures:
        click.echo("no prompt was answered plainly yet: there is nothing to compare with")
    if plot:
        click.echo("")
        for line in charts(report, terminal_width() or _PIPE_COLUMNS):
            click.echo(printable(line))
    _print_notes(report)


def _print_speeds(temperature: float, found: Sequence[Figures]) -> None:
    click.echo("")
    click.echo(f"temperature {temperature:g}")
    rows, said = [], ""
    for each in found:
        if each.way.name != "none":
            category = each.category or "all"
            between = "-" if each.low is None or each.high is None else f"{each.low:.2f}-{each.high:.2f}"
            speeds = [_times(each.speed_up), between, _times(each.worst), _times(each.whole_speed_up)]
            passes = [f"{each.tokens_per_pass:.2f}", _share(each.acceptance)]
            rows.append(["" if category == said else category, each.way.name, *speeds, *passes])
            said = category
    print_table(("CATEGORY", "METHOD", "SPEED-UP", "95 %", "WORST", "WHOLE", "TOKENS/PASS", "ACCEPTED"), rows)


def _print_details(found: Sequence[Figures]) -> None:
    click.echo("")
    print_table(
        (
            *("METHOD", "TOKENS/S", "TTFT MS", "TPOT MS"),
            *("MORE WEIGHTS", "MORE CACHE", "MORE ELSE", "J/TOKEN", "SAME REPLIES"),
        ),
        [
            [
                each.way.name,
                _number(each.tokens_per_second),
                _ms(each.ttft_seconds),
                _ms(each.tpot_seconds),
                format_bytes(each.draft_weight_bytes) if each.draft_weight_bytes else "-",
                format_bytes(each.draft_kv_bytes) if each.draft_kv_bytes else "-",
                format_bytes(each.draft_other_bytes) if each.draft_other_bytes else "-",
                "-" if each.joules_per_token is None else _number(each.joules_per_token),
                f"{each.same} of {each.compared}" if each.compared else "-",
            ]
            for each in found
        ],
    )
    click.echo("")
    phases = [phase for phase in found[0].seconds if phase != "prefill"]
    print_table(
        ("MS A TOKEN", *(phase.upper() for phase in phases), "PREFILL A REPLY"),
        [
            [
                each.way.name,
                *(_ms(each.seconds[phase] / each.generated_tokens) for phase in phases),
                _ms(each.seconds["prefill"] / each.replies),
            ]
            for each in found
        ],
    )


def _print_hindsight(found: Sequence[Hindsight]) -> None:
    if not found:
        return
    click.echo("")
    print_table(
        ("CATEGORY", "BEST FIXED", "SPEED-UP", "ORACLE", "AUTO", "OF BEST FIXED", "OF ORACLE"),
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
            for each in found
        ],
    )


def _print_notes(report: Report) -> None:
    click.echo("")
    click.echo(f"peak memory {format_bytes(report.peak_memory_bytes)}, whatever the method")
    if report.no_energy:
        click.echo(f"no energy was measured: {report.no_energy}")
    of_all = [each for each in report.figures if each.category is None]
    silent = [each for each in of_all if each.way.method != "none" and not each.drafted_tokens]
    for each in silent:
        why = f": {each.said}" if each.said else ""
        click.echo(printable(f"{each.way.name} guessed nothing at temperature {each.temperature:g}{why}"))
    if report.differing:
        click.echo(
            f"{report.differing} replies are not plain decoding's: `edgespec verify` tells whether that is"
            " rounding"
        )


def _ms(seconds: float) -> str:
    return _number(1e3 * seconds)


def _number(value: float) -> str:
    """Three digits, and never an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.001 else "0"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
