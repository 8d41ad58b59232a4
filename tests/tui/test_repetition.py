"""Replies that repeat the same text are stopped, with a note."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.tui.repetition import RepetitionWatch
from tests.tui.driving import driving
from tests.tui.scripted import Script, ScriptedRuntime, loading

LOOP = "It is what it is, and so it goes. "


def _stops_after(text: str, step: int = 7) -> int | None:
    """Return after how many characters of a text a reply is stopped, or None if it is not."""
    watch = RepetitionWatch()
    for start in range(0, len(text), step):
        if watch.add(text[start : start + step]):
            return start + step
    return None


@pytest.mark.parametrize("copy", ["\n", "ab", LOOP, LOOP + "The lamp was lit. " * 12, "ä€😊"], ids=len)
@pytest.mark.parametrize("before", ["", "An answer begins well. "])
def test_a_reply_that_repeats_itself_is_noticed(copy: str, before: str) -> None:
    stopped = _stops_after(before + copy * (8000 // len(copy)))
    assert stopped is not None
    assert stopped <= max(2000, 10 * len(copy)) + len(before) + 600


def test_other_replies_are_not_stopped() -> None:
    numbers = ", ".join(map(str, range(5000)))
    table = "| name | size |\n|" + "-" * 60 + "|\n" + "".join(f"| file{i} | 0 |\n" for i in range(500))
    zeros = "x = [" + "0, " * 500 + "]\n"
    paragraphs = "".join(f"{LOOP * 20}Chapter {i} ends.\n" for i in range(30))
    long_copies = ("".join(map(str, range(600)))) * 20
    for text in (numbers, table, zeros, paragraphs, long_copies, LOOP * 50):
        assert _stops_after(text) is None


async def test_the_chat_stops_a_reply_that_repeats_itself_and_says_so(tmp_path: Path) -> None:
    runtime = ScriptedRuntime([Script(LOOP * 400, pause_seconds=0.0005), Script("A second reply.")])
    async with driving(loading(runtime), tmp_path) as d:
        await d.say("Tell me something.")
        await d.said("it repeated the same text over and over")
        reply = d.chat.current_chat.entries[-1]
        assert LOOP * 50 in reply.content
        assert (LOOP * 400).startswith(reply.content)
        assert len(reply.content) < len(LOOP * 400)
        assert "type /continue" in " ".join(d.transcript().split())
        await d.say("And now?")
        await d.said("A second reply.")
        assert "over and over" not in d.transcript()
