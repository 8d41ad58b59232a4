"""`edgespec launch`: configure a program to use a running `edgespec serve`."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import click

from edgespec.cli.clients import CLIENTS, DEFAULT_URL, Server
from edgespec.cli.help import HelpfulCommand
from edgespec.cli.options import json_option
from edgespec.cli.screen import note, print_json, print_table, printable, write_text
from edgespec.errors import ConfigurationError, EdgespecError, OptionError
from edgespec.system.files import write_private_file

__all__ = ["command"]

_CONNECT_SECONDS = 5.0
# Comment lines that delimit edgespec's entry in the user's file.
_BEGIN, _END = "# begin: written by edgespec launch\n", "# end: written by edgespec launch\n"


@click.command(
    "launch",
    cls=HelpfulCommand,
    short_help="Set up an editor, agent or script to use edgespec's server.",
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
@json_option
def command(
    client: str | None, write: bool, model: str | None, url: str, api_key: str | None, as_json: bool
) -> None:
    """Print the configuration that lets a program use `edgespec serve`. With --write, save it to a file.

    Without a program, list the supported programs. Start the server first, or pass --model.
    """
    if client is None:
        if write:
            raise OptionError("--write needs a program", f"name one of {', '.join(CLIENTS)}")
        _list(as_json)
        return
    chosen, url = CLIENTS[client], url.rstrip("/").removesuffix("/v1")
    path = chosen.path() if chosen.path else None
    use = chosen.use.format(path=shlex.quote(str(path)))
    if write and path is None:
        raise OptionError(f"--write cannot configure {client}", f"without --write, {use}")
    server = _server(url, model, api_key)
    text = chosen.configuration(server)
    written = _write(path, text, chosen.shared) if write and path else None
    if as_json:
        print_json(
            {
                "program": client,
                "url": server.url,
                "model": server.model,
                "configuration": text,
                "path": path and str(path),
                "changed": written is not None and written.changed,
                "copy": written and written.copy and str(written.copy),
                "use": use,
            }
        )
        return
    if written:
        for line in written.lines:
            click.echo(printable(line))
        click.echo(printable(f"To use it, {use}"))
        return
    write_text(text)
    if path:
        note(f"to save this as {path}, add --write")
    note(f"to use it, {use}")


def _list(as_json: bool) -> None:
    if as_json:
        print_json({"programs": [{"name": name, "about": each.about} for name, each in CLIENTS.items()]})
    else:
        print_table(("program", "what it is"), [(name, each.about) for name, each in CLIENTS.items()])


def _server(url: str, model: str | None, api_key: str | None) -> Server:
    """Return the server to use, with its model and context length if the server is running.

    Args:
        url: The server's address.
        model: The model to use. None for the server's default model.
        api_key: The server's API key.

    Raises:
        EdgespecError: `model` is None, and the server does not answer.
    """
    import httpx2

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    key = api_key or "edgespec"
    try:
        # Do not use a proxy, because it cannot reach a server on this machine.
        reply = httpx2.get(f"{url}/v1/models", headers=headers, timeout=_CONNECT_SECONDS, trust_env=False)
        if reply.status_code == 401:
            raise EdgespecError(
                f"the server at {url} needs an API key", "pass --api-key", code="api_key_missing"
            )
        known = reply.raise_for_status().json()["data"]
        chosen = next(each for each in known if model in (None, each["id"]))
        return Server(url, str(chosen["id"]), key, chosen["meta"]["n_ctx"])
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, LookupError, TypeError, StopIteration) as error:
        if model is not None:
            return Server(url, model, key)
        raise EdgespecError(
            f"no edgespec server answers at {url}",
            "start it with `edgespec serve`, or pass its address with --url or the model with --model",
            code="server_not_found",
        ) from error


class _Written(NamedTuple):
    """A written configuration file, whether it changed, and the backup of its old contents, if any."""

    path: Path
    changed: bool
    copy: Path | None = None

    @property
    def lines(self) -> list[str]:
        """Lines that tell the user what was written."""
        if not self.changed:
            return [f"{self.path} already has this configuration."]
        copied = [f"Copied the old {self.path} to {self.copy.name}."] if self.copy else []
        return [*copied, f"Wrote {self.path}."]


def _write(path: Path, text: str, shared: bool) -> _Written:
    """Write a configuration, keeping a backup if the file had different contents.

    Args:
        path: The file.
        text: The configuration.
        shared: Whether to keep the file's other entries.
    """
    try:
        old = path.read_text("utf-8-sig") if path.exists() else ""
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{path} is not a UTF-8 text file", "move it elsewhere", code="invalid_encoding"
        ) from error
    new = _with_entry(old, text) if shared else text
    if new == old:
        return _Written(path, changed=False)
    copy = _unused(path) if old else None
    if copy:
        write_private_file(copy, old.encode())
    # If the path is a symbolic link, for example to settings under version control, write to its target.
    write_private_file(path.resolve(), new.encode())
    return _Written(path, changed=True, copy=copy)


def _with_entry(old: str, entry: str) -> str:
    """Append edgespec's entry to a YAML list, replacing an earlier version of the entry."""
    others = re.sub(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", "", old, flags=re.DOTALL)
    if others and not others.endswith("\n"):
        others += "\n"
    return f"{others}{_BEGIN}{entry}{_END}"


def _unused(path: Path) -> Path:
    """Return an unused name for a backup of a file."""
    number, copy = 1, path.with_name(f"{path.name}.bak")
    while copy.exists():
        number += 1
        copy = path.with_name(f"{path.name}.bak{number}")
    return copy
