"""What the README shows works as shown."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from edgespec.cli.program import program

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^ {4}(?:[^|\n]*\| )?edgespec ([^|#\n]*)", README, re.MULTILINE)
SHOWN = re.findall(r"`(edgespec \w+ [^`]*|scripts/[^` ]+[^`]*)`", README)


def test_there_are_commands_to_try() -> None:
    assert len(COMMANDS) >= 8
    assert len(SHOWN) >= 5


@pytest.mark.parametrize("line", [*COMMANDS, *(s.removeprefix("edgespec ") for s in SHOWN if s[0] == "e")])
def test_a_command_parses(line: str) -> None:
    arguments = shlex.split(line)
    command: click.Command = program
    context: click.Context | None = None
    while isinstance(command, click.Group) and (arguments or not command.invoke_without_command):
        context = command.make_context("edgespec", ["--"], parent=context, resilient_parsing=True)
        found = command.get_command(context, arguments.pop(0))
        assert found is not None
        command = found
    command.make_context(command.name, arguments, parent=context)


@pytest.mark.parametrize("line", ["scripts/chat", "scripts/test", *(s for s in SHOWN if s[0] == "s")])
def test_a_script_is_there(line: str) -> None:
    path = ROOT / line.split()[0]
    assert path.stat().st_mode & 0o111, f"{path} cannot be run"
    for option in re.findall(r"--[a-z-]+", line):
        assert f'"{option}"' in path.read_text(encoding="utf-8")


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert len(capsys.readouterr().out) > 20


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
