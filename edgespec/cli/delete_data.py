"""`edgespec delete-data`: delete saved replies, learned data and the prefix cache."""

from __future__ import annotations

import sys

import click
from click.core import ParameterSource

from edgespec.cli.help import HelpfulCommand
from edgespec.cli.options import json_option
from edgespec.cli.screen import is_terminal, print_json
from edgespec.system.files import format_bytes

__all__ = ["command"]

_DESCRIPTIONS = {
    "all": (
        "saved replies, what was learned from earlier replies, the cache of earlier chats, and the history of"
        " prompts"
    ),
    "replies": "saved replies",
    "learned": "what was learned from earlier replies",
    "prefix-cache": "the cache of earlier chats",
    "history": "the history of prompts",
}


@click.command(
    "delete-data",
    cls=HelpfulCommand,
    short_help="Delete saved replies, caches and statistics. Keeps your chats.",
    examples=("edgespec delete-data", "edgespec delete-data replies", "edgespec delete-data prefix-cache"),
)
@click.argument("kind", type=click.Choice(tuple(_DESCRIPTIONS)), default="all")
@json_option
@click.pass_context
def command(ctx: click.Context, /, kind: str, as_json: bool) -> int:
    """Delete data that edgespec has saved to make later replies faster, and the history of prompts.

    \b
    replies       prompts and replies that speed up similar replies
    learned       trained draft models, measured speeds and acceptance rates
    prefix-cache  the cache of earlier chats; without it, the next reply in each
                  of these chats takes longer to start
    history       prompts that you browse with Up and Down in the chat, and
                  images pasted into it
    all           all of the above [default]

    Saved chats and the files made by `edgespec prepare` are kept. If you name nothing, edgespec asks for
    confirmation first when it runs in a terminal.
    """
    import edgespec

    chosen = ctx.get_parameter_source("kind") is not ParameterSource.DEFAULT
    if not (chosen or as_json) and is_terminal(sys.stdin):
        click.confirm(f"Delete {_DESCRIPTIONS[kind]}? Your chats will be kept.", abort=True, err=True)
    freed_bytes = edgespec.delete_data(kind)  # type: ignore[arg-type]
    if as_json:
        print_json({"deleted": kind, "freed_bytes": freed_bytes})
    else:
        sys.stdout.write(f"Deleted {_DESCRIPTIONS[kind]}: {format_bytes(freed_bytes)} freed.\n")
    return 0
