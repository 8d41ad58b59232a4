"""`edgespec forget`: deletes what is kept of earlier chats, and what was learnt."""

from __future__ import annotations

import sys

import click

from edgespec.cli.help import HelpfulCommand
from edgespec.cli.options import json_option
from edgespec.cli.screen import print_json
from edgespec.files import format_bytes

__all__ = ["command"]

_NAMES = {
    "all": "earlier chats and what was learnt",
    "replies": "earlier chats",
    "learnt": "what was learnt",
    "kept": "what was read of chats",
}


@click.command(
    "forget",
    cls=HelpfulCommand,
    short_help="Delete what is kept of earlier chats, and what was learnt.",
    examples=("edgespec forget", "edgespec forget replies", "edgespec forget kept"),
)
@click.argument("what", type=click.Choice(tuple(_NAMES)), default="all")
@json_option
def command(what: str, as_json: bool) -> int:
    """Delete what is kept of earlier chats, and what was learnt.

    \b
    replies   replies and prompts that guesses are looked up in (a chat keeps them, or --remember)
    learnt    drafts trained with --learn, layers that swift found, what passes cost, and how often
              guesses came true
    kept      what models have read of chats (a chat keeps it, or --prefix-cache disk): they are read again
    all       all three [default]

    Saved chats stay, and so does what `edgespec prepare` made.
    """
    import edgespec

    freed_bytes = edgespec.delete_data(what)  # type: ignore[arg-type]
    if as_json:
        print_json({"forgotten": what, "freed_bytes": freed_bytes})
    else:
        sys.stdout.write(f"forgot {_NAMES[what]}: {format_bytes(freed_bytes)} freed\n")
    return 0
