"""`edgespec tune`: measure the cost of verify passes on this machine, and recommend a method."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.failures import DONE
from edgespec.cli.help import HelpfulCommand
from edgespec.cli.interrupt import Stop, interruptible
from edgespec.cli.loading import loaded
from edgespec.cli.measuring import max_tokens_option
from edgespec.cli.options import MODEL_NAMES, drafting_options, json_option, model_options, pick
from edgespec.cli.screen import ProgressLine, note, print_json, print_table

if TYPE_CHECKING:
    from edgespec.bench.tuning import PassCost, Tuning
    from edgespec.losslessness import Prompt

__all__ = ["command"]

_LEGEND = """\
WIDTH         tokens checked in one pass of the target
V             duration of that pass divided by the time for one token
LIMIT         speed-up if every drafted token were accepted and drafting were free
BREAK-EVEN    share of drafted tokens that must be accepted before such a pass gains
SPEED-UP      measured on a few prompts at a draft length of 4
ACCEPTED      share of the drafted tokens that the target accepted
C             time to draft one token divided by the time for one token of the target
EXPECTED      speed-up to expect at the best draft length, on similar text"""
# Use one prompt from each of these categories, because each prompt takes minutes on a large model.
_SKILLS = ("code", "copy", "explain", "howto")


@click.command(
    "tune",
    cls=HelpfulCommand,
    short_help="Measure which method is fastest on this machine.",
    examples=(
        "edgespec tune",
        "edgespec tune --target 8b-q4 --draft 1b-q4",
        "edgespec tune --target 8b-q4 --method layerskip --json",
    ),
)
@max_tokens_option(48, "Maximum length of the replies that try a method, in tokens.")
@click.option(
    "--method",
    metavar="METHOD",
    default="auto",
    help="Method to try besides those that are always available: layerskip, lowbit, swift or lookahead."
    " [default: auto]",
)
@json_option
@model_options
@drafting_options(measuring=True)
def command(method: str, max_tokens: int, as_json: bool, **options: Any) -> int:
    """Measure how fast this machine checks several tokens at once, and try each method.

    The measured costs are saved for the automatic mode. The report ends with a legend and a recommendation.
    """
    tuning = interruptible(lambda stop: _tune(stop, method, max_tokens, options))
    note(tuning.notice)
    if as_json:
        print_json(tuning.to_json())
    else:
        _print(tuning)
    return DONE


def _tune(stop: Stop, method: str, max_tokens: int, options: dict[str, Any]) -> Tuning:
    from edgespec.bench.tuning import tune
    from edgespec.errors import OptionError
    from edgespec.losslessness import read_prompts

    if options["remember"]:
        raise OptionError(
            "--remember would let the suffix method find its own earlier replies, because prompts repeat",
            "remove --remember",
        )
    first: dict[str, Prompt] = {}
    for prompt in read_prompts(None):
        first.setdefault(prompt.category, prompt)
    prompts = [first[skill] for skill in _SKILLS]
    with loaded(stop, **pick(options, MODEL_NAMES), method=method) as runtime:
        stop.on_request(runtime.cancel)
        progress = ProgressLine(stop)
        try:
            return tune(runtime, prompts, max_tokens=max_tokens, progress=progress)
        finally:
            progress.clear()


def _print(tuning: Tuning) -> None:
    click.echo(
        f"target {tuning.target}, draft {tuning.draft or 'none'},"
        f" {tuning.target_step_seconds * 1e3:.3g} ms per token without speculation"
    )
    print_table(
        ("WIDTH", "MS", "V", "LIMIT", "BREAK-EVEN"),
        [
            [
                str(each.width),
                f"{each.seconds * 1e3:.3g}",
                f"{each.v:.2f}",
                f"{each.limit:.2f}x",
                _break_even(each),
            ]
            for each in tuning.passes
        ],
    )
    click.echo("")
    print_table(
        ("METHOD", "SPEED-UP", "ACCEPTED", "C", "BEST LENGTH", "EXPECTED"),
        [
            [
                result.name,
                f"{result.speed_up:.2f}x" if result.drafted else "-",
                f"{result.acceptance:.0%}" if result.drafted else "-",
                f"{result.c:.3f}" if result.drafted else "-",
                str(result.best_length) if result.drafted else "-",
                f"{result.expected:.2f}x" if result.drafted else "-",
            ]
            for result in tuning.drafters
        ],
    )
    click.echo("")
    if tuning.auto is not None:
        click.echo(f"The automatic mode reached {tuning.auto:.2f}x.")
    click.echo(f"{_LEGEND}\n")
    click.echo(tuning.verdict)


def _break_even(cost: PassCost) -> str:
    if cost.width == 1:
        return "-"
    return "never" if cost.break_even is None else f"{cost.break_even:.0%}"
