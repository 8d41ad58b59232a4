"""Tests that killed programs leave no incomplete data, and that lost workers cause no error."""

from __future__ import annotations

import os
from typing import Any

import pytest

from edgespec.backends.llamacpp.weight_stream import can_stream
from tests.scripts.running import run_script

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def kill(count: int, *options: str) -> dict[str, Any]:
    return run_script("kill_everything.py", "--kills", str(count), *options)


def test_killed_downloads_leave_no_incomplete_model() -> None:
    results = kill(4, "--only", "downloads")["downloads"]
    assert results["errors"] == []
    assert results["kills"] == 4
    assert results["finished"] > 0


@pytest.mark.long
def test_killed_terminal_chats_lose_no_question() -> None:
    results = run_script("kill_terminal_chats.py", "--kills", "3", "--max-seconds", "1.5")
    assert results["lost_questions"] == 0
    assert results["questions_sent"] > 0


@pytest.mark.long
@pytest.mark.skipif(not can_stream(), reason="weights are streamed only on a Linux CPU")
def test_disturbed_streams_lose_nothing_and_do_not_end_the_program() -> None:
    results = run_script("disturb_streams.py", "--disturbances", "18")
    assert results["errors"] == []
    assert results["disturbances"] == 18


@pytest.mark.long
def test_many_kills_leave_no_incomplete_data() -> None:
    results = kill(200)
    assert set(results) == {"chats", "shared-chats", "downloads", "layerskip", "lowbit", "substitutes"}
    assert sum(each["kills"] for each in results.values()) >= 200
    assert not [error for each in results.values() for error in each["errors"]]


@pytest.mark.long
def test_a_lost_worker() -> None:
    results = run_script("kill_workers.py", "--losses", "1", "--seed", "1")
    assert results["errors"] == []
    assert sum(results["outcomes"].values()) == 1


@pytest.mark.long
def test_many_lost_workers() -> None:
    assert run_script("kill_workers.py", "--losses", "200")["errors"] == []
