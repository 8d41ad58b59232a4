"""`edgespec verify`: check that drafting does not change replies, using the user's own models."""

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
    RepliesProgress,
    counted,
    draft_lengths_option,
    max_tokens_option,
    methods_option,
    prompts_option,
    seed_option,
    temperatures_option,
)
from edgespec.cli.options import MODEL_NAMES, WORKER_NAMES, KindType, declared_options, json_option, pick
from edgespec.cli.screen import print_json, print_table, printable
from edgespec.errors import CancelledError
from edgespec.option_kinds import Number
from edgespec.reply_options import CONSTRAINT_NAMES

if TYPE_CHECKING:
    from edgespec.losslessness import Prompt, VerifyReport

__all__ = ["SMALLEST_P_VALUE", "command"]

# A corrected p-value below this means that a method changes the probabilities of replies.
SMALLEST_P_VALUE = 0.001
# Maximum number of differing replies to list per method.
_MAX_SHOWN_DIVERGENCES = 5

_COUNTS = {
    "prompts": "PROMPTS",
    "replies": "REPLIES",
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
    params=declared_options(
        *MODEL_NAMES, *WORKER_NAMES, "acceptance", *CONSTRAINT_NAMES, per_run=("remember",)
    ),
    short_help="Check that drafting does not change the generated tokens.",
    examples=(
        "edgespec verify",
        "edgespec verify --target 8b-q4 --methods model,model+suffix --temperatures 0,1",
        "edgespec verify --parallel 4 --temperatures 0 --draft-lengths 4",
        "edgespec verify --prompts my-prompts.jsonl --draft-lengths 1,2,4,8,16 --json",
    ),
)
@methods_option(
    help="Methods to check. Others, such as auto, are checked only if listed."
    " [default: suffix, ngram and the methods of the loaded heads; with a draft model, also model and"
    " model+suffix]"
)
@prompts_option(
    help="JSON Lines file with a `prompt` or `messages` on each line. [default: 18 built-in prompts]"
)
@temperatures_option(default="0,0.8,1.2", help="Temperatures to check.")
@draft_lengths_option(default="1,4,8", help="Draft lengths to test, in tokens.")
@max_tokens_option(default=64, help="Maximum number of tokens per reply.")
@seed_option(help="Random seed for the first reply.")
@click.option(
    "--idle-time",
    "idle_seconds",
    type=KindType(Number(0.0, 86400.0)),
    metavar="SECONDS",
    default=2,
    show_default=True,
    help="Time to wait after each reply, for the methods that improve between replies (swift, or model with"
    " --learn). Ignored for other methods.",
)
@json_option
def command(
    methods: tuple[str, ...] | None, prompts: Path | None, as_json: bool, acceptance: str, **options: Any
) -> int:
    """Check on your own models that drafting does not change the generated tokens.

    The model answers every prompt without drafting and with each method, and the tokens are compared.

    \b
    identical   exactly the same tokens
    near-tie    the replies differ only because two tokens were equally likely
                within the rounding error measured on this machine
    violation   any other difference; the exit status is then 1

    With --parallel N, the methods generate N replies at a time, as a server does. Each reply is compared with
    one that was generated alone.

    With --acceptance rejection, the probabilities of the replies are compared instead, and a p-value below
    0.001 counts as a violation. Methods always draft here, even when that is slower. If a method drafts
    nothing, it cannot be checked, and the exit status is also 1.

    Each prompt is answered once for every combination of method, temperature and draft length. With the
    default values and a draft model, these are about 700 replies, which takes minutes even with the demo
    model, and there is no partial result. For a quick check, add --temperatures 0 --draft-lengths 4 -n 32.

    In the output, PROMPTS, IDENTICAL, NEAR-TIE and VIOLATIONS are numbers of prompts. A prompt is identical
    only if all of its replies are. REPLIES is the number of replies that were compared. DRAFTED and ACCEPTED
    are numbers of tokens.
    """
    from edgespec.losslessness import read_prompts

    texts = read_prompts(prompts) if prompts else _few_of_each_category(read_prompts(None))
    report = interruptible(lambda stop: _verify(stop, texts, methods, acceptance, options))
    facts = report.to_json()
    proved = not (report.violations or report.nothing_drafted or report.nothing_shared)
    proved = proved and _smallest_p_value(facts) >= SMALLEST_P_VALUE
    if as_json:
        print_json(facts)
    else:
        _print(facts)
        if proved:
            click.echo(f"\n{_verdict(facts)}")
    return DONE if proved else FAILED


def _verify(
    stop: Stop,
    prompts: list[Prompt],
    methods: tuple[str, ...] | None,
    acceptance: str,
    options: dict[str, Any],
) -> VerifyReport:
    from edgespec.assembly.loading import always_draft
    from edgespec.losslessness import all_cases, check_at_once, count_replies, verify

    if options["parallel"] > 1:
        lengths = pick(options, ("temperatures", "draft_lengths"))
        # Without --methods, count the cases of the two methods that are always available.
        cases = all_cases(prompts, methods or ("suffix", "ngram"), **lengths)
        check_at_once(acceptance, len(cases))
    wanted = pick(options, (*MODEL_NAMES, *WORKER_NAMES))
    constraint = {name: options[name] for name in CONSTRAINT_NAMES if options[name]}
    is_constrained = constraint or any(prompt.schema for prompt in prompts)
    with (
        always_draft(),
        loaded(stop, **wanted, methods=methods or (), acceptance=acceptance) as runtime,
        RepliesProgress(stop) as progress,
    ):
        drafters = (*runtime.drafters, "grammar") if is_constrained else runtime.drafters
        compared = {
            "methods": methods or _all_methods(drafters),
            "acceptance": acceptance,
            **pick(options, ("temperatures", "draft_lengths")),
        }
        replies = count_replies(prompts, **compared)
        click.echo(_planned(replies, options["max_tokens"], len(prompts), compared), err=True)
        report = verify(
            runtime,
            prompts,
            **compared,
            **pick(options, ("max_tokens", "seed", "idle_seconds")),
            **constraint,
            at_once=options["parallel"] > 1,
            progress=progress,
        )
        if stop.requested:
            raise CancelledError("verify was cancelled", "run it again; a partial comparison proves nothing")
        return report


def _planned(replies: int, max_tokens: int, prompts: int, compared: dict[str, Any]) -> str:
    """Describe how many replies `verify` generates, and why."""
    factors = [
        counted(prompts, "prompt"),
        counted(len(compared["temperatures"]), "temperature"),
        counted(len(compared["draft_lengths"]), "draft length"),
        counted(len(compared["methods"]), "method"),
    ]
    names = ", ".join(compared["methods"])
    sampled = compared["acceptance"] == "rejection"
    rest = "; above temperature 0, each is sampled many times" if sampled else ", and without drafting"
    amount = f"{replies:,} replies of up to {max_tokens} tokens"
    return f"plan: {amount}: {' x '.join(factors)} ({names}){rest}"


def _few_of_each_category(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return two prompts from each category. All prompts would take hours on a large model."""
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    return [prompt for same in by_category.values() for prompt in same[:_PROMPTS_PER_CATEGORY]]


def _all_methods(drafters: Sequence[str]) -> tuple[str, ...]:
    """Return the default methods: all available drafters and the combination that `auto` uses."""
    return (*drafters, "model+suffix") if "model" in drafters else tuple(drafters)


def _smallest_p_value(facts: dict[str, Any]) -> float:
    values = (method.get("smallest_corrected_p_value") for method in facts["methods"].values())
    return min((value for value in values if value is not None), default=1.0)


def _verdict(facts: dict[str, Any]) -> str:
    """Return a one-sentence conclusion for a report without failed checks."""
    if facts["acceptance"] == "rejection":
        return "Passed: drafting did not measurably change the probabilities of the replies."
    near_ties = sum(method["near_tie"] for method in facts["methods"].values())
    apart = f", apart from {near_ties} near-ties (see `edgespec verify --help`)" if near_ties else ""
    replies = sum(method["replies"] for method in facts["methods"].values())
    return f"Passed: drafting did not change a single token of these {replies:,} replies{apart}."


def _print(facts: dict[str, Any]) -> None:
    names = [f"head {name}" for name in facts["heads"]]
    if facts["draft"] or not names:
        names.insert(0, f"draft model {facts['draft'] or 'none'}")
    parallel = f", {facts['parallel']} replies at once" if facts["parallel"] > 1 else ""
    models = ", ".join([f"model {facts['target']}", *names])
    click.echo(printable(f"{models}, {facts['acceptance']} acceptance{parallel}\n"))
    rows = []
    for name, method in facts["methods"].items():
        value = method["smallest_corrected_p_value"]
        counts = [str(method[key]) for key in _COUNTS]
        rows.append([name, *counts, "-" if value is None else f"{value:.3g}"])
    heads = ("METHOD", *_COUNTS.values(), "P-VALUE")
    # Only tests of probabilities have p-values.
    columns = len(heads) if facts["acceptance"] == "rejection" else len(heads) - 1
    print_table(heads[:columns], [row[:columns] for row in rows])
    for name in facts["nothing_drafted"]:
        why = facts["methods"][name]["note"]
        click.echo(printable(f"{name} drafted nothing, so nothing was checked{why and f': {why}'}"))
    for name in facts["nothing_shared"]:
        click.echo(f"the replies with {name} shared no pass of the model, so nothing was checked")
    for name, method in facts["methods"].items():
        for divergence in method["divergences"][:_MAX_SHOWN_DIVERGENCES]:
            click.echo(
                printable(f"{name}: " + ", ".join(f"{key} {value}" for key, value in divergence.items()))
            )
