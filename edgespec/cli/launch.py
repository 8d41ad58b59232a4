"""`edgespec launch`: configure a program to use a running `edgespec serve`."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click

from edgespec.cli.clients import CLIENTS, DEFAULT_URL, Server
from edgespec.cli.help import HelpfulCommand
from edgespec.cli.screen import note, print_table, printable, write_text
from edgespec.errors import ConfigurationError, EdgespecError, OptionError
from edgespec.files import write_private_file

__all__ = ["command"]

_CONNECT_SECONDS = 5.0
# Comment lines that mark our entry among the user's entries.
_BEGIN, _END = "# begin: written by edgespec launch\n", "# end: written by edgespec launch\n"


@click.command(
    "launch",
    cls=HelpfulCommand,
    short_help="Configure an editor, agent or script to use the server.",
    examples=(
        "edgespec launch",
        "edgespec launch codex",
        "edgespec launch llm --write",
        "edgespec launch aider --url http://192.168.1.20:11435 --api-key my-secret",
    ),
)
@click.argument("client", type=click.Choice(list(CLIENTS)), required=False)
@click.option(
    "--write", is_flag=True,
    help="Write the configuration to the program's file instead of printing it. A file that it changes is"
    " copied first.",
)  # fmt: skip
@click.option(
    "--model", metavar="NAME",
    help="The model to use. [default: the running server's own model]",
)  # fmt: skip
@click.option(
    "--url", default=DEFAULT_URL, metavar="URL",
    help=f"The server's address. [default: {DEFAULT_URL}]",
)  # fmt: skip
@click.option(
    "--api-key", metavar="KEY", envvar="EDGESPEC_API_KEY",
    help="The server's API key, if it needs one. The environment variable EDGESPEC_API_KEY also sets it.",
)  # fmt: skip
def command(client: str | None, write: bool, model: str | None, url: str, api_key: str | None) -> None:
    """Print the configuration that lets a program use `edgespec serve`. With --write, save it to a file.

    Without a program, list the supported programs. Start the server first, or pass --model.
    """
    if client is None:
        if write:
            raise OptionError("--write needs a program", f"name one of {', '.join(CLIENTS)}")
        print_table(("program", "what it is"), [(name, each.about) for name, each in CLIENTS.items()])
        return
    chosen, url = CLIENTS[client], url.rstrip("/").removesuffix("/v1")
    path = chosen.path() if chosen.path else None
    use = chosen.use.format(path=shlex.quote(str(path)))
    if write and path is None:
        raise OptionError(f"--write cannot configure {client}", f"without --write, {use}")
    text = chosen.configuration(_server(url, model, api_key))
    if write and path:
        _write(path, text, chosen.shared)
        click.echo(printable(f"To use it, {use}"))
        return
    write_text(text)
    if path:
        note(f"to save this as {path}, add --write")
    note(f"to use it, {use}")


def _server(url: str, model: str | None, api_key: str | None) -> Server:
    """Return the server to use, with its model and context length if it runs.

    Args:
        url: Its address.
        model: The model to use. None for the one that the server uses for requests that name none.
        api_key: Its API key.

    Raises:
        EdgespecError: The server does not answer, although `model` is None.
    """
    import httpx2

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    key = api_key or "edgespec"
    try:
        # Do not use a proxy, because it cannot reach a server on this machine.
        reply = httpx2.get(f"{url}/v1/models", headers=headers, timeout=_CONNECT_SECONDS, trust_env=False)
        if reply.status_code == 401:
            raise EdgespecError(f"the server at {url} needs an API key", "pass --api-key")
        known = reply.raise_for_status().json()["data"]
        chosen = next(each for each in known if model in (None, each["id"]))
        return Server(url, str(chosen["id"]), key, chosen["meta"]["n_ctx"])
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, LookupError, TypeError, StopIteration) as error:
        if model is not None:
            return Server(url, model, key)
        raise EdgespecError(
            f"no edgespec server answers at {url}",
            "start it with `edgespec serve`, or pass its address with --url or the model with --model",
        ) from error


def _write(path: Path, text: str, shared: bool) -> None:
    """Write a configuration and say so. Keep a copy of the file if it had other contents.

    Args:
        path: The file.
        text: The configuration.
        shared: Whether to keep the other entries of the file.
    """
    try:
        old = path.read_text("utf-8") if path.exists() else ""
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not a UTF-8 text file", "move it elsewhere") from error
    new = _with_entry(old, text) if shared else text
    if new == old:
        click.echo(f"{printable(str(path))} already has this configuration.")
        return
    if old:
        copy = _unused(path)
        write_private_file(copy, old.encode())
        click.echo(f"Copied the old {printable(str(path))} to {printable(copy.name)}.")
    # If the path is a symbolic link, for example to settings under version control, write to its target.
    write_private_file(path.resolve(), new.encode())
    click.echo(f"Wrote {printable(str(path))}.")


def _with_entry(old: str, entry: str) -> str:
    """Append our entry to a YAML list, replacing our earlier entry."""
    others = re.sub(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", "", old, flags=re.DOTALL)
    if others and not others.endswith("\n"):
        others += "\n"
    return f"{others}{_BEGIN}{entry}{_END}"


def _unused(path: Path) -> Path:
    """Return an unused name for a copy of a file."""
    number, copy = 1, path.with_name(f"{path.name}.bak")
    while copy.exists():
        number += 1
        copy = path.with_name(f"{path.name}.bak{number}")
    return copy
