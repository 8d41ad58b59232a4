"""`edgespec serve`: serve models to other programs over HTTP."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import click
from click.core import ParameterSource

from edgespec.cli.failures import DONE
from edgespec.cli.help import HelpfulCommand, SectionOption, load_command
from edgespec.cli.interrupt import Stop, interruptible
from edgespec.cli.options import (
    LOAD_NAMES,
    SAMPLING_NAMES,
    WORKER_NAMES,
    declared_options,
    drop_sampling_defaults,
    pick,
)
from edgespec.cli.screen import note, print_json, printable
from edgespec.errors import CancelledError

__all__ = ["command"]

_REPLY_NAMES = ("max_tokens", *SAMPLING_NAMES)
# Default port of the browser chat. It differs from the API server's port, so that both can run at the same
# time.
_DEFAULT_CHAT_PORT = 11436
# Options that `edgespec serve --chat` handles itself. All others are passed to the chat processes.
_OWN_NAMES = ("chat", "port", "api_key", "as_json")


class _ServeCommand(HelpfulCommand):
    """A command that stores its arguments as typed, because --chat passes them to the chat processes."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.obj = list(args)
        return super().parse_args(ctx, args)


@click.command(
    "serve",
    cls=_ServeCommand,
    params=declared_options("target", "draft", *_REPLY_NAMES, *LOAD_NAMES, *WORKER_NAMES),
    short_help="Let editors, agents and scripts use models over HTTP.",
    examples=(
        "edgespec serve",
        "edgespec serve --target 8b-q4",
        "edgespec serve --target 70b-q4 --draft 8b-q4 --memory 48GiB --idle-unload 0",
        "edgespec serve --host 0.0.0.0 --api-key my-secret",
        "edgespec serve --port 8080 --allow-origin https://chat.example.com",
        "edgespec serve --chat --target 8b-q4",
    ),
)
@click.option(
    "--host", default="127.0.0.1", metavar="ADDRESS", cls=SectionOption,
    help="Address to listen on. Addresses that other machines can reach, such as 0.0.0.0, need an API key."
    " [default: 127.0.0.1]",
)  # fmt: skip
@click.option(
    "--port", type=click.IntRange(0, 65535), metavar="PORT",
    cls=SectionOption,
    help=f"Port to listen on; 0 chooses a free one. [default: 11435, or {_DEFAULT_CHAT_PORT} with --chat]",
)  # fmt: skip
@click.option(
    "--api-key", metavar="KEY", envvar="EDGESPEC_API_KEY", cls=SectionOption,
    help="Key that programs must send. Other users of this machine can see command-line options, so it is"
         " safer to set the environment variable EDGESPEC_API_KEY.",
)  # fmt: skip
@click.option(
    "--allow-origin", metavar="ORIGIN", multiple=True, cls=SectionOption,
    help="Let web pages and apps with this origin use the server, such as http://localhost:3000,"
    " https://*.example.com or chrome-extension://*. Can be repeated.",
)  # fmt: skip
@click.option(
    "--idle-unload", default=300.0, type=click.FloatRange(0.0), metavar="SECONDS",
    cls=SectionOption,
    help="Unload a model after it has not been used for this many seconds; 0 keeps models loaded. [default:"
        " 300]",
)  # fmt: skip
@click.option(
    "--max-waiting", default=16, type=click.IntRange(0, 1000), metavar="N",
    cls=SectionOption,
    help="Number of requests that may wait for each model. Further requests get an error. [default: 16]",
)  # fmt: skip
@click.option(
    "--chat", is_flag=True, cls=SectionOption,
    help="Serve the terminal chat to browsers on this machine, instead of the API. Each tab is a separate"
    " chat.",
)  # fmt: skip
@click.option(
    "--json", "as_json", is_flag=True, cls=SectionOption,
    help="Print the server's addresses as JSON when it is ready.",
)  # fmt: skip
@click.pass_context
def command(ctx: click.Context, /, as_json: bool, chat: bool, port: int | None, **options: Any) -> int:
    """Let editors, agents and scripts on this machine use models over HTTP.

    Programs that use OpenAI's API connect to http://127.0.0.1:11435/v1 with any API key. Programs that use
    Anthropic's or Ollama's API connect to http://127.0.0.1:11435. A request can name any model that `edgespec
    models list` shows on this machine. edgespec loads it, and unloads others if memory is short. --target is
    the model for requests that name none.

    Settings such as --temperature apply to requests that do not set them. Press Ctrl-C to stop.
    """
    if chat:
        words, chat_port = _chat_words(ctx, ctx.obj), _DEFAULT_CHAT_PORT if port is None else port
        interruptible(lambda stop: _serve_chat(stop, words, chat_port, options["api_key"], as_json=as_json))
        return DONE
    options = drop_sampling_defaults(options) | {"port": 11435 if port is None else port}
    chosen = ctx.get_parameter_source("target") is not ParameterSource.DEFAULT
    interruptible(lambda stop: _serve(stop, as_json, options, chosen))
    return DONE


def _serve(stop: Stop, as_json: bool, options: dict[str, Any], chosen: bool) -> None:
    """Serve models until a stop is requested. `chosen` says whether the user chose the target."""
    from edgespec.server.http_server import HttpServer
    from edgespec.server.settings import ServerSettings

    settings = ServerSettings(
        target=options["target"] if chosen else None,
        draft=options["draft"],
        load_options=pick(
            options, [name for name in (*LOAD_NAMES, *WORKER_NAMES) if name not in ("target", "draft")]
        ),
        reply_options=pick(options, _REPLY_NAMES),
        host=options["host"],
        port=options["port"],
        api_key=options["api_key"],
        allowed_origins=options["allow_origin"],
        idle_unload_seconds=options["idle_unload"],
        max_waiting=options["max_waiting"],
    )
    server = HttpServer(settings)
    note(f"loading {settings.model}; the first time, this includes a test of the model on this machine")

    def stop_server() -> None:
        note("stopping; replies have a few seconds to finish (press Ctrl-C again to stop at once)")
        server.stop()

    stop.on_request(stop_server)

    def on_ready() -> None:
        if as_json:
            openai_url = f"{server.url}/v1"
            print_json(
                {
                    "url": server.url,
                    "openai_url": openai_url,
                    "anthropic_url": server.url,
                    "ollama_url": server.url,
                }
            )
        else:
            click.echo(f"Serving {settings.model} at {server.url}")
            click.echo(f"For programs that use OpenAI's API: {server.url}/v1")
            click.echo(f"For programs that use Anthropic's or Ollama's API: {server.url}")
            click.echo("Press Ctrl-C to stop.")
        sys.stdout.flush()

    # A stop request is not a failure, even if it arrives before the server is ready.
    with _log_on_stderr(), suppress(CancelledError):
        server.run(on_ready)


class _Printable(logging.Formatter):
    """Formats log lines without control characters, which requests could contain."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


@contextmanager
def _log_on_stderr() -> Iterator[None]:
    handler = logging.StreamHandler()
    handler.setFormatter(_Printable("%(asctime)s %(message)s", "%H:%M:%S"))
    log = logging.getLogger("edgespec.server")
    before = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.level, log.propagate = before


def _chat_words(ctx: click.Context, args: Sequence[str]) -> list[str]:
    """Return the command line for a chat process, including the options that `serve` passes on.

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


def _serve_chat(stop: Stop, words: Sequence[str], port: int, key: str | None, *, as_json: bool) -> None:
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
            # On Windows, programs cannot share a model (see `api/sharing/sockets.py`).
            shares = (
                "loads its own copy of" if sys.platform == "win32" else "is a chat of its own, and all share"
            )
            click.echo(f"Each tab {shares} the model. Closing the last tab unloads it.")
            click.echo("Press Ctrl-C to stop.")
        sys.stdout.flush()

    server.run(on_ready)
