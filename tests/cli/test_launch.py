"""`edgespec launch`: the configurations work with real programs, and no user file is lost."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import yaml

from edgespec.cli.launch import CLIENTS
from edgespec.server.http_server import HttpServer
from tests.cli.conftest import Run, one_line_error
from tests.server.conftest import MESSAGES, QUESTION, running

OTHERS = "- model_id: other  # My own.\n  model_name: x\n  api_base: http://localhost:1/v1"
FILES = [name for name, client in CLIENTS.items() if client.path]


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    """A server that demands a key."""
    options = {"max_tokens": 24, "temperature": 0.0}
    with running(load_options={"context": 512}, reply_options=options, api_key="secret key") as server:
        yield server


@pytest.fixture
def connection(server: HttpServer) -> list[str]:
    """The options that name the server."""
    return ["--url", server.url, "--api-key", "secret key"]


def test_llm_runs_with_the_written_configuration(
    run: Run, server: HttpServer, connection: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path / "llm"))
    path = tmp_path / "llm" / "extra-openai-models.yaml"
    path.parent.mkdir()
    path.write_text(OTHERS)
    result = run("launch", "llm", "--write", *connection)
    assert result.exit_code == 0, result.output
    assert path.with_name("extra-openai-models.yaml.bak").read_text() == OTHERS

    def llm(*arguments: str) -> str:
        command = [sys.executable, "-m", "llm", *arguments]
        ended = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, timeout=60, stdin=subprocess.DEVNULL
        )
        return ended.stdout.strip()

    assert {"edgespec", "other"} <= {line.split(": ")[-1] for line in llm("models", "list").splitlines()}
    headers = {"Authorization": "Bearer secret key"}
    whole = httpx.post(
        f"{server.url}/v1/chat/completions", json={"messages": MESSAGES}, headers=headers, timeout=60
    )
    expected = whole.json()["choices"][0]["message"]["content"].strip()
    assert llm("-m", "edgespec", QUESTION) == expected
    assert llm("-m", "edgespec", "--no-stream", QUESTION) == expected
    assert isinstance(json.loads(llm("-m", "edgespec", "--schema", "hidden bool", QUESTION))["hidden"], bool)


def test_openais_library_reads_the_printed_variables(
    run: Run, connection: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    exports = run("launch", "openai", *connection).stdout
    shell = subprocess.run(
        ["sh", "-c", f'{exports}printf "%s\n%s" "$OPENAI_BASE_URL" "$OPENAI_API_KEY"'],
        capture_output=True,
        text=True,
        check=True,
    )
    url, key = shell.stdout.splitlines()
    monkeypatch.setenv("OPENAI_BASE_URL", url)
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with openai.OpenAI() as client:
        assert client.models.retrieve("demo").id == "demo"


@pytest.mark.parametrize("name", [name for name in CLIENTS if name != "openai"])
def test_configurations_name_the_server_and_its_model(run: Run, name: str, connection: list[str]) -> None:
    result = run("launch", name, *connection)
    assert result.exit_code == 0, result.output
    text = result.stdout
    parse = {
        "codex": tomllib.loads,
        "claude-code": json.loads,
        "zed": json.loads,
        "opencode": json.loads,
    }.get(name, yaml.safe_load)
    values = json.dumps(parse(text))
    assert connection[1] in values
    if name != "zed":  # It asks the server for the models, and its settings cannot contain a key.
        assert "demo" in values
        assert "secret key" in values


@pytest.mark.long
@pytest.mark.parametrize("name", ["claude-code", "codex", "continue", "opencode"])
def test_agents_know_the_context_length(run: Run, name: str, connection: list[str]) -> None:
    """Otherwise, they would shorten the conversation too late, or not at all."""
    setting = re.compile(r'(?:ontext\w*|WINDOW)"? ?[:=] "?512\b')
    assert setting.search(run("launch", name, *connection).stdout)
    assert setting.search(run("launch", name, "--model", "demo", *connection).stdout)
    assert not setting.search(run("launch", name, "--model", "other", *connection).stdout)


@pytest.mark.parametrize("name", FILES)
def test_written_files_are_private_and_old_ones_are_copied(run: Run, own_home: Path, name: str) -> None:
    def write(model: str) -> str:
        result = run("launch", name, "--write", "--model", model)
        assert result.exit_code == 0, result.output
        return result.output

    for variable in (
        "LLM_USER_PATH",
        "CODEX_HOME",
        "CLAUDE_CONFIG_DIR",
        "CONTINUE_GLOBAL_DIR",
        "XDG_CONFIG_HOME",
    ):
        assert variable not in os.environ
    get_path = CLIENTS[name].path
    assert get_path
    path = get_path()
    assert path.is_relative_to(own_home)
    assert f"Wrote {path}" in write("first")
    assert path.stat().st_mode & 0o077 == 0
    first = path.read_text()
    assert "already has this configuration" in write("first")
    assert [each.name for each in path.parent.iterdir() if each.is_file()] == [path.name]
    assert f"{path.name}.bak." in write("second")
    assert "first" not in path.read_text()
    assert f"{path.name}.bak2." in write("third")
    assert path.with_name(f"{path.name}.bak").read_text() == first


def test_links_to_configurations_stay(run: Run, own_home: Path, tmp_path: Path) -> None:
    real = tmp_path / "dotfiles.yml"
    real.write_text("model: mine\n")
    (own_home / ".aider.edgespec.yml").symlink_to(real)
    assert run("launch", "aider", "--write", "--model", "demo").exit_code == 0
    assert (own_home / ".aider.edgespec.yml").is_symlink()
    assert "openai/demo" in real.read_text()


def test_programs_are_listed(run: Run) -> None:
    assert all(name in run("launch").stdout for name in CLIENTS)


def test_json(run: Run, own_home: Path, connection: list[str]) -> None:
    listed = json.loads(run("launch", "--json").stdout)["programs"]
    assert [each["name"] for each in listed] == list(CLIENTS)
    shown = json.loads(run("launch", "aider", *connection, "--json").stdout)
    assert shown["configuration"] == run("launch", "aider", *connection).stdout
    path = own_home / ".aider.edgespec.yml"
    assert (shown["path"], shown["changed"], shown["model"]) == (str(path), False, "demo")
    assert not path.exists()
    for model, changed, copy in (("one", True, None), ("one", False, None), ("two", True, f"{path}.bak")):
        written = json.loads(run("launch", "aider", "--write", "--model", model, "--json").stdout)
        assert (written["changed"], written["copy"], written["path"]) == (changed, copy, str(path))
        assert path.read_text() == written["configuration"]
    assert json.loads(run("launch", "zed", "--model", "demo", "--json").stdout)["path"] is None


def test_mistakes_are_explained(run: Run, server: HttpServer) -> None:
    nowhere = "http://127.0.0.1:1"
    for url in (nowhere, "nonsense"):
        one_line_error(run("launch", "llm", "--url", url), 1, url, code="server_not_found")
    one_line_error(run("launch", "llm", "--url", server.url), 1, "--api-key", code="api_key_missing")
    one_line_error(run("launch", "zed", "--write"), 2, "--write", "zed", code="option_invalid")
    one_line_error(run("launch", "--write"), 2, "--write", code="option_invalid")
    assert "'emacs' is not one of" in run("launch", "emacs").stderr
