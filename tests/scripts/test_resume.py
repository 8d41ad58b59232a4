"""Tests of the benchmark of resumed chats."""

from __future__ import annotations

import pytest

from tests.scripts.running import run_script


@pytest.mark.long
def test_a_resumed_chat_restores_all_its_tokens() -> None:
    (row,) = run_script("bench_resume.py", "--lengths", "300", "--repeats", "1", "--json")["rows"]
    assert row["restored_tokens"] >= row["tokens"]
    assert row["speedup"] > 0
