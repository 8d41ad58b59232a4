"""`edgespec tune`: what passes cost on this machine, and which drafter pays."""

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

# One prompt of each of a few skills: on a large model each takes minutes.
_SKILLS = ("code", "copy", "explain", "howto")


@click.command(
    "tune",
    cls=HelpfulCommand,
    short_help="Measure what passes cost here, and which drafter pays.",
    examples=(
        "edgespec tune",
        "edgespec tune --target 8b-q4 --draft 1b-q4",
        "edgespec tune --target 8b-q4 --method layerskip --json",
    ),
)
@max_tokens_option(48, "The longest reply to try a drafter on, in tokens.")
@click.option(
    "--method",
    metavar="METHOD",
    default="auto",
    help="Drafters to try beside those that are always there: layerskip, lowbit, swift or lookahead."
    " [default: auto]",
)
@json_option
@model_options
@drafting_options(measuring=True)
def command(method: str, max_tokens: int, as_json: bool, **options: Any) -> int:
    """Measure what a pass of several tokens costs on this machine, and try each drafter on a few prompts.

    What passes cost is kept, and later loads of this model go by it. v is a pass in plain steps; LIMIT is the
    speed-up over plain decoding if all guesses were right and free; BREAK-EVEN is how often guesses that cost
    nothing have to be right for that pass to pay. C is what a drafted token cost, in plain steps; EXPECTED is
    the speed-up to expect at the BEST LENGTH, of text where guesses come true as often.
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
            "the prompts are always the same: suffix would look up its own earlier replies",
            "leave --remember out",
        )
    first: dict[str, Prompt] = {}
    for prompt in read_prompts(None):
        first.setdefault(prompt.category, prompt)
    prompts = [first[skill] for skill in _SKILLS]
    with loaded(stop, **pick(options, MODEL_NAMES), method=method) as runtime:
        stop.then(runtime.cancel)
        progress = ProgressLine(stop)
        try:
            return tune(runtime, prompts, max_tokens=max_tokens, progress=progress)
        finally:
            progress.clear()


def _print(tuning: Tuning) -> None:
    click.echo(
        f"target {tuning.target}, draft {tuning.draft or 'none'},"
        f" plain step {tuning.target_step_seconds * 1e3:.3g} ms"
    )
    print_table(
        ("TOKENS", "MS", "V", "LIMIT", "BREAK-EVEN"),
        [
            [
                str(each.width),
                f"{each.seconds * 1e3:.3g}",
                f"{each.v:.2f}",
                f"{each.limit:.2f}x",
                _even(each),
            ]
            for each in tuning.passes
        ],
    )
    click.echo("")
    print_table(
        ("DRAFTER", "SPEED-UP", "ACCEPTANCE", "C", "BEST LENGTH", "EXPECTED"),
        [
            [
                found.name,
                f"{found.speed_up:.2f}x" if found.drafted else "-",
                f"{found.acceptance:.0%}" if found.drafted else "-",
                f"{found.c:.3f}" if found.drafted else "-",
                str(found.best_length) if found.drafted else "-",
                f"{found.expected:.2f}x" if found.drafted else "-",
            ]
            for found in tuning.drafters
        ],
    )
    click.echo("")
    if tuning.auto is not None:
        click.echo(f"auto, which chooses round by round: {tuning.auto:.2f}x")
    click.echo(tuning.verdict)


def _even(cost: PassCost) -> str:
    if cost.width == 1:
        return "-"
    return "never" if cost.break_even is None else f"{cost.break_even:.0%}"
