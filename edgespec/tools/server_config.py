"""Load the user's MCP servers from `tools.toml`, which is next to the settings file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from edgespec.errors import ConfigurationError
from edgespec.options.settings_file import error_at, quoted, read_text, write_value
from edgespec.system.files import config_folder
from edgespec.system.spelling import nearest

__all__ = ["ServerConfig", "allow_always", "read_servers", "servers_path"]

# Server names must not contain underscores, because the model sees tool names of the form SERVER_TOOL, in
# which the first underscore ends the server name.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,31}")
_MAX_TIMEOUT_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """A configured MCP server: a command that starts it, or the URL of a running server.

    Attributes:
        name: The user's name for the server.
        command: The program to start. Empty if `url` is set.
        args: Arguments of the program.
        env: Environment variables of the program, in addition to basic ones such as PATH.
        url: Address of a server that speaks Streamable HTTP. Empty if `command` is set.
        headers: HTTP headers to send with every request.
        timeout: Maximum duration of a call in seconds.
        allow: Names of tools that can run without the user's confirmation.
    """

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 60.0
    allow: tuple[str, ...] = ()


_KEYS = tuple(each.name for each in fields(ServerConfig) if each.name != "name")


def servers_path() -> Path:
    """Return the path of `tools.toml`. The file may not exist."""
    return config_folder() / "tools.toml"


def read_servers() -> tuple[ServerConfig, ...]:
    """Return the user's servers.

    Raises:
        ConfigurationError: The file is unreadable, or contains an unknown key or an invalid value.
    """
    path = servers_path()
    text = read_text(path)
    return () if text is None else tuple(_server(path, text, *item) for item in tomllib.loads(text).items())


def _server(path: Path, text: str, name: str, table: Any) -> ServerConfig:
    def refuse(problem: str, next_step: str, *key: str) -> ConfigurationError:
        return error_at(path, text, (name, *key), problem, next_step)

    if not isinstance(table, dict):
        raise refuse(
            f"the setting {name[:60]!r} is not in a section",
            "put each server's settings in a section of its own, such as [files]",
        )
    if not _NAME.fullmatch(name):
        raise refuse(f"{name[:60]!r} is not a valid server name", "use up to 32 letters, digits and hyphens")
    for key, value in table.items():
        if key not in _KEYS:
            near = nearest(key, _KEYS)
            known = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(_KEYS)}"
            raise refuse(f"servers have no setting {key[:60]!r}", known, key)
        if problem := _problem(key, value):
            raise refuse(f"{key} must be {problem}, not {str(value)[:60]!r}", "correct this line", key)
    if bool(table.get("command")) == bool(table.get("url")):
        raise refuse(
            f"the server {name} needs either `command` or `url`, but not both",
            'write a line such as command = "npx"',
        )
    unused = ("headers",) if table.get("command") else ("args", "env")
    for key in unused:
        if key in table:
            kind = "command" if table.get("command") else "url"
            raise refuse(
                f"{key} has no effect for a server that is set up with `{kind}`", "remove this line", key
            )
    lists = {key: tuple(table[key]) for key in ("args", "allow") if key in table}
    return ServerConfig(name, **{**table, **lists})


def _problem(key: str, value: Any) -> str:
    if key in ("args", "allow"):
        valid = isinstance(value, list) and all(isinstance(each, str) for each in value)
        return "" if valid else "a list of strings"
    if key in ("env", "headers"):
        valid = isinstance(value, dict) and all(isinstance(each, str) for each in value.values())
        return "" if valid else "a table of strings"
    if key == "timeout":
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return "" if is_number and 0 < value <= _MAX_TIMEOUT_SECONDS else "a number of seconds up to 3600"
    if key == "url":
        return "" if isinstance(value, str) and _is_http(value) else "an http or https address"
    return "" if isinstance(value, str) and "\0" not in value else "a string"


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        return False


def allow_always(server: str, tool: str) -> None:
    """Add a tool to the server's `allow` list, so that it can run without the user's confirmation.

    Raises:
        ConfigurationError: `tools.toml` cannot be changed.
    """
    allowed = next((config.allow for config in read_servers() if config.name == server), ())
    if tool not in allowed:
        names = ", ".join(map(quoted, (*allowed, tool)))
        write_value(servers_path(), (server, "allow"), f"[{names}]")
