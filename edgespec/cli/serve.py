"""`edgespec serve`: let other programs use models over HTTP."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

from edgespec.cli.failures import DONE
from edgespec.cli.help import HelpfulCommand, SectionOption
from edgespec.cli.interrupt import Stop, interruptible
from edgespec.cli.options import LOAD_NAMES, SAMPLING_NAMES, WORKER_NAMES, declared_options, pick
from edgespec.cli.screen import note, print_json, printable
from edgespec.cli.serve_chat import DEFAULT_CHAT_PORT, chat_words, serve_chat
from edgespec.errors import CancelledError

__all__ = ["command"]

_REPLY_NAMES = ("max_tokens", *SAMPLING_NAMES)


class _ServeCommand(HelpfulCommand):
    """Keeps the arguments as typed, because --chat passes them to the chat processes."""

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
    help=f"Port to listen on; 0 chooses a free one. [default: 11435, or {DEFAULT_CHAT_PORT} with --chat]",
)  # fmt: skip
@click.option(
    "--api-key", metavar="KEY", envvar="EDGESPEC_API_KEY", cls=SectionOption,
    help="Key that programs must send. Other users of this machine can see options, so it is safer to set the"
    " environment variable EDGESPEC_API_KEY.",
)  # fmt: skip
@click.option(
    "--allow-origin", metavar="ORIGIN", multiple=True, cls=SectionOption,
    help="Let web pages and apps with this origin use the server, such as http://localhost:3000. Can be"
    " repeated.",
)  # fmt: skip
@click.option(
    "--idle-unload", default=300.0, type=click.FloatRange(0.0), metavar="SECONDS",
    cls=SectionOption,
    help="Unload a model that was not used for this long; 0 keeps models loaded. [default: 300]",
)  # fmt: skip
@click.option(
    "--max-waiting", default=16, type=click.IntRange(0, 1000), metavar="N",
    cls=SectionOption,
    help="Number of requests that may wait for each model. More get an error. [default: 16]",
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

    Programs that can use OpenAI's API work with the address http://127.0.0.1:11435/v1 and any API key. Those
    for Anthropic's or Ollama's API use http://127.0.0.1:11435. A request can name any model that `edgespec
    models list` shows on this machine. edgespec loads it, and unloads others if memory is short. --target is
    the model for requests that name none.

    Settings such as --temperature apply to requests that do not set them. Press Ctrl-C to stop.
    """
    if chat:
        words, chat_port = chat_words(ctx, ctx.obj), DEFAULT_CHAT_PORT if port is None else port
        interruptible(lambda stop: serve_chat(stop, words, chat_port, options["api_key"], as_json=as_json))
        return DONE
    options["port"] = 11435 if port is None else port
    interruptible(lambda stop: _serve(stop, as_json, options))
    return DONE


def _serve(stop: Stop, as_json: bool, options: dict[str, Any]) -> None:
    from edgespec.server.http_server import HttpServer
    from edgespec.server.settings import ServerSettings

    settings = ServerSettings(
        target=options["target"],
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
            click.echo(f"Serving {settings.target} at {server.url}")
            click.echo(f"For programs that use OpenAI's API: {server.url}/v1")
            click.echo(f"For programs that use Anthropic's or Ollama's API: {server.url}")
            click.echo("Press Ctrl-C to stop.")
        sys.stdout.flush()

    # Stopping the server is not a failure, even before it is ready.
    with _log_on_stderr(), suppress(CancelledError):
        server.run(on_ready)


class _Printable(logging.Formatter):
    """Formats log lines and removes control characters, because requests can contain them."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


@contextmanager
def _log_on_stderr() -> Iterator[None]:
    """Write the server's log to stderr only, until the `with` block ends."""
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
