"""`scripts/attack`: the server survives a short attack, and the script reports failing servers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.attacking.__main__ import Record
from scripts.attacking.neighbours import difference
from scripts.attacking.senders import problem
from scripts.attacking.victim import Usage

CANARY = "canary0123456789ab"


@pytest.mark.long
def test_a_short_attack(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.attacking", "--requests", "60", "--log", str(tmp_path / "log")]
    command += ["--neighbours", "--", "--parallel", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "60 hostile requests" in done.stdout
    assert int(re.findall(r"(\d+) equal honest replies", done.stdout)[0]) > 0
    assert int(re.findall(r"(\d+) replies to neighbours", done.stdout)[0]) > 0


@pytest.mark.parametrize(
    ("reply", "is_wrong"),
    [
        (f"HTTP/1.1 200 OK\r\n\r\n{CANARY}", False),
        (f"HTTP/1.1 200 OK\r\n\r\n{CANARY} canary999999999999", True),
        ("HTTP/1.1 503 Service Unavailable\r\n\r\n", False),
        ("HTTP/1.1 500 Internal Server Error\r\n\r\n", True),
        ("HTTP/1.1 200 OK\r\n\r\nthe server failed because of a bug", True),
        ("HTTP/1.1 200 OK\r\n\r\nllama.cpp failed to process 16 tokens", True),
        ("", False),
    ],
)
def test_wrong_replies_are_found(reply: str, is_wrong: bool) -> None:
    assert bool(problem(reply.encode(), CANARY)) is is_wrong


@pytest.mark.parametrize(
    ("shared", "expected"),
    [
        ([("a", -0.1), ("b", -1.0)], 0.0),
        ([("a", -0.3), ("b", -1.2)], 0.0),
        ([("a", -0.1), ("c", -1.5)], 0.5),
        ([("c", -0.1)], 1e-9),
        ([("a", -0.1)], float("inf")),
    ],
)
def test_replies_are_compared_at_the_first_other_token(
    shared: list[tuple[str, float]], expected: float
) -> None:
    assert difference([("a", -0.1), ("b", -1.0)], shared) == expected


def test_growth_is_found() -> None:
    flat = Record(usage=[Usage(200 << 20, 10, 10)] * 9)
    assert not flat.failures()
    growing = Record(usage=[Usage((200 + 20 * index) << 20, 10 + 4 * index, 10) for index in range(9)])
    assert [each.partition(" ")[0] for each in growing.failures()] == ["memory_bytes", "files"]
