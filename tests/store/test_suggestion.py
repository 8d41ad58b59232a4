"""The suggested first model: it fits, its command works as printed, and both models can be downloaded."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import pytest

from edgespec.cli.commands import load_command
from edgespec.store.catalogue import load_catalogue, suggest_models
from edgespec.store.reference import resolve
from edgespec.system.installation import chat_command
from tests.store import stand_in_hub
from tests.store.stand_in_hub import StandInHub

GIB = 1 << 30


@pytest.mark.parametrize(
    ("budget_bytes", "pair"),
    [
        (2 * GIB, ("qwen3.5-0.8b", "")),
        (4 * GIB, ("qwen3.5-2b", "qwen3.5-0.8b")),
        (64 * GIB, ("qwen3.5-9b", "")),  # It drafts with its own layers for multi-token prediction.
    ],
)
def test_the_largest_model_that_fits(budget_bytes: int, pair: tuple[str, str]) -> None:
    suggestions = suggest_models(budget_bytes)
    assert suggestions[-1][:2] == pair
    sizes = [each.download_bytes for each in suggestions]
    assert sizes == sorted(sizes)


def test_mlx_models_are_suggested_for_the_mlx_demo() -> None:
    assert suggest_models(64 * GIB, "mlx")[-1][:2] == ("qwen3.5-9b-mlx", "qwen3.5-0.8b-mlx")


def test_the_command_parses_and_both_models_can_be_downloaded(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    suggestion = suggest_models(4 * GIB)[-1]
    words = ["edgespec", "chat", "--target", suggestion.target, "--draft", suggestion.draft]
    command = load_command("chat")
    assert isinstance(command, click.Command)
    options = command.make_context("chat", words[2:]).params
    for reference in (options["target"], options["draft"]):
        found = load_catalogue().find(reference)
        assert found is not None
        monkeypatch.setattr(stand_in_hub, "REPOSITORY", found[0].repository)
        path = resolve(reference).path
        assert path.name == "tiny-Q4_K_M.gguf"


def test_the_command_is_the_one_that_started_the_chat(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("_EDGESPEC_CHAT_COMMAND", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert chat_command() == f"{sys.executable} -m edgespec chat"
    (tmp_path / "edgespec").touch(mode=0o755)
    assert chat_command() == f"{sys.executable} -m edgespec chat", "that is another installation"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert chat_command() == "edgespec chat"
    monkeypatch.setenv("_EDGESPEC_CHAT_COMMAND", "scripts/chat")
    assert chat_command() == "scripts/chat"
