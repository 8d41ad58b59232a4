"""`edgespec verify`: check on the user's own models that speculation does not change replies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.failures import DONE, FAILED
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
    model_options,
    pick,
)
from edgespec.cli.screen import ProgressLine, print_json, print_table, printable
from edgespec.errors import CancelledError

if TYPE_CHECKING:
    from edgespec.losslessness import Prompt, Report

__all__ = ["SMALLEST_P_VALUE", "command"]

# If the corrected p-value is lower, the method's samples are considered to differ in distribution from the
# target's.
SMALLEST_P_VALUE = 0.001
_MAX_SHOWN_DIVERGENCES = 5  # maximum number of differing replies to list per method
# JSON key of each count, and its column heading.
_COUNTS = {
    "prompts": "PROMPTS",
    "identical": "IDENTICAL",
    "near_tie": "NEAR-TIE",
    "violations": "VIOLATIONS",
    "drafted_tokens": "DRAFTED",
    "accepted_tokens": "ACCEPTED",
}
_PROMPTS_PER_CATEGORY = 2


@click.command(
    "verify",
    cls=HelpfulCommand,
    short_help="Prove that speculation changes no token.",
    examples=(
        "edgespec verify",
        "edgespec verify --target 8b-q4 --methods model,model+suffix --temperatures 0,1",
        "edgespec verify --prompts my-prompts.jsonl --draft-lengths 1,2,4,8,16 --json",
    ),
)
@methods_option(
    "Methods to compare with plain decoding. auto, layerskip, lowbit, swift and lookahead run only if named."
    " [default: suffix and ngram; with a draft model also model and model+suffix]"
)
@prompts_option("JSON lines with `prompt` or `messages`. [default: built-in prompts]")
@temperatures_option("0,0.8,1.2", "Temperatures to compare.")
@draft_lengths_option("1,4,8", "Draft lengths to compare, in tokens.")
@max_tokens_option(64)
@seed_option("Seed of the first reply.")
@click.option(
    "--idle-time",
    "idle_seconds",
    type=click.FloatRange(0),
    metavar="SECONDS",
    default=2,
    show_default=True,
    help="Idle time after each reply for methods that improve between replies: swift, and model with --learn."
    " Other methods do not wait.",
)
@json_option
@acceptance_option
@model_options
@drafting_options(measuring=True)
def command(
    methods: tuple[str, ...] | None, prompts: Path | None, as_json: bool, acceptance: str, **options: Any
) -> int:
    """Prove that speculation changes no token.

    Plain decoding and each method answer every prompt, and their tokens are compared.

    \b
    identical   the same tokens
    near-tie    two tokens were equally likely within the measured rounding error
    violation   any other difference; the exit status is 1

    With --acceptance rejection, the distributions are compared instead, and a p-value below 0.001 is a
    violation. Methods draft before every pass, even if that is slower. If a method drafted nothing, nothing
    was verified, and the exit status is also 1.
    """
    from edgespec import SamplingParams
    from edgespec.losslessness import read_prompts

    for temperature in options["temperatures"]:
        SamplingParams(temperature=temperature)
    texts = read_prompts(prompts) if prompts else _few_of_each_category(read_prompts(None))
    report = interruptible(lambda stop: _verify(stop, texts, methods, acceptance, options))
    facts = report.to_json()
    if as_json:
        print_json(facts)
    else:
        _print(facts)
    proved = not (report.violations or report.nothing_drafted)
    return DONE if proved and _smallest_p_value(facts) >= SMALLEST_P_VALUE else FAILED


def _verify(
    stop: Stop,
    prompts: list[Prompt],
    methods: tuple[str, ...] | None,
    acceptance: str,
    options: dict[str, Any],
) -> Report:
    from edgespec.assembly.loading import always_draft
    from edgespec.losslessness import verify

    wanted = pick(options, MODEL_NAMES)
    with always_draft(), loaded(stop, **wanted, methods=methods or (), acceptance=acceptance) as runtime:
        stop.on_request(runtime.cancel)
        progress = ProgressLine(stop)
        try:
            report = verify(
                runtime,
                prompts,
                methods=methods or _all_methods(runtime.drafters),
                acceptance=acceptance,
                idle_seconds=options["idle_seconds"],
                progress=progress,
                **pick(options, ("temperatures", "draft_lengths", "max_tokens", "seed")),
            )
        finally:
            progress.clear()
        if stop.requested:
            raise CancelledError(
                "verify was cancelled", "run it again; the replies compared so far do not prove anything"
            )
        return report


def _few_of_each_category(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return two prompts from each category, because all prompts would take hours on a large model."""
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    return [prompt for same in by_category.values() for prompt in same[:_PROMPTS_PER_CATEGORY]]


def _all_methods(drafters: Sequence[str]) -> tuple[str, ...]:
    """Return the default methods: all available drafters, and the combination that `auto` uses."""
    return (*drafters, "model+suffix") if "model" in drafters else tuple(drafters)


def _smallest_p_value(facts: dict[str, Any]) -> float:
    values = (method.get("smallest_corrected_p_value") for method in facts["methods"].values())
    return min((value for value in values if value is not None), default=1.0)


def _print(facts: dict[str, Any]) -> None:
    draft = facts["draft"] or "none"
    click.echo(f"target {facts['target']}, draft {draft}, {facts['acceptance']} acceptance")
    rows = []
    for name, method in facts["methods"].items():
        value = method.get("smallest_corrected_p_value")
        counts = [str(method[key]) for key in _COUNTS]
        rows.append([name, *counts, "-" if value is None else f"{value:.3g}"])
    print_table(("METHOD", *_COUNTS.values(), "SMALLEST P"), rows)
    for name in facts["nothing_drafted"]:
        why = facts["methods"][name]["note"]
        click.echo(printable(f"{name}: drafted nothing, so nothing was proved" + (f": {why}" if why else "")))
    for name, method in facts["methods"].items():
        for divergence in method["divergences"][:_MAX_SHOWN_DIVERGENCES]:
            details = divergence.items() if isinstance(divergence, dict) else ()
            click.echo(printable(f"{name}: " + ", ".join(f"{key} {value}" for key, value in details)))
