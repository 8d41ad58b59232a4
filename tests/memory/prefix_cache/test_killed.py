"""Tests that killed chat programs lose no saved turn and never use incomplete files."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.scripts.running import run_script

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def kill(count: int, *options: str) -> dict[str, Any]:
    return run_script("kill_chats.py", "--kills", str(count), *options)


def test_two_killed_programs_with_the_same_chats_lose_no_turn() -> None:
    results = kill(5, "--check-every", "5", "--max-seconds", "0.2", "--processes", "2")
    assert results["errors"] == []
    assert results["turns_saved"] > 0
    assert results["replies"] > 0


@pytest.mark.long
def test_many_kills_lose_no_turn() -> None:
    results = kill(200, "--check-every", "4", "--processes", "2")
    assert results["replies"] > 50
    assert results["files"] > 5
