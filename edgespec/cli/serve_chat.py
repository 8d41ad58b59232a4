"""`edgespec serve --chat`: the terminal chat in a browser."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from edgespec.cli.commands import load_command
from edgespec.cli.interrupt import Stop
from edgespec.cli.screen import note, print_json

__all__ = ["DEFAULT_CHAT_PORT", "chat_words", "serve_chat"]

# Default port of the chat. It differs from that of the API server, so that both can run at the same time.
DEFAULT_CHAT_PORT = 11436
# Options that `edgespec serve --chat` handles itself. All others are passed to the chat processes.
_OWN_NAMES = ("chat", "port", "api_key", "as_json")


def chat_words(ctx: click.Context, args: Sequence[str]) -> list[str]:
    """Return the command that starts a chat process, including the options that `serve` passes on to it.

    Args:
        ctx: The context of `serve`.
        args: The command line arguments of `serve`.

    Raises:
        click.UsageError: `edgespec chat` does not have one of the options.
    """
    chat = load_command("chat")
    assert chat is not None
    known = {each.name for each in chat.params}
    values, _, given = ctx.command.make_parser(ctx).parse_args(list(args))
    words = [sys.executable, "-m", "edgespec", "chat"]
    for option in dict.fromkeys(each for each in given if isinstance(each, click.Option)):
        if option.name in _OWN_NAMES:
            continue
        if option.name not in known:
            raise click.UsageError(f"{option.opts[-1]} cannot be used with --chat", ctx)
        value = values[option.name]
        if isinstance(value, bool):
            words.append((option.opts if value else option.secondary_opts)[-1])
        else:
            for each in value if isinstance(value, list) else [value]:
                words += [option.opts[-1], str(each)]
    return words


def serve_chat(stop: Stop, words: Sequence[str], port: int, key: str | None, *, as_json: bool) -> None:
    """Serve the chat to browsers until a stop is requested."""
    from edgespec.tui.browser import BrowserChat

    server = BrowserChat(words, port, key)

    def stop_server() -> None:
        note("stopping; open chats have a few seconds to save (press Ctrl-C again to stop at once)")
        server.stop()

    stop.on_request(stop_server)

    def on_ready() -> None:
        if as_json:
            print_json({"chat_url": server.address})
        else:
            click.echo(f"Open this address in a browser on this machine: {server.address}")
            click.echo("Each tab loads its own copy of the model. Closing the tab unloads it.")
            click.echo("Press Ctrl-C to stop.")
        sys.stdout.flush()

    server.run(on_ready)
