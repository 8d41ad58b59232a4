"""`edgespec plan`: show how much memory a model needs before loading it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.failures import DONE
from edgespec.cli.help import HelpfulCommand
from edgespec.cli.options import LOAD_NAMES, WORKER_NAMES, declared_options, json_option
from edgespec.cli.running import with_progress
from edgespec.cli.screen import note, print_json, terminal_width, warn

if TYPE_CHECKING:
    from edgespec.loading.preview import Preview

__all__ = ["command"]

_WIDTH = 100


@click.command(
    "plan",
    cls=HelpfulCommand,
    params=declared_options(*LOAD_NAMES, *WORKER_NAMES),
    short_help="Show how much memory a model needs, without loading it.",
    examples=(
        "edgespec plan",
        "edgespec plan --target 70b-q4 --memory 48GiB",
        "edgespec plan --target 8b-q4 --draft 1b-q4 --context 32768 --prefer context",
        "edgespec plan --target 8b-q4 --method lowbit",
        "edgespec plan --target 70b-q4 --workers 192.168.1.20:50052=16GiB,local=8GiB",
    ),
)
@json_option
def command(as_json: bool, **options: Any) -> int:
    """Show how much memory a model and its draft model need, and what is reduced to make them fit.

    Nothing is downloaded, and no model stays loaded. If the model is not on this machine, edgespec reads its
    metadata from Hugging Face. Options that you set yourself are never reduced. The cache of earlier chats is
    listed separately because it is freed when memory runs low. With --workers, each machine's share is listed
    along with the speed of the connection to it. The exit status is 0 even if the model does not fit, so
    scripts should check `fits` in the --json output.
    """
    from edgespec.loading.preview import plan

    preview = with_progress(lambda progress: plan(**options, progress=progress))
    if preview.plan.unused_experts:
        warn(preview.plan.unused_experts)
    if as_json:
        print_json(
            {"target": preview.target, "draft": preview.draft}
            | preview.plan.to_json()
            | {
                "context_trained": preview.trained_context_tokens,
                "context_begins": preview.first_context_tokens,
            }
            | ({} if preview.draft else {"why_no_draft": preview.why_no_draft})
            | {"heads": list(preview.heads)}
            | ({} if preview.heads else {"why_no_head": preview.why_no_head})
            | {"prediction": preview.prediction.to_json() if preview.prediction else None}
            | ({"workers": preview.spread.to_json()} if preview.spread else {})
            | _window_json(preview)
            | ({"advice": preview.advice} if preview.advice else {})
        )
    else:
        for line in preview.notes:
            note(line)
        _print(preview, options["context"])
    return DONE


def _window_json(preview: Preview) -> dict[str, Any]:
    window = preview.draft_window
    seen = window and {"first_tokens": window.sink_tokens, "last_tokens": window.window_tokens}
    return {"draft_sees": seen} if seen else {}


def _print(preview: Preview, requested_context_tokens: int | None) -> None:
    from rich.console import Console

    from edgespec.cli.bars import picture

    console = Console(width=min(terminal_width() or _WIDTH, _WIDTH), highlight=False)
    with console.capture() as capture:
        console.print(picture(preview, requested_context_tokens))
    sys.stdout.write("\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n")
