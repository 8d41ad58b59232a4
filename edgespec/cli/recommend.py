"""`edgespec recommend`: recommend a model for this machine and predict its speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.failures import DONE
from edgespec.cli.help import HelpfulCommand
from edgespec.cli.options import declared_options, json_option
from edgespec.cli.running import with_progress
from edgespec.cli.screen import note, print_json, print_table, warn
from edgespec.system.files import format_bytes, format_number, format_rate

if TYPE_CHECKING:
    from collections.abc import Callable

    from edgespec.loading.recommendation import Candidate, Recommendation

__all__ = ["command"]

_BAR_COLUMNS = 20
_WIDTHS = (2, 4, 8)
_LEGEND = """\
*             the recommended model
MEMORY        memory for the model, its draft model and a context of 8,192 tokens; "from disk" means that
              this is more than there is, so part of the model is read from disk again and again
TOKENS/S      expected speed without a draft model
WITH DRAFT    expected speed and speed-up with the draft model
PROMPT        expected time to read a prompt of 1,000 tokens
DOWNLOAD      size of the files that are not on this machine yet"""


@click.command(
    "recommend",
    cls=HelpfulCommand,
    params=declared_options("memory", "reserve"),
    short_help="Recommend a model for this machine.",
    examples=(
        "edgespec recommend",
        "edgespec recommend --task code",
        "edgespec recommend --memory 16GiB --json",
    ),
)
@click.option(
    "--task",
    type=click.Choice(("chat", "code")),
    default="chat",
    show_default=True,
    help="What the model will be used for.",
)
@click.option("--measure", is_flag=True, help="Measure this machine again instead of using saved results.")
@json_option
def command(task: Any, measure: bool, as_json: bool, **sizes: Any) -> int:
    """Recommend a model for this machine, and predict the speed of every model that can run on it.

    The first time, edgespec measures how fast this machine is, which takes up to 20 seconds. Nothing is
    downloaded. Predictions assume short chats on an otherwise idle machine.
    """
    from edgespec.loading.recommendation import recommend

    result = with_progress(lambda progress: recommend(task, **sizes, remeasure=measure, progress=progress))
    note(result.machine.notice)
    if as_json:
        print_json(_json(result))
    else:
        _print(result)
    if result.machine.is_disturbed:
        warn(
            f"other programs kept {result.machine.busy_cores:.1f} processor cores busy during the"
            " measurement, so the predictions are too low and the recommended model may be too small; close"
            " them, and run this command again"
        )
    return DONE


def _json(result: Recommendation) -> dict[str, object]:
    return {
        "budget_bytes": result.budget_bytes,
        "recommended": result.best.reference if result.best else None,
        "command": result.best.command if result.best else None,
        "why_no_draft": result.why_no_draft or None,
        "machine": {
            name: {"bytes_per_second": each.bytes_per_second, "pass_costs": _costs(each.curve.v)}
            for name, each in result.machine.types.items()
        },
        "models": [
            {
                "model": each.reference,
                "draft": each.draft or None,
                "installed": each.is_installed,
                "parameters": each.parameters,
                "download_bytes": each.download_bytes,
                "needed_bytes": each.needed_bytes,
                "larger_than_memory": each.is_streamed,
                "faster_quantisation": each.faster_type or None,
            }
            | each.speed.to_json()
            for each in result.candidates
        ],
    }


def _costs(v: Callable[[int], float]) -> dict[str, float]:
    return {str(width): v(width) for width in _WIDTHS}


def _print(result: Recommendation) -> None:
    if result.best is None:
        click.echo(
            f"No model in the catalogue fits in {format_bytes(result.budget_bytes)} of memory. Close other"
            " programs, or use a larger --memory if you set it."
        )
        return
    fastest = max(each.speed.fastest_tokens_per_second for each in result.candidates)
    print_table(
        ("MODEL", "MEMORY", "TOKENS/S", "WITH DRAFT", "", "PROMPT", "DOWNLOAD"),
        [_row(each, fastest, each is result.best) for each in result.candidates],
        optional=("", "PROMPT", "DOWNLOAD"),
    )
    click.echo(f"\n{_LEGEND}\n")
    print_table(
        ("QUANTISATION", "GB/S", *(f"{width} TOKENS" for width in _WIDTHS)),
        [
            (
                name,
                format_number(each.bytes_per_second / 1e9),
                *(f"{cost:.2f}" for cost in _costs(each.curve.v).values()),
            )
            for name, each in result.machine.types.items()
        ],
    )
    click.echo(
        "How fast this machine reads models with each quantisation, and how long it takes to check several"
        "\ntokens at once, as a multiple of the time for one token. The smaller these numbers are, the more a"
        " draft\nmodel helps.\n"
    )
    click.echo(_verdict(result.best, result.why_no_draft))


def _row(candidate: Candidate, fastest: float, is_best: bool) -> tuple[str, ...]:
    speed = candidate.speed
    bar = "█" * max(1, round(_BAR_COLUMNS * speed.fastest_tokens_per_second / fastest))
    return (
        candidate.reference + (" *" if is_best else ""),
        format_bytes(candidate.needed_bytes) + (", from disk" if candidate.is_streamed else ""),
        format_rate(speed.tokens_per_second),
        f"{format_rate(speed.fastest_tokens_per_second)} ({speed.speedup:.1f}x)" if candidate.draft else "-",
        bar,
        f"{speed.prompt_seconds:,.0f} s" if speed.prompt_seconds >= 10 else f"{speed.prompt_seconds:.1f} s",
        format_bytes(candidate.download_bytes) if candidate.download_bytes else "-",
    )


def _verdict(best: Candidate, why_no_draft: str) -> str:
    speed = best.speed
    fastest = format_rate(speed.fastest_tokens_per_second)
    lines = [
        f"Recommended: {best.reference}, at about {fastest} tokens per second"
        + (f" ({speed.speedup:.1f}x with the draft model {best.draft})." if best.uses_draft else "."),
        f"  {best.command}",
    ]
    if why_no_draft:
        lines.append(why_no_draft)
    if best.faster_type:
        lines.append(
            f"{best.reference} in the quantisation {best.faster_type} would be faster on this machine,"
            " because"
            " checking several tokens at once then costs less."
        )
    return "\n".join(lines)
