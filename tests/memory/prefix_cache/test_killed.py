"""Programs killed at random moments: saved chats open, and partly written files are never used."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.scripts.running import found_by

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="it forks")


def kills(count: int, *options: str) -> dict[str, Any]:
    """Run the script and return its result."""
    return found_by("kill_chats.py", "--kills", str(count), *options)


def test_two_programs_with_the_same_chats_lose_no_turn() -> None:
    found = kills(8, "--looks", "8", "--longest", "0.2", "--together", "2")
    assert found["wrong"] == []
    assert found["turns_saved"] > 0
    assert found["replies"] > 0


@pytest.mark.long
def test_many_kills_leave_whole_chats() -> None:
    found = kills(200, "--looks", "4", "--together", "2")
    assert found["replies"] > 50
    assert found["files"] > 5
