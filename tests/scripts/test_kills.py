"""What takes long, killed at random instants: what is there is whole, and the next run finishes."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.scripts.running import found_by

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="it forks")


def kills(count: int, *options: str) -> dict[str, Any]:
    """What the script found."""
    return found_by("kill_everything.py", "--kills", str(count), *options)


def test_a_few_kills_leave_nothing_half_downloaded() -> None:
    found = kills(4, "--only", "downloads")["downloads"]
    assert found["wrong"] == []
    assert found["kills"] == 4
    assert found["finished"] > 0


@pytest.mark.long
def test_many_kills_leave_nothing_half_made() -> None:
    found = kills(200)
    assert set(found) == {"chats", "together", "downloads", "layerskip", "lowbit"}
    assert sum(each["kills"] for each in found.values()) >= 200
    assert not [wrong for each in found.values() for wrong in each["wrong"]]
