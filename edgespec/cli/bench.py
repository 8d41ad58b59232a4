"""`edgespec bench`: measure how much each method speeds up replies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.bench_report import print_report
from edgespec.cli.failures import DONE, FAILED, INTERRUPTED
from edgespec.cli.help import HelpfulCommand
from edgespec.cli.interrupt import Stop, interruptible
from edgespec.cli.loading import loaded
from edgespec.cli.measuring import (
    RepliesProgress,
    counted,
    draft_lengths_option,
    duration_text,
    max_tokens_option,
    methods_option,
    prompts_option,
    reject_remember,
    seed_option,
    temperatures_option,
)
from edgespec.cli.options import MODEL_NAMES, WORKER_NAMES, KindType, declared_options, json_option, pick
from edgespec.cli.screen import note, print_json, printable
from edgespec.errors import OptionError
from edgespec.options.option import Integer, ListOf, Text

if TYPE_CHECKING:
    from edgespec.bench import BenchPlan, BenchReport
    from edgespec.losslessness import Prompt

__all__ = ["command"]


@click.command(
    "bench",
    cls=HelpfulCommand,
    params=declared_options(*MODEL_NAMES, *WORKER_NAMES, "acceptance", per_run=("remember",)),
    short_help="Measure how much faster each method makes replies.",
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
    help="Measure replies without the speed-up a second time, to show how much timings vary by chance.",
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

    The model answers every prompt without the speed-up and with each method. The order changes from prompt to
    prompt, so that a slowdown of the machine affects all methods equally. The report ends with a legend and a
    conclusion. If you press Ctrl-C, the report covers everything measured so far.
    """
    reject_remember(options)
    texts = _texts(prompts, categories)
    _check_outputs(save, plots)
    report = interruptible(lambda stop: _bench(stop, texts, options))
    machine = _machine()
    if as_json:
        print_json(report.to_json() | {"machine": machine})
    else:
        print_report(report, machine, plot=plot)
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
    """Read the prompts of the given categories. Raises OptionError for an unknown category."""
    from edgespec.bench import bench_prompts
    from edgespec.losslessness import read_prompts

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
            f"cannot write to {save}", "specify a file in an existing folder", code="file_not_written"
        )
    if plots is not None:
        from edgespec.bench.charts import check_plots

        check_plots()
        if plots.exists() and not plots.is_dir():
            raise OptionError(f"--plots {plots} is a file", "specify a folder")


def _bench(stop: Stop, texts: Sequence[Prompt], options: dict[str, Any]) -> BenchReport:
    from edgespec.bench import BenchPlan, make_report, method_configs, run

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
    limit = f"; no new ones after {duration_text(max_seconds)}" if max_seconds else ""
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
