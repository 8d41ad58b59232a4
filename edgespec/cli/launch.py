"""`edgespec launch`: configure a program to use a running `edgespec serve`.

`CLIENTS` holds the supported programs and their configurations.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import click

from edgespec.cli.help import HelpfulCommand
from edgespec.cli.options import json_option
from edgespec.cli.screen import note, print_json, print_table, printable, write_text
from edgespec.errors import ConfigurationError, EdgespecError, OptionError
from edgespec.system.files import home_folder, write_private_file

__all__ = ["CLIENTS", "command"]

_CONNECT_SECONDS = 5.0
# Comment lines that delimit edgespec's entry in the user's file.
_BEGIN, _END = "# begin: written by edgespec launch\n", "# end: written by edgespec launch\n"
_DEFAULT_URL = "http://127.0.0.1:11435"


@dataclass(frozen=True)
class _Server:
    """The server that a program should use.

    Attributes:
        url: The server's address, without a path.
        model: The model that the program should request.
        key: The API key. A placeholder if the server needs none, because many programs require a key.
        context_tokens: The model's context length, which tells agents when to shorten the conversation. None
            if the server is not running.
    """

    url: str
    model: str
    key: str
    context_tokens: int | None = None


@dataclass(frozen=True)
class _Client:
    """A program that can use the server.

    Attributes:
        about: A short description for the list of programs.
        configuration: Returns the text of the configuration.
        use: How to use the program once it is configured. `{path}` stands for the configuration file.
        path: Returns the path of the configuration file. None if there is no such file, or if edgespec cannot
            edit it without risking the user's other settings.
        shared: Whether the file is a list to which edgespec adds one entry. The user's own entries are kept.
    """

    about: str
    configuration: Callable[[_Server], str]
    use: str
    path: Callable[[], Path] | None = None
    shared: bool = False


def _in_home(name: str, variable: str = "", default: str = "") -> Callable[[], Path]:
    """Return a function that returns a path in the folder set by the environment variable `variable`.

    If the variable is not set, the path is in the home directory.
    """

    def path() -> Path:
        if variable and (folder := os.environ.get(variable)):
            return Path(folder) / name
        home = home_folder()
        if home is None:
            raise ConfigurationError(
                "cannot determine the home directory", "set the HOME environment variable"
            )
        return home / default / name

    return path


def _llm_path() -> Path:
    folder = os.environ.get("LLM_USER_PATH") or click.get_app_dir("io.datasette.llm")
    return Path(folder) / "extra-openai-models.yaml"


def _exports(variables: Mapping[str, str]) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _yaml(values: Mapping[str, object]) -> str:
    """Format a mapping as YAML. Each value is written as JSON, which is also valid YAML."""
    return "".join(f"{name}: {json.dumps(value, ensure_ascii=False)}\n" for name, value in values.items())


def _openai(server: _Server) -> str:
    return _exports({"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": server.key})


def _aider(server: _Server) -> str:
    return _yaml(
        {
            "model": f"openai/{server.model}",
            "openai-api-base": f"{server.url}/v1",
            "openai-api-key": server.key,
            "show-model-warnings": False,
        }
    )


def _claude_code(server: _Server) -> str:
    # Claude Code delegates some tasks to smaller models. Use the same model for all of them, because loading
    # a second one would take more time than it saves.
    sizes = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")))
    environment = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        **dict.fromkeys(sizes, server.model),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    if server.context_tokens:
        environment["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(server.context_tokens)
    return _json({"env": environment})


def _codex(server: _Server) -> str:
    from edgespec.options.settings_file import quoted

    context = f"model_context_window = {server.context_tokens}\n" if server.context_tokens else ""
    return (
        f"model = {quoted(server.model)}\n"
        f'{context}model_provider = "edgespec"\n\n'
        "[model_providers.edgespec]\n"
        'name = "edgespec"\n'
        f"base_url = {quoted(f'{server.url}/v1')}\n"
        'wire_api = "responses"\n'
        f"experimental_bearer_token = {quoted(server.key)}\n"
    )


def _continue(server: _Server) -> str:
    model: dict[str, object] = {
        "name": f"edgespec {server.model}",
        "provider": "openai",
        "model": server.model,
        "apiBase": f"{server.url}/v1",
        "apiKey": server.key,
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use"],
    }
    if server.context_tokens:
        model["defaultCompletionOptions"] = {"contextLength": server.context_tokens}
    return _yaml({"name": "edgespec", "version": "0.0.1", "schema": "v1", "models": [model]})


def _llm(server: _Server) -> str:
    first, *others = _yaml(
        {
            "model_id": "edgespec",
            "model_name": server.model,
            "api_base": f"{server.url}/v1",
            "headers": {"Authorization": f"Bearer {server.key}"},
            "supports_schema": True,
            "supports_tools": True,
        }
    ).splitlines()
    return "\n".join([f"- {first}", *(f"  {line}" for line in others)]) + "\n"


def _opencode(server: _Server) -> str:
    model: dict[str, object] = {"name": server.model}
    if server.context_tokens:
        # opencode reserves `output` tokens of the context for the reply.
        model["limit"] = {"context": server.context_tokens, "output": server.context_tokens // 4}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "edgespec",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": server.key},
        "models": {server.model: model},
    }
    name = f"edgespec/{server.model}"
    return _json(
        {
            "$schema": "https://opencode.ai/config.json",
            "model": name,
            "small_model": name,
            "provider": {"edgespec": provider},
        }
    )


def _zed(server: _Server) -> str:
    return _json({"language_models": {"ollama": {"api_url": server.url}}})


CLIENTS: Mapping[str, _Client] = {
    "openai": _Client(
        "programs that use OpenAI's library, configured by environment variables",
        _openai,
        'run eval "$(edgespec launch openai)" in the shell from which you start the program',
    ),
    "llm": _Client(
        "Simon Willison's command line for language models",
        _llm,
        "run llm -m edgespec 'How do I list files by size?'",
        _llm_path,
        shared=True,
    ),
    "aider": _Client(
        "pair programming in the terminal",
        _aider,
        "run aider --config {path}",
        _in_home(".aider.edgespec.yml"),
    ),
    "claude-code": _Client(
        "Anthropic's coding agent",
        _claude_code,
        "run claude --settings {path}",
        _in_home("edgespec.json", "CLAUDE_CONFIG_DIR", ".claude"),
    ),
    "codex": _Client(
        "OpenAI's coding agent",
        _codex,
        "run codex --profile edgespec",
        _in_home("edgespec.config.toml", "CODEX_HOME", ".codex"),
    ),
    "opencode": _Client(
        "open coding agent in the terminal",
        _opencode,
        "run OPENCODE_CONFIG={path} opencode",
        _in_home("opencode/edgespec.json", "XDG_CONFIG_HOME", ".config"),
    ),
    "continue": _Client(
        "coding assistant in VS Code, JetBrains and the terminal",
        _continue,
        "choose the model edgespec in Continue, or run cn --config {path}",
        _in_home("models/edgespec.yaml", "CONTINUE_GLOBAL_DIR", ".continue"),
    ),
    "zed": _Client(
        "editor with an agent",
        _zed,
        "add this to Zed's settings (command palette: `zed: open settings`), which lists the server's models"
        " under Ollama. If the server needs an API key, enter it in Zed's settings for Ollama",
    ),
}
"""The supported programs, keyed by name."""


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
    help="Write the configuration to the program's file instead of printing it. An existing file is backed"
         " up first.",
)  # fmt: skip
@click.option(
    "--model", metavar="NAME",
    help="The model to use. [default: the running server's own model]",
)  # fmt: skip
@click.option(
    "--url", default=_DEFAULT_URL, metavar="URL",
    help=f"The server's address. [default: {_DEFAULT_URL}]",
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

    Without a program, list the supported programs. Start the server first, or name the model with --model.
    """
    if client is None:
        if write:
            raise OptionError("--write needs the name of a program", f"choose one of {', '.join(CLIENTS)}")
        _list(as_json)
        return
    chosen, url = CLIENTS[client], url.rstrip("/").removesuffix("/v1")
    path = chosen.path() if chosen.path else None
    use = chosen.use.format(path=shlex.quote(str(path)))
    if write and path is None:
        raise OptionError(f"--write cannot configure {client}", f"omit --write, and {use}")
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


def _server(url: str, model: str | None, api_key: str | None) -> _Server:
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
        # Bypass proxies, because they cannot reach a server on this machine.
        reply = httpx2.get(f"{url}/v1/models", headers=headers, timeout=_CONNECT_SECONDS, trust_env=False)
        if reply.status_code == 401:
            raise EdgespecError(
                f"the server at {url} needs an API key", "pass --api-key", code="api_key_missing"
            )
        known = reply.raise_for_status().json()["data"]
        chosen = next(each for each in known if model in (None, each["id"]))
        return _Server(url, str(chosen["id"]), key, chosen["meta"]["n_ctx"])
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, LookupError, TypeError, StopIteration) as error:
        if model is not None:
            return _Server(url, model, key)
        raise EdgespecError(
            f"there is no edgespec server at {url}",
            "start one with `edgespec serve`, pass its address with --url, or name the model with --model",
            code="server_not_found",
        ) from error


class _Written(NamedTuple):
    path: Path
    changed: bool
    copy: Path | None = None

    @property
    def lines(self) -> list[str]:
        """Lines that tell the user what was written."""
        if not self.changed:
            return [f"{self.path} already has this configuration."]
        copied = [f"Backed up the old {self.path} as {self.copy.name}."] if self.copy else []
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
            f"cannot update {path}, because it is not a UTF-8 text file",
            "move it elsewhere, then try again",
            code="invalid_encoding",
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
    number, copy = 1, path.with_name(f"{path.name}.bak")
    while copy.exists():
        number += 1
        copy = path.with_name(f"{path.name}.bak{number}")
    return copy
