"""Commands, scripts, links and examples in the README and the documentation work as shown."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from edgespec.cli.program import program
from edgespec.options.presets import Preset, write_preset

ROOT = Path(__file__).parent.parent
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in (
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))}  # fmt: skip
TEXT = "\n".join(PAGES.values())
BLOCKS = re.findall(r"^ {4}(?:[^|\n]*\| )?edgespec ([^|#\n]*)", TEXT, re.MULTILINE)
INLINE = re.findall(r"`edgespec (\w[^`]*)`", TEXT)
SCRIPTS = re.findall(r"`(scripts/[^`]+)`", TEXT) + re.findall(r"^ {4}(scripts/[^#\n]+)", TEXT, re.MULTILINE)


@pytest.fixture
def _reviewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Create the preset that the documented commands use."""
    monkeypatch.setenv("EDGESPEC_CONFIG_DIR", str(tmp_path))
    write_preset(Preset("reviewer", {"system": "You review code."}))


def test_the_documentation_shows_commands() -> None:
    assert len(BLOCKS) >= 20
    assert len(INLINE) >= 20
    assert len(SCRIPTS) >= 20


@pytest.mark.usefixtures("_reviewer")
def test_documented_commands_parse() -> None:
    for line in sorted({line.strip() for line in (*BLOCKS, *INLINE)}):
        if not re.search(r"[A-Z]{3,}|\bREF\b| \| |\.\.\.", line.replace("GGUF", "")):  # not a synopsis
            try:
                parse(line)
            except click.ClickException as error:
                pytest.fail(f"edgespec {line}: {error}")


def parse(line: str) -> None:
    arguments = shlex.split(re.split(" && | > ", line)[0])
    command: click.Command = program
    context: click.Context | None = None
    while isinstance(command, click.Group) and (arguments or not command.invoke_without_command):
        context = command.make_context("edgespec", ["--"], parent=context, resilient_parsing=True)
        _, found, arguments = command.resolve_command(context, arguments)
        assert found is not None, line
        command = found
        if not arguments and isinstance(command, click.Group):
            return
    command.make_context(command.name, arguments, parent=context, resilient_parsing=len(arguments) == 0)


def test_documented_scripts_exist_and_have_the_options() -> None:
    for line in sorted({line.strip() for line in SCRIPTS if "*" not in line}):  # not a pattern
        path = ROOT / line.split()[0]
        if path.is_dir() or path.name == "cpu_kernels.cpp":  # the only script that is not run
            continue
        assert path.stat().st_mode & 0o111, f"{path} is not executable"
        if path.suffix == ".py":
            for option in re.findall(r"(?<= )--[a-z-]+", line):
                assert f'"{option}"' in path.read_text(encoding="utf-8"), line


@pytest.mark.usefixtures("_reviewer")
@pytest.mark.parametrize("page", ["README.md", "docs/python-api.md"])
def test_the_python_examples_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(f"import edgespec\n{example}", page, "exec"), {})
        assert capsys.readouterr().out.strip()


def test_links_lead_to_files() -> None:
    for page, text in PAGES.items():
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
            if not target.startswith("http"):
                assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"
