"""`edgespec bench`: every method against plain decoding, measured fairly."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.bench_report import print_report
from edgespec.cli.failures import DONE, FAILED, INTERRUPTED
from edgespec.cli.help import HelpfulCommand
from edgespec.cli.interrupt import Stop, interruptible
from edgespec.cli.loading import loaded
from edgespec.cli.measuring import (
    draft_lengths_option,
    max_tokens_option,
    methods_option,
    prompts_option,
    seed_option,
    temperatures_option,
)
from edgespec.cli.options import (
    MODEL_NAMES,
    acceptance_option,
    drafting_options,
    json_option,
    listed,
    model_options,
    pick,
    whole,
)
from edgespec.cli.screen import ProgressLine, is_terminal, note, print_json, printable
from edgespec.errors import OptionError

if TYPE_CHECKING:
    from edgespec.bench import Report
    from edgespec.losslessness import Prompt

__all__ = ["command"]

_BAR = 20


@click.command(
    "bench",
    cls=HelpfulCommand,
    short_help="Measure every method against plain decoding.",
    examples=(
        "edgespec bench",
        "edgespec bench --target 8b-q4 --draft 1b-q4 --max-seconds 900 --plots pictures",
        "edgespec bench --categories code,edit --methods auto,suffix,ngram --draft-lengths 4,8 --repeats 4",
        "edgespec bench --prompts my-prompts.jsonl --temperatures 0 --save runs.json --json",
    ),
)
@methods_option(
    "Methods to measure beside none. [default: auto and every drafter at hand; with a draft model also"
    " model+suffix]"
)
@prompts_option(
    "JSON lines, each with `prompt` or `messages`, and perhaps a `category`. [default: 24 of eight"
    " categories]"
)
@click.option("--categories", type=listed(str), metavar="A,B", help="Only prompts of these. [default: all]")
@temperatures_option("0,0.8", "Temperatures to measure at.")
@draft_lengths_option(
    None, "Tokens to guess ahead, each a choice of its own; auto finds its own. [default: one, the usual]"
)
@click.option(
    "--repeats",
    type=whole(1),
    metavar="N",
    default=2,
    show_default=True,
    help="How often everything is measured.",
)
@click.option(
    "--control",
    is_flag=True,
    help="Measure plain decoding twice: by how much it differs from itself says what the rest is worth.",
)
@max_tokens_option(64)
@seed_option("The seed of all replies.")
@click.option(
    "--max-seconds", type=whole(1), metavar="N", help="Begin no reply after so long. [default: no limit]"
)
@click.option(
    "--save",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write it all as JSON, reply by reply.",
)
@click.option(
    "--plots", type=click.Path(path_type=Path), metavar="DIR", help="Draw PNG files into this folder."
)
@click.option("--plot", is_flag=True, help="Draw in the terminal.")
@json_option
@acceptance_option
@model_options
@drafting_options(measuring=True)
def command(
    prompts: Path | None,
    categories: tuple[str, ...] | None,
    save: Path | None,
    plots: Path | None,
    plot: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Measure every method against plain decoding, on prompts of several kinds.

    Each prompt is answered by every method, one right after another, in changing order, so that what the
    machine does meanwhile meets all alike; every reply reads its prompt anew. SPEED-UP is in tokens per
    second, prefill not counted, with its 95 % confidence interval; WORST is that of the worst prompt, WHOLE
    counts all of a reply. The oracle takes the best fixed method for each prompt, in hindsight. Ctrl-C keeps
    what was measured.
    """
    if options["remember"]:
        raise OptionError(
            "replies are repeated: suffix would look up its own earlier ones", "leave --remember out"
        )
    texts = _texts(prompts, categories)
    _check_places(save, plots)
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
        from edgespec.bench.plots import save_plots

        for path in save_plots(report, plots):
            note(f"drawn: {path}")
    if report.ending == "failed":
        click.echo(printable(f"error: {report.trouble}"), err=True)
    return {"failed": FAILED, "cancelled": INTERRUPTED}.get(report.ending, DONE)


def _texts(file: Path | None, categories: tuple[str, ...] | None) -> list[Prompt]:
    """The prompts to measure on. Raises OptionError."""
    from edgespec.bench import bench_prompts
    from edgespec.losslessness import read_prompts

    texts = read_prompts(file) if file else bench_prompts()
    if categories is None:
        return texts
    there = sorted({text.category for text in texts})
    for category in categories:
        if category not in there:
            raise OptionError(
                f"there are no prompts of category {category!r}", f"there are {', '.join(there)}"
            )
    return [text for text in texts if text.category in categories]


def _check_places(save: Path | None, plots: Path | None) -> None:
    """Said before anything is measured: that there is no place for what is to be written."""
    if save is not None and (save.is_dir() or not save.absolute().parent.is_dir()):
        raise OptionError(f"{save} cannot be written", "name a file in a folder that is there")
    if plots is not None:
        from edgespec.bench.plots import check_plots

        check_plots()
        if plots.exists() and not plots.is_dir():
            raise OptionError(f"{plots} is a file", "name a folder for the plots")


def _bench(stop: Stop, texts: Sequence[Prompt], options: dict[str, Any]) -> Report:
    from edgespec.bench import Plan, report, run, ways_of

    settings = pick(options, ("temperatures", "repeats", "max_tokens", "seed", "acceptance"))
    methods, lengths = options["methods"], options["draft_lengths"] or ()
    ways = partial(ways_of, draft_lengths=lengths, control=options["control"])
    Plan(tuple(texts), ways(methods or ()), **settings)  # what makes no sense is refused at once
    # No reply is to wait for a cache that grows.
    wanted = {**pick(options, MODEL_NAMES), "reserve_full_context": True}
    with loaded(stop, **wanted, methods=methods or ()) as runtime:
        stop.then(runtime.cancel)
        plan = Plan(tuple(texts), ways(methods or _all_methods(runtime.drafters)), **settings)
        progress = _Progress(stop)
        try:
            measured = run(runtime, plan, max_seconds=options["max_seconds"], progress=progress)
        finally:
            progress.clear()
        return report(runtime, plan, measured)


def _all_methods(drafters: Sequence[str]) -> tuple[str, ...]:
    """What chooses for itself, and what it may choose among."""
    return ("auto", *drafters, *(("model+suffix",) if "model" in drafters else ()))


class _Progress:
    """A bar, what is measured, and how long the rest will take."""

    def __init__(self, stop: Stop) -> None:
        self._line = ProgressLine(stop)
        # The first reply that was there, and when: what came before it says little of the others.
        self._first = (0.0, 0.0)

    def __call__(self, what: str, fraction: float) -> bool:
        if not is_terminal(sys.stderr):
            return self._line("measuring", fraction)
        now = monotonic()
        if fraction and not self._first[0]:
            self._first = (fraction, now)
        share, since = self._first
        left = (now - since) * (1 - fraction) / (fraction - share) if fraction > share else 0.0
        done = round(_BAR * fraction)
        rest = f"{_duration(left)} left, " if left >= 1 else ""
        return self._line(f"[{'#' * done}{'-' * (_BAR - done)}] {rest}{what}", fraction)

    def clear(self) -> None:
        self._line.clear()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _machine() -> dict[str, object]:
    """What it was measured on."""
    from edgespec.machine import inspect_machine

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
