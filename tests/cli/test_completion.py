"""`edgespec completion`: scripts that the shells accept, and what they offer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from edgespec.cli.program import program
from edgespec.model.formats.mlx_files import mlx_installed
from edgespec.store.catalogue import models_folder
from tests.cli.conftest import Run, one_line_error
from tests.store.fake_stores import OllamaStore

MLX_DEMOS = ["demo-mlx", "demo-mlx-draft"] if mlx_installed() else []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_for_edgespec_and_parses(run: Run, tmp_path: Path, shell: str) -> None:
    result = run("completion", shell)
    assert result.exit_code == 0
    assert "_EDGESPEC_COMPLETE" in result.stdout
    if shutil.which(shell):
        script = tmp_path / "script"
        script.write_text(result.stdout)
        subprocess.run([shell, "-n", str(script)], check=True)


def test_the_help_says_how_to_install_it(run: Run) -> None:
    text = run("completion", "--help").stdout
    for line in ("~/.bashrc", "~/.zshrc", "~/.config/fish/completions/edgespec.fish"):
        assert line in text


def test_an_unknown_shell(run: Run) -> None:
    one_line_error(run("completion", "tcsh"), 2, "'tcsh'", code="option_invalid")


def offered(*words: str) -> list[str]:
    """What is offered for the last of the words."""
    complete = ShellComplete(program, {}, "edgespec", "_EDGESPEC_COMPLETE")
    return [item.value or item.type for item in complete.get_completions(list(words[:-1]), words[-1])]


def test_commands_options_names_and_methods_are_offered() -> None:
    assert offered("gen") == ["generate"]
    assert offered("models", "") == ["alias", "list", "pair", "pull", "remove", "show"]
    assert "--temperature" in offered("generate", "--te")
    assert offered("generate", "--target", "demo-") == ["demo-draft", *MLX_DEMOS]
    assert "llama-3.1-8b" in offered("models", "show", "llama-3.1")
    assert offered("generate", "--method", "mod") == ["model", "model+suffix"]
    assert offered("generate", "--target", "./mod") == ["./mod"]


def test_models_of_other_programs_are_completed(own_home: Path) -> None:
    model = (models_folder() / "demo-draft-q8_0.gguf").read_bytes()
    OllamaStore(own_home / ".ollama" / "models").add("Homemade", "latest", model)
    folder = own_home / ".lmstudio" / "models" / "maker" / "One-GGUF"
    folder.mkdir(parents=True)
    (folder / "one-Q8_0.gguf").write_bytes(model)
    assert offered("models", "show", "home") == ["Homemade:latest"]
    assert offered("generate", "--draft", "maker/") == ["maker/One-GGUF"]


def test_settings_and_their_values_are_completed() -> None:
    assert offered("config", "un") == ["unset"]
    assert offered("config", "set", "temp") == ["temperature"]
    assert offered("config", "set", "method", "mod") == ["model", "model+suffix"]
    assert offered("config", "set", "flash_attention", "") == ["auto", "on", "off"]
