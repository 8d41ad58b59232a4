"""The programs that `edgespec launch` can configure, and their configurations."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from edgespec.errors import ConfigurationError
from edgespec.system.files import home_folder

__all__ = ["CLIENTS", "DEFAULT_URL", "Client", "Server"]

DEFAULT_URL = "http://127.0.0.1:11435"


@dataclass(frozen=True)
class Server:
    """The server that a program should use.

    Attributes:
        url: The server's address, without a path.
        model: The model that the program should name.
        key: The API key. A placeholder if the server needs none, because many programs require a key.
        context_tokens: The model's context length, which tells agents when to shorten the conversation. None
            if the server is not running.
    """

    url: str
    model: str
    key: str
    context_tokens: int | None = None


@dataclass(frozen=True)
class Client:
    """A program that can use the server.

    Attributes:
        about: A short description for the list of programs.
        configuration: Returns the text of the configuration.
        use: What to do once the configuration is in place. `{path}` stands for the configuration file.
        path: Returns the path of the configuration file. None if there is no such file, or if edgespec cannot
            edit it without risking the user's other settings.
        shared: Whether the file is a list with entries of the user's own, to which edgespec adds one.
    """

    about: str
    configuration: Callable[[Server], str]
    use: str
    path: Callable[[], Path] | None = None
    shared: bool = False


def _in_home(name: str, variable: str = "", default: str = "") -> Callable[[], Path]:
    """Return a function that returns a path in the folder given by `variable`, or in the home folder."""

    def path() -> Path:
        if variable and (folder := os.environ.get(variable)):
            return Path(folder) / name
        home = home_folder()
        if home is None:
            raise ConfigurationError("the home folder is unknown", "set the environment variable HOME")
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
    """Return lines of YAML, writing values as JSON, which is valid YAML."""
    return "".join(f"{name}: {json.dumps(value, ensure_ascii=False)}\n" for name, value in values.items())


def _openai(server: Server) -> str:
    return _exports({"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": server.key})


def _aider(server: Server) -> str:
    return _yaml(
        {
            "model": f"openai/{server.model}",
            "openai-api-base": f"{server.url}/v1",
            "openai-api-key": server.key,
            "show-model-warnings": False,
        }
    )


def _claude_code(server: Server) -> str:
    # Claude Code delegates some tasks to a smaller model. Use the same one for them, because loading a second
    # model would take more time than it saves.
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


def _codex(server: Server) -> str:
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


def _continue(server: Server) -> str:
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


def _llm(server: Server) -> str:
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


def _opencode(server: Server) -> str:
    model: dict[str, object] = {"name": server.model}
    if server.context_tokens:
        # opencode keeps this part of the context free for the reply.
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


def _zed(server: Server) -> str:
    return _json({"language_models": {"ollama": {"api_url": server.url}}})


CLIENTS: Mapping[str, Client] = {
    "openai": Client(
        "programs with OpenAI's library, by environment variables",
        _openai,
        'run eval "$(edgespec launch openai)" in the shell from which you start the program',
    ),
    "llm": Client(
        "Simon Willison's command line for language models",
        _llm,
        "run llm -m edgespec 'How do I list files by size?'",
        _llm_path,
        shared=True,
    ),
    "aider": Client(
        "pair programming in the terminal",
        _aider,
        "run aider --config {path}",
        _in_home(".aider.edgespec.yml"),
    ),
    "claude-code": Client(
        "Anthropic's coding agent",
        _claude_code,
        "run claude --settings {path}",
        _in_home("edgespec.json", "CLAUDE_CONFIG_DIR", ".claude"),
    ),
    "codex": Client(
        "OpenAI's coding agent",
        _codex,
        "run codex --profile edgespec",
        _in_home("edgespec.config.toml", "CODEX_HOME", ".codex"),
    ),
    "opencode": Client(
        "open coding agent in the terminal",
        _opencode,
        "run OPENCODE_CONFIG={path} opencode",
        _in_home("opencode/edgespec.json", "XDG_CONFIG_HOME", ".config"),
    ),
    "continue": Client(
        "coding assistant in VS Code, JetBrains and the terminal",
        _continue,
        "choose the model edgespec in Continue, or run cn --config {path}",
        _in_home("models/edgespec.yaml", "CONTINUE_GLOBAL_DIR", ".continue"),
    ),
    "zed": Client(
        "editor with an agent",
        _zed,
        "add this to Zed's settings (command palette: `zed: open settings`), which lists the server's models"
        " under Ollama. If the server needs an API key, enter it in Zed's settings for Ollama",
    ),
}
"""The programs, by name."""
