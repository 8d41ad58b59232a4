"""Chats killed at random instants: what was saved opens, and what is half written is never used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "kill_chats.py"

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="it forks")


def kills(count: int, *options: str) -> dict[str, Any]:
    """What the script found."""
    command = [sys.executable, str(SCRIPT), "--kills", str(count), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_a_few_kills_leave_whole_chats() -> None:
    found = kills(16, "--looks", "16", "--longest", "0.08")
    assert found["wrong"] == []
    assert found["chats"] > 0
    assert found["replies"] > 0


@pytest.mark.long
def test_many_kills_leave_whole_chats() -> None:
    found = kills(200, "--looks", "4")
    assert found["replies"] > 50
    assert found["files"] > 5
