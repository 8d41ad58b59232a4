"""Tests of simulated days of chats, and of killed chat programs.

Every reply is correct, few cached tokens are prefilled again, no saved turn is lost, and incomplete files
are never used.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.scripts.running import run_script

SMALL = ("--chats", "7", "--turns", "8", "--longest", "500", "--context", "1024", "--max-tokens", "8")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.mark.parametrize("options", [SMALL, pytest.param((), marks=pytest.mark.long)], ids=["small", "whole"])
def test_a_day_of_chats_has_correct_replies_and_reuses_prefixes(options: tuple[str, ...]) -> None:
    results = run_script("day_of_chats.py", *options, "--draft", "none", "--method", "suffix")
    assert results["different"] == 0
    assert results["max_memory_bytes"] <= results["memory_limit_bytes"]
    assert results["hits"] > 0
    # Short segments and the last tokens of replies are not cached, because prefilling them is faster than
    # copying.
    new, prefilled = results["new_tokens"], results["prefilled_tokens"]
    assert new <= prefilled <= new + results["prompt_tokens"] // 4


def kill(count: int, *options: str) -> dict[str, Any]:
    return run_script("kill_chats.py", "--kills", str(count), *options)


@needs_fork
def test_two_killed_programs_with_the_same_chats_lose_no_turn() -> None:
    results = kill(5, "--check-every", "5", "--max-seconds", "0.2", "--processes", "2")
    assert results["errors"] == []
    assert results["turns_saved"] > 0
    assert results["replies"] > 0


@needs_fork
@pytest.mark.long
def test_many_kills_lose_no_turn() -> None:
    results = kill(200, "--check-every", "4", "--processes", "2")
    assert results["replies"] > 50
    assert results["files"] > 5
