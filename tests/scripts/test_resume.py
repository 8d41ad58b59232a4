"""What is printed of a saved chat that goes on."""

from __future__ import annotations

from tests.scripts.running import found_by


def test_all_of_a_chat_is_found_again() -> None:
    (row,) = found_by("bench_resume.py", "--lengths", "300", "--repeats", "1", "--json")["rows"]
    assert row["restored_tokens"] >= row["tokens"]
    assert row["times"] > 0
