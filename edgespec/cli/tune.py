"""`edgespec tune`: measure how fast this machine verifies drafts, and recommend a method."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.failures import DONE
from edgespec.cli.help import HelpfulCommand
from edgespec.cli.interrupt import Stop, interruptible
from edgespec.cli.options import MODEL_NAMES, WORKER_NAMES, declared_options, json_option, pick
from edgespec.cli.running import loaded, max_tokens_option, reject_remember
from edgespec.cli.screen import ProgressLine, note, print_json, print_table, warn

if TYPE_CHECKING:
    from edgespec.bench.tuning import DrafterResult, PassCost, Tuning
    from edgespec.losslessness.cases import Prompt

__all__ = ["command"]

_THREADS_LEGEND = """\
THREADS       number of CPU threads; edgespec uses the one with an arrow while no other program is busy
"""
_LEGEND = """\
TOKENS        number of tokens that the model checks at once
MS            time that this takes in milliseconds
COST          the same time, as a multiple of the time for one token
AT BEST       speed-up if all proposed tokens were accepted, and proposing them took no time
BREAK-EVEN    share of the proposed tokens that must be accepted to save time
SPEED-UP      measured with a few prompts, proposing 4 tokens at a time
ACCEPTED      share of the proposed tokens that the model accepted
DRAFT COST    time to propose a token, as a share of the time that the model takes for one
BEST LENGTH   the --draft-length with the highest expected speed-up
EXPECTED      expected speed-up at that length on similar text"""
# To save time, `edgespec tune` uses only one prompt from each of these categories.
_SKILLS = ("code", "copy", "explain", "howto")


@click.command(
    "tune",
    cls=HelpfulCommand,
    params=declared_options(*MODEL_NAMES, *WORKER_NAMES, per_run=("remember",)),
    short_help="Find the fastest settings for a model on this machine.",
    examples=(
        "edgespec tune",
        "edgespec tune --target 8b-q4 --draft 1b-q4",
        "edgespec tune --target 8b-q4 --method layerskip --json",
    ),
)
@max_tokens_option(default=48, help="Maximum number of tokens per test reply.")
@click.option(
    "--method",
    metavar="METHOD",
    default="auto",
    help="Also try this method, such as layerskip or lookahead. Methods that need no preparation are always"
    " tried.",
)
@json_option
def command(method: str, max_tokens: int, as_json: bool, **options: Any) -> int:
    """Find the fastest method and draft length for a model on this machine.

    edgespec measures how fast the model checks several tokens at once, then tries each method on a few
    prompts. It saves the measurements, so that later replies can use them. The report ends with a
    recommendation.
    """
    reject_remember(options)
    tuning = interruptible(lambda stop: _tune(stop, method, max_tokens, options))
    note(tuning.notice)
    if as_json:
        print_json(tuning.to_json())
    else:
        _print(tuning)
    if tuning.was_cpu_busy:
        warn(
            "other programs used the processor during the measurements, so the results are unreliable; close"
            " them and run `edgespec tune` again"
        )
    return DONE


def _tune(stop: Stop, method: str, max_tokens: int, options: dict[str, Any]) -> Tuning:
    from edgespec.bench.tuning import tune
    from edgespec.losslessness.cases import read_prompts

    first: dict[str, Prompt] = {}
    for prompt in read_prompts(None):
        first.setdefault(prompt.category, prompt)
    prompts = [first[skill] for skill in _SKILLS]
    wanted = pick(options, (*MODEL_NAMES, *WORKER_NAMES))
    with loaded(stop, **wanted, method=method) as runtime, ProgressLine(stop) as progress:
        return tune(runtime, prompts, max_tokens=max_tokens, progress=progress)


def _print(tuning: Tuning) -> None:
    click.echo(f"model {tuning.target}, draft model {tuning.draft or 'none'}")
    click.echo(f"{_milliseconds(tuning.target_step_seconds)} ms per token without the speed-up\n")
    if tuning.thread_seconds:
        print_table(
            ("THREADS", "MS PER TOKEN"),
            [
                (f"{count}{' <-' if count == tuning.threads else ''}", _milliseconds(seconds))
                for count, seconds in sorted(tuning.thread_seconds.items())
            ],
        )
        click.echo()
    print_table(
        ("TOKENS", "MS", "COST", "AT BEST", "BREAK-EVEN"),
        [
            (
                str(each.width),
                _milliseconds(each.seconds),
                f"{each.v:.2f}",
                f"{each.limit:.2f}x",
                _break_even(each),
            )
            for each in tuning.passes
        ],
    )
    click.echo()
    print_table(
        ("METHOD", "SPEED-UP", "ACCEPTED", "DRAFT COST", "BEST LENGTH", "EXPECTED"),
        [(each.name, *(_results(each) if each.drafted else ("-",) * 5)) for each in tuning.drafters],
    )
    click.echo(f"\n{_THREADS_LEGEND if tuning.thread_seconds else ''}{_LEGEND}\n")
    if tuning.auto is not None:
        click.echo(f"The speed-up with the default method, auto, was {tuning.auto:.2f}x.")
    click.echo(tuning.verdict)


def _results(result: DrafterResult) -> tuple[str, ...]:
    return (
        f"{result.speed_up:.2f}x",
        f"{result.acceptance:.0%}",
        f"{result.c:.3f}",
        str(result.best_length),
        f"{result.expected:.2f}x",
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


def _break_even(cost: PassCost) -> str:
    if cost.width == 1:
        return "-"
    return "never" if cost.break_even is None else f"{cost.break_even:.0%}"
