"""`edgespec bench`: measure how much each method speeds up replies, and print the report."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from edgespec.cli.failures import DONE, FAILED, INTERRUPTED
from edgespec.cli.help import HelpfulCommand
from edgespec.cli.interrupt import Stop, interruptible
from edgespec.cli.options import MODEL_NAMES, WORKER_NAMES, KindType, declared_options, json_option, pick
from edgespec.cli.running import (
    RepliesProgress,
    counted,
    draft_lengths_option,
    duration_text,
    loaded,
    max_tokens_option,
    methods_option,
    prompts_option,
    reject_remember,
    seed_option,
    temperatures_option,
)
from edgespec.cli.screen import note, print_json, print_table, printable, terminal_width
from edgespec.errors import OptionError
from edgespec.options.option import Integer, ListOf, Text
from edgespec.system.files import format_bytes, format_number

if TYPE_CHECKING:
    from edgespec.bench.figures import BenchReport, MethodFigures, OracleComparison
    from edgespec.bench.runs import BenchPlan
    from edgespec.losslessness.cases import Prompt

__all__ = ["command"]

_PIPE_COLUMNS = 100
# Minimum speed-up for a method to count as clearly faster. This value was chosen because smaller speed-ups
# could be measurement noise.
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


@click.command(
    "bench",
    cls=HelpfulCommand,
    params=declared_options(*MODEL_NAMES, *WORKER_NAMES, "acceptance", per_run=("remember",)),
    short_help="Measure how much each method speeds up replies.",
    examples=(
        "edgespec bench",
        "edgespec bench --target 8b-q4 --draft 1b-q4 --max-seconds 900 --plots pictures",
        "edgespec bench --categories code,edit --methods auto,suffix,ngram --draft-lengths 4,8 --repeats 4",
        "edgespec bench --prompts my-prompts.jsonl --temperatures 0 --save runs.json --json",
    ),
)
@methods_option(
    help="Methods to measure. [default: auto and all other available methods, plus model+suffix if there is a"
    " draft model]"
)
@prompts_option(
    help="JSON Lines file with a `prompt` or `messages`, and optionally a `category` and a `schema`, on each"
    " line. [default: 24 built-in prompts in eight categories]"
)
@click.option(
    "--categories",
    type=KindType(ListOf(Text())),
    metavar="A,B",
    help="Use only prompts in these categories. [default: all]",
)
@temperatures_option(default="0,0.8", help="Temperatures to measure.")
@draft_lengths_option(
    default=None,
    help="Draft lengths to measure, in tokens. The method auto chooses its own."
    " [default: each method's default]",
)
@click.option(
    "--repeats",
    type=KindType(Integer(1)),
    metavar="N",
    default=2,
    show_default=True,
    help="Number of times to repeat each measurement.",
)
@click.option(
    "--control",
    is_flag=True,
    help="Measure replies without the speed-up twice, to show how much timings vary by chance.",
)
@max_tokens_option(default=64, help="Maximum number of tokens per reply.")
@seed_option(help="Random seed for all replies.")
@click.option(
    "--max-seconds",
    type=KindType(Integer(1)),
    metavar="N",
    help="Do not start any more replies after N seconds. [default: no limit]",
)
@click.option(
    "--save",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the report and all replies to a JSON file.",
)
@click.option(
    "--plots",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write plots to this folder as PNG files.",
)
@click.option("--plot", is_flag=True, help="Draw charts in the terminal.")
@json_option
def command(
    prompts: Path | None,
    categories: tuple[str, ...] | None,
    save: Path | None,
    plots: Path | None,
    plot: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Measure how much each method speeds up replies to different kinds of prompts.

    The model answers every prompt without drafting and with each method. The order changes from prompt to
    prompt, so that all methods are affected equally if the machine slows down. The report ends with a legend
    and a conclusion. If you press Ctrl-C, the report covers everything measured so far.
    """
    reject_remember(options)
    texts = _texts(prompts, categories)
    _check_outputs(save, plots)
    report = interruptible(lambda stop: _bench(stop, texts, options))
    machine = _machine()
    if as_json:
        print_json(report.to_json() | {"machine": machine})
    else:
        _print_report(report, machine, plot=plot)
    if save:
        save.write_text(json.dumps(report.to_json(rows=True) | {"machine": machine}), "utf-8")
        note(f"saved: {save}")
    if plots:
        from edgespec.bench.charts import save_plots

        for path in save_plots(report, plots):
            note(f"plotted: {path}")
    if report.ending == "failed":
        click.echo(printable(f"error: {report.error}"), err=True)
    return {"failed": FAILED, "cancelled": INTERRUPTED}.get(report.ending, DONE)


def _texts(file: Path | None, categories: tuple[str, ...] | None) -> list[Prompt]:
    """Load the prompts in the given categories. Raises OptionError if a category is unknown."""
    from edgespec.bench.runs import bench_prompts
    from edgespec.losslessness.cases import read_prompts

    texts = read_prompts(file) if file else bench_prompts()
    if categories is None:
        return texts
    there = sorted({text.category for text in texts})
    for category in categories:
        if category not in there:
            raise OptionError(
                f"there are no prompts in the category {category!r}", f"choose from {', '.join(there)}"
            )
    return [text for text in texts if text.category in categories]


def _check_outputs(save: Path | None, plots: Path | None) -> None:
    """Raise OptionError if the output files cannot be written. Called before any measurement."""
    if save is not None and (save.is_dir() or not save.absolute().parent.is_dir()):
        raise OptionError(
            f"cannot write to {save}",
            "specify a file in an existing, writable folder",
            code="file_not_written",
        )
    if plots is not None:
        from edgespec.bench.charts import check_plots

        check_plots()
        if plots.exists() and not plots.is_dir():
            raise OptionError(f"--plots {plots} is a file", "specify a folder")


def _bench(stop: Stop, texts: Sequence[Prompt], options: dict[str, Any]) -> BenchReport:
    from edgespec.bench.figures import make_report
    from edgespec.bench.runs import BenchPlan, method_configs, run

    settings = pick(options, ("temperatures", "repeats", "max_tokens", "seed", "acceptance"))
    methods, lengths = options["methods"], options["draft_lengths"] or ()
    configs = partial(method_configs, draft_lengths=lengths, control=options["control"])
    BenchPlan(tuple(texts), configs(methods or ()), **settings)
    # Reserve the full context, because enlarging it during a reply would distort the measurement.
    wanted = {**pick(options, (*MODEL_NAMES, *WORKER_NAMES)), "reserve_full_context": True}
    max_seconds = options["max_seconds"]
    with (
        loaded(stop, **wanted, methods=methods or ()) as runtime,
        RepliesProgress(stop, max_seconds) as progress,
    ):
        plan = BenchPlan(tuple(texts), configs(methods or _all_methods(runtime.drafters)), **settings)
        click.echo(_planned(plan, max_seconds), err=True)
        bench_run = run(runtime, plan, max_seconds=max_seconds, progress=progress)
        return make_report(runtime, plan, bench_run)


def _all_methods(drafters: Sequence[str]) -> tuple[str, ...]:
    """Return the default methods: `auto` and every method that it can choose."""
    return ("auto", *drafters, *(("model+suffix",) if "model" in drafters else ()))


def _planned(plan: BenchPlan, max_seconds: int | None) -> str:
    factors = [
        counted(len(plan.prompts), "prompt"),
        counted(len(plan.temperatures), "temperature"),
        counted(plan.repeats, "repeat"),
        counted(len(plan.configs), "method"),
    ]
    names = ", ".join(config.name for config in plan.configs)
    limit = f"; no new ones start after {duration_text(max_seconds)}" if max_seconds else ""
    replies = f"plan: {plan.replies:,} replies of up to {plan.max_tokens} tokens"
    return f"{replies} ({' x '.join(factors)}: {names}){limit}"


def _machine() -> dict[str, object]:
    from edgespec.api.machine import inspect_machine

    machine = inspect_machine()
    return {
        "edgespec": machine.edgespec_version,
        "system": machine.system,
        "cpu": machine.cpu,
        "cores": machine.physical_cores,
        "accelerator": machine.accelerator,
        "llama_cpp": machine.llama_cpp.version,
        "mlx": machine.mlx.version,
    }


_Item = TypeVar("_Item")


def _print_report(report: BenchReport, machine: Mapping[str, object], *, plot: bool) -> None:
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
    of_all = [
        each
        for each in report.figures
        if each.category is None and each.speed_up is not None and each.config.method != "none"
    ]
    if not of_all:
        return "Only replies without the speed-up were measured."
    # A method that drafted nothing is effectively plain decoding, so any difference in speed is noise.
    drafting = [each for each in of_all if each.drafted_tokens]
    if not drafting:
        return "No method drafted any tokens, so none could be faster than plain decoding."
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
    return format_number(value) if value >= 0.001 else "0"


def _size(size_bytes: int) -> str:
    return format_bytes(size_bytes) if size_bytes else "-"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
