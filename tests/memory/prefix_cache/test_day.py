"""A simulated day of chats: replies are correct, and prefill reads little more than new tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scripts.running import found_by


def day(*options: str) -> dict[str, Any]:
    """Run the script and return its result."""
    return found_by("day_of_chats.py", *options)


SMALL = ("--chats", "7", "--turns", "12", "--longest", "500", "--context", "1024", "--max-tokens", "8")


@pytest.mark.parametrize("options", [SMALL, pytest.param((), marks=pytest.mark.long)], ids=["small", "whole"])
def test_a_day_of_chats(options: tuple[str, ...]) -> None:
    told = day(*options, "--draft", "none", "--method", "suffix")
    assert told["unequal"] == 0
    assert told["most_memory_bytes"] <= told["memory_for_texts_bytes"]
    assert told["hits"] > 0
    # What takes less to read than to copy is read again: the last tokens of replies, and what is short.
    assert told["least"] <= told["read"] <= told["least"] + told["whole"] // 4
