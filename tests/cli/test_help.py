"""Help texts: examples parse, defaults are correct, and every option is explained."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from edgespec import SamplingParams, __version__
from edgespec.cli.help import COMMANDS, HelpfulCommand, HelpfulGroup
from edgespec.cli.options import (
    METHOD_NAMES,
    METHODS,
    MODEL_NAMES,
    PREFIX_CACHE_NAMES,
    SAMPLING_NAMES,
    WORKER_NAMES,
)
from edgespec.cli.program import OLLAMA_COMMANDS, program
from edgespec.options.methods import method_names
from edgespec.options.presets import Preset, write_preset
from edgespec.options.settings import LOAD_OPTIONS, MODEL_OPTIONS
from tests.cli.conftest import Run, one_line_error


def all_commands() -> Iterator[tuple[str, HelpfulCommand | HelpfulGroup]]:
    """Every command with its path, the program itself included."""
    yield "", program
    for name in COMMANDS:
        command = program.get_command(click.Context(program), name)
        assert isinstance(command, HelpfulCommand | HelpfulGroup)
        yield name, command
        if isinstance(command, HelpfulGroup):
            for inner, leaf in command.commands.items():
                assert isinstance(leaf, HelpfulCommand)
                yield f"{name} {inner}", leaf


ALL = dict(all_commands())
EXAMPLES = [(path, example) for path, command in ALL.items() for example in command.examples]


def options_of(path: str) -> dict[str, click.Option]:
    """The options of a command by parameter name."""
    return {p.name: p for p in ALL[path].params if isinstance(p, click.Option) and p.name}


def defaults_of(path: str) -> dict[str, object]:
    """Return the default values of a command's parameters."""
    return ALL[path].make_context(path, [], resilient_parsing=True).params


def test_examples_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CONFIG_DIR", str(tmp_path))
    write_preset(Preset("reviewer", {"system": "You review code."}))
    for path, example in EXAMPLES:
        try:
            parse(path, example)
        except click.ClickException as error:
            pytest.fail(f"{example}: {error}")


def parse(path: str, example: str) -> None:
    words = shlex.split(example.rpartition("|")[2])
    assert words[0] == "edgespec"
    assert " ".join(words[1:]).startswith(path)
    command: click.Command = program
    context: click.Context | None = None
    arguments = words[1:]
    while isinstance(command, click.Group) and (arguments or not command.invoke_without_command):
        context = command.make_context(
            command.name, arguments[:0] or ["--"], parent=context, resilient_parsing=True
        )
        found = command.get_command(context, arguments[0])
        assert found is not None
        command, arguments = found, arguments[1:]
    command.make_context(command.name, arguments, parent=context)


def test_every_command_shows_examples_before_options(run: Run) -> None:
    for path, command in ALL.items():
        text = run(*path.split(), "--help").stdout
        assert command.examples, path
        assert text.index("Examples:") < text.index("Options:"), path
        for example in command.examples:
            assert f"  {example}\n" in text
        assert all(len(line) <= 100 for line in text.splitlines()), path


def test_every_option_is_explained() -> None:
    for path in ALL:
        for name, option in options_of(path).items():
            assert option.help, (path, name)
            assert option.help.endswith((".", "]")), (path, name)


@pytest.mark.parametrize("path", ["chat", "generate", "verify"])
def test_model_options_have_the_declared_defaults(path: str) -> None:
    declared = {**MODEL_OPTIONS, **LOAD_OPTIONS}
    defaults = defaults_of(path)
    # A chat saves replies unless the user opts out; single commands save nothing by default.
    wanted = {name: declared[name].default for name in MODEL_NAMES} | {"remember": path == "chat"}
    for name in MODEL_NAMES:
        assert defaults[name] == wanted[name], name


@pytest.mark.parametrize(("path", "keep"), [("chat", "disk"), ("generate", "memory")])
def test_only_a_chat_caches_prefixes_on_disk(path: str, keep: str) -> None:
    defaults = defaults_of(path)
    wanted = {name: LOAD_OPTIONS[name].default for name in PREFIX_CACHE_NAMES} | {"prefix_cache": keep}
    assert {name: defaults[name] for name in PREFIX_CACHE_NAMES} == wanted


def test_every_option_of_load_is_on_the_command_line() -> None:
    named = {*MODEL_NAMES, *WORKER_NAMES, *PREFIX_CACHE_NAMES, *METHOD_NAMES}
    api_only = {name for name, option in LOAD_OPTIONS.items() if option.api_only}
    assert named | api_only == {*MODEL_OPTIONS, *LOAD_OPTIONS}


def test_sampling_options_are_those_of_the_api() -> None:
    assert SamplingParams.names() == SAMPLING_NAMES
    defaults, options = defaults_of("generate"), options_of("generate")
    for name in SAMPLING_NAMES:
        assert defaults[name] == getattr(SamplingParams(), name), name
        assert f"--{name.replace('_', '-')}" in options[name].opts


def test_every_drafter_is_offered() -> None:
    method = options_of("generate")["method"]
    assert method.help is not None
    for name in method_names():
        assert name in METHODS
        assert re.search(rf"\b{name}\b", method.help), name


def test_version(run: Run) -> None:
    assert run("--version").stdout == f"edgespec {__version__}\n"


@pytest.mark.parametrize("args", [[], ["models"]])
def test_without_a_command_the_help_is_shown(run: Run, args: list[str]) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert "Examples:" in result.stderr


def test_unknown_command_names_the_nearest(run: Run) -> None:
    one_line_error(run("generat"), 2, "'generate'", code="option_invalid")
    one_line_error(run("models", "lits"), 2, "'list'", code="option_invalid")
    one_line_error(run("runn", "demo"), 2, "'run demo'", code="option_invalid")


def test_ollama_commands_get_suggestions(run: Run) -> None:
    for typed, suggested in OLLAMA_COMMANDS.items():
        one_line_error(run(typed), 2, f"did you mean {suggested!r}?", code="option_invalid")
        if not suggested.startswith("-"):
            assert run(*suggested.split()[: 1 if "--" in suggested else 2], "--help").exit_code == 0
    one_line_error(run("chat", "llama3.2", "hello"), 2, "generate --target", code="option_invalid")
    one_line_error(run("models", "rm", "llama3.2"), 2, "'remove llama3.2'", code="option_invalid")
    one_line_error(run("ps"), 2, "api/ps", code="option_invalid")
    one_line_error(run("generate", "--model", "demo", "hi"), 2, "--target", code="option_unknown")
    one_line_error(run("zzz"), 2, "commands", code="option_invalid")


@pytest.mark.parametrize("command", ["bench", "plan", "tune", "verify"])
def test_a_model_without_an_option_is_an_error_that_names_the_option(run: Run, command: str) -> None:
    one_line_error(run(command, "llama3.2"), 2, "--target llama3.2", code="option_invalid")


def test_unknown_option_names_the_nearest(run: Run) -> None:
    one_line_error(run("generate", "--tempreature", "1", "hi"), 2, "--temperature", code="option_unknown")
    one_line_error(run("doctor", "--qqqqqq"), 2, "--help", code="option_unknown")
