"""Common typing errors, and the names that are suggested for them."""

from __future__ import annotations

import click
import pytest

from edgespec.cli.help import COMMANDS, load_command
from edgespec.system.spelling import FOREIGN_NAMES, nearest
from edgespec.tui.commands import table
from edgespec.tui.settings import SETTINGS


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--tepm", ["--temperature"]),
        ("--temprature", ["--temperature"]),
        ("--temp", ["--temperature"]),
        ("--max-token", ["--max-tokens"]),
        ("--maxtokens", ["--max-tokens"]),
        ("--tokens", ["--max-tokens", "--min-tokens"]),
        ("--contex", ["--context"]),
        ("--ctx", ["--context"]),
        ("--num-ctx", ["--context"]),
        ("--tagret", ["--target"]),
        ("--modle", ["--target"]),
        ("--draft-lenght", ["--draft-length"]),
        ("--lenght", ["--draft-length"]),
        ("--sede", ["--seed"]),
        ("--metod", ["--method"]),
        ("--memroy", ["--memory"]),
        ("--ngl", ["--gpu-layers"]),
        ("--topk", ["--top-k"]),
        ("--top", ["--top-k", "--top-p"]),
        ("--sytem", ["--system"]),
        ("--thread", ["--threads"]),
        ("--jsno", ["--json"]),
        ("--stream", []),
        ("--verbose", []),
    ],
)
def test_options(typed: str, meant: list[str]) -> None:
    command = load_command("generate")
    assert command is not None
    names = [name for each in command.params if isinstance(each, click.Option) for name in each.opts]
    assert nearest(typed, [name for name in names if name.startswith("--")]) == meant


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("genrate", "generate"),
        ("cht", "chat"),
        ("bnech", "bench"),
        ("versify", "verify"),
        ("docter", "doctor"),
        ("modle", "models"),
        ("data", "delete-data"),
        ("conf", "config"),
    ],
)
def test_commands(typed: str, meant: str) -> None:
    assert nearest(typed, COMMANDS) == [meant]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("regenarate", "regen"),
        ("sytem", "system"),
        ("cpoy", "copy"),
        ("setings", "set"),
        ("them", "theme"),
        ("continu", "continue"),
        ("detials", "details"),
        ("memroy", "memory"),
    ],
)
def test_slash_commands(typed: str, meant: str) -> None:
    assert table.nearest(typed) == meant


@pytest.mark.parametrize(
    ("typed", "meant"), [("tempreature", "temperature"), ("lenght", "draft_length"), ("topk", "top_k")]
)
def test_settings(typed: str, meant: str) -> None:
    assert nearest(typed, SETTINGS) == [meant]


def test_names_of_other_programs_mean_options_of_edgespec() -> None:
    command = load_command("generate")
    assert command is not None
    assert {each.name for each in command.params} >= set(FOREIGN_NAMES.values())
