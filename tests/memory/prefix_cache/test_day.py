"""Tests of a simulated day of chats: every reply is correct, and few cached tokens are prefilled again."""

from __future__ import annotations

import pytest

from tests.scripts.running import run_script

SMALL = ("--chats", "7", "--turns", "8", "--longest", "500", "--context", "1024", "--max-tokens", "8")


@pytest.mark.parametrize("options", [SMALL, pytest.param((), marks=pytest.mark.long)], ids=["small", "whole"])
def test_a_day_of_chats_has_correct_replies_and_reuses_prefixes(options: tuple[str, ...]) -> None:
    results = run_script("day_of_chats.py", *options, "--draft", "none", "--method", "suffix")
    assert results["different"] == 0
    assert results["max_memory_bytes"] <= results["memory_limit_bytes"]
    assert results["hits"] > 0
    # Short segments and the last tokens of replies are not cached, because prefill is faster than copying.
    new, prefilled = results["new_tokens"], results["prefilled_tokens"]
    assert new <= prefilled <= new + results["prompt_tokens"] // 4
