"""`edgespec verify`: check that drafting does not change a model's replies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.failures import DONE, FAILED
from edgespec.cli.help import HelpfulCommand
from edgespec.cli.interrupt import Stop, interruptible
from edgespec.cli.options import MODEL_NAMES, WORKER_NAMES, KindType, declared_options, json_option, pick
from edgespec.cli.running import (
    RepliesProgress,
    counted,
    draft_lengths_option,
    loaded,
    max_tokens_option,
    methods_option,
    prompts_option,
    seed_option,
    temperatures_option,
)
from edgespec.cli.screen import print_json, print_table, printable
from edgespec.errors import CancelledError
from edgespec.options.methods import methods as known_methods
from edgespec.options.option import Number
from edgespec.options.reply_options import CONSTRAINT_NAMES

if TYPE_CHECKING:
    from edgespec.losslessness.cases import Prompt
    from edgespec.losslessness.report import VerifyReport

__all__ = ["SMALLEST_P_VALUE", "command"]

# Corrected p-value below which a method counts as changing the distribution of replies.
SMALLEST_P_VALUE = 0.001
# Maximum number of differing replies to list per method.
_MAX_SHOWN_DIVERGENCES = 5
# Explanations of why replies count as faults.
_REASONS = {
    "rejected_tokens": "rejected draft tokens changed later tokens, so they were not removed from the model's"
    " cache",
    "stale_cache": "the reply is wrong because of what earlier replies left in the model's cache",
    "other_replies": "the reply depends on the replies that were generated at the same time",
    "not_repeatable": "the model gives different results each time it runs the same computation",
    "ending": "the reply ends too early or too late",
    "not_reproduced": "recomputing the reply gives other tokens, so its drafter changed the model's cache,"
    " or wrong tokens were accepted",
}

_COLUMNS = {
    "prompts": "PROMPTS",
    "replies": "REPLIES",
    "identical": "IDENTICAL",
    "rounding": "ROUNDING",
    "faults": "FAULTS",
    "largest_difference": "LARGEST-DIFF",
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
    short_help="Check that the speed-up does not change replies.",
    examples=(
        "edgespec verify",
        "edgespec verify --target 8b-q4 --methods model,model+suffix --temperatures 0,1",
        "edgespec verify --parallel 4 --temperatures 0 --draft-lengths 4",
        "edgespec verify --prompts my-prompts.jsonl --draft-lengths 1,2,4,8,16 --json",
    ),
)
@methods_option(
    help="Methods to check. Others, such as `auto`, are checked only if you name them. [default: the methods"
    " that use repeated text, and those of the loaded draft heads; with a draft model, also model and"
    " model+suffix]"
)
@prompts_option(
    help="JSON Lines file with a `prompt` or `messages` on each line. [default: 18 built-in prompts]"
)
@temperatures_option(default="0,0.8,1.2", help="Temperatures to check.")
@draft_lengths_option(default="1,4,8", help="Draft lengths to check, in tokens.")
@max_tokens_option(default=64, help="Maximum number of tokens per reply.")
@seed_option(help="Random seed for the first reply.")
@click.option(
    "--idle-time",
    "idle_seconds",
    type=KindType(Number(0.0, 86400.0)),
    metavar="SECONDS",
    default=2,
    show_default=True,
    help="Time to wait after each reply, if the draft model learns between replies (--learn).",
)
@json_option
def command(
    methods: tuple[str, ...] | None, prompts: Path | None, as_json: bool, acceptance: str, **options: Any
) -> int:
    """Check on your own models that the speed-up does not change replies.

    The model answers every prompt without and with each method, and the tokens of the replies are compared.

    \b
    identical   exactly the same tokens
    rounding    a tiny difference in rounding, because computers round
                differently when they compute several tokens at once;
                everything else was checked and is correct
    fault       any other difference; the exit status is then 1

    To tell these apart, edgespec computes a reply that differs once more, with the reply's own tokens and an
    empty cache. If this gives the same tokens again, whatever the rejected tokens are, the difference is
    rounding. LARGEST-DIFF is the largest difference between the logits of several tokens at once and of one
    token at a time. With --exact, and wherever else edgespec promises identical replies, those that differ by
    rounding break the promise, and the exit status is 1.

    With --parallel N, the methods generate N replies at a time, as a server does. Each reply is compared with
    one that was generated alone.

    With --acceptance rejection, the probabilities of the replies are compared instead, and a p-value below
    0.001 counts as a fault. Methods are used here even when they are slower. A method that proposes no tokens
    cannot be checked, and the exit status is then 1 too.

    Each prompt is answered once for every combination of method, temperature and draft length. With the
    default values and a draft model, that is about 700 replies. They take minutes even with the demo model,
    and if you stop early, there is no result. For a quick check, add
    --temperatures 0 --draft-lengths 4 -n 32.

    In the output, PROMPTS, IDENTICAL, ROUNDING and FAULTS are numbers of prompts. A prompt is identical only
    if all of its replies are. REPLIES is the number of replies that were compared. DRAFTED is the number of
    tokens that the method proposed, and ACCEPTED how many of them the model accepted.
    """
    from edgespec.losslessness.cases import read_prompts

    texts = read_prompts(prompts) if prompts else _few_of_each_category(read_prompts(None))
    report = interruptible(lambda stop: _verify(stop, texts, methods, acceptance, options))
    facts = report.to_json()
    failed = report.faults or report.broken_promises
    proved = not (failed or report.nothing_drafted or report.nothing_shared)
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
    from edgespec.api.loading import always_draft
    from edgespec.losslessness.cases import all_cases, check_at_once, count_replies
    from edgespec.losslessness.verify import verify

    if options["parallel"] > 1:
        lengths = pick(options, ("temperatures", "draft_lengths"))
        # Without --methods, count only the cases of methods that are always available.
        always = tuple(
            each.name
            for each in known_methods()
            if each.always_loaded and not (each.runs_model or each.only_constrained)
        )
        cases = all_cases(prompts, methods or always, **lengths)
        check_at_once(acceptance, len(cases))
    wanted = pick(options, (*MODEL_NAMES, *WORKER_NAMES))
    constraint = {name: options[name] for name in CONSTRAINT_NAMES if options[name]}
    is_constrained = constraint or any(prompt.schema for prompt in prompts)
    with (
        always_draft(),
        loaded(stop, **wanted, methods=methods or (), acceptance=acceptance) as runtime,
        RepliesProgress(stop) as progress,
    ):
        constrained = [each.name for each in known_methods() if each.only_constrained]
        drafters = (*runtime.drafters, *constrained) if is_constrained else runtime.drafters
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
            raise CancelledError("the check was stopped, so there is no result", "run it again")
        return report


def _planned(replies: int, max_tokens: int, prompts: int, compared: dict[str, Any]) -> str:
    factors = [
        counted(prompts, "prompt"),
        counted(len(compared["temperatures"]), "temperature"),
        counted(len(compared["draft_lengths"]), "draft length"),
        counted(len(compared["methods"]), "method"),
    ]
    names = ", ".join(compared["methods"])
    sampled = compared["acceptance"] == "rejection"
    rest = "; above temperature 0, each is sampled many times" if sampled else ", and without the speed-up"
    amount = f"{replies:,} replies of up to {max_tokens} tokens"
    return f"plan: {amount}: {' x '.join(factors)} ({names}){rest}"


def _few_of_each_category(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return two prompts from each category, because running all of them can take hours on a large model."""
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
    if facts["acceptance"] == "rejection":
        return "Passed: the speed-up did not measurably change the probabilities of the replies."
    methods = facts["methods"].values()
    replies = sum(method["replies"] for method in methods)
    if not any(method["divergences"] for method in methods):
        return f"Passed: the speed-up did not change a single token of these {replies:,} replies."
    rounded = sum(len(method["divergences"]) for method in methods)
    return (
        f"Passed: {rounded:,} of these {replies:,} replies differ by rounding, and there are no faults (see"
        " `edgespec verify --help`)."
    )


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
        counts = [_cell(method[key]) for key in _COLUMNS]
        rows.append([name, *counts, "-" if value is None else f"{value:.3g}"])
    heads = ("METHOD", *_COLUMNS.values(), "P-VALUE")
    # P-values exist only for `rejection` acceptance, which is tested statistically.
    columns = len(heads) if facts["acceptance"] == "rejection" else len(heads) - 1
    print_table(heads[:columns], [row[:columns] for row in rows])
    for name in facts["nothing_drafted"]:
        why = facts["methods"][name]["note"]
        click.echo(printable(f"{name} proposed no tokens, so nothing was checked{why and f': {why}'}"))
    for name in facts["nothing_shared"]:
        click.echo(f"no replies with {name} were computed together, so nothing was checked")
    for name, method in facts["methods"].items():
        # Show faults first.
        divergences = sorted(method["divergences"], key=lambda each: each["verdict"] != "fault")
        for divergence in divergences[:_MAX_SHOWN_DIVERGENCES]:
            click.echo(printable(f"{name}: {_described(divergence)}"))
    if facts["broken_promises"]:
        click.echo(
            "\nFailed: when the model was loaded, checking several tokens at once gave exactly the same"
            " results as checking one, but during these replies it did not. edgespec's promise of identical"
            " replies does not hold for this build."
        )


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.3g}"


def _described(divergence: dict[str, Any]) -> str:
    where = ", ".join(
        f"{name.replace('_', ' ')} {divergence[name]}"
        for name in ("prompt", "temperature", "draft_length", "position", "plain_token", "other_token")
    )
    numbers = [
        f"{name.replace('_', ' ')} {divergence[name]:.3g}"
        for name in ("largest_difference", "leak")
        if divergence[name] is not None
    ]
    reason = divergence["reason"]
    why = f": {_REASONS[reason]}" if reason else ""
    return f"{', '.join([where, *numbers])}, {divergence['verdict']}{why}"
