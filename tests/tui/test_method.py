"""What the chat says of how replies are sped up, and when."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.tui.widgets.details import details_content
from edgespec.tui.widgets.status import StatusLine
from tests.tui.driving import driving, until
from tests.tui.scripted import LIVE, METHOD, Script, ScriptedRuntime, loading, made_up_stats

SMALL = replace(
    METHOD,
    effective="none",
    reason="this target is so small (0.6 ms a token) that guessing costs more than it brings",
    gain=-0.004,
    gain_uncertainty=0.02,
)


async def test_the_gain_is_shown_while_the_reply_is_written(tmp_path: Path) -> None:
    gate = threading.Event()
    runtime = ScriptedRuntime(scripts=[Script(text="word " * 40, gate=gate)])
    async with driving(loading(runtime), tmp_path, size=(120, 40)) as d:
        status = d.chat.query_one(StatusLine)
        assert status.facts.method == "model+suffix"
        await d.press("f3")
        await d.send("Say something.")
        await until(d.pilot, lambda: status.facts.writing and status.facts.method == "model+suffix +62%")
        await d.sees("guesses pay here")
        gate.set()
        await d.settled()
        assert status.facts.method == "model+suffix +62%"
        assert not status.facts.writing


@pytest.mark.parametrize("size", [(40, 20), (80, 24), (100, 30)], ids=str)
async def test_show_has_the_line_and_what_may_be_lost_and_cuts_nothing(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path, size=size) as d:
        await d.say("Say something.")
        await d.say("/show")
        said = " ".join(d.transcript().split())
        for words in LIVE.line.split():
            assert words in said
        assert "9% of the" in said
        assert f" {LIVE.short} " in " ".join(d.screen_text())


@pytest.mark.parametrize("width", [24, 36, 60])
def test_a_plain_reply_says_why_and_claims_no_gain(width: int) -> None:
    text = details_content(made_up_stats(9), width, method=SMALL, reply=None, memory_bytes=1).plain
    assert SMALL.line in text
    assert text.index("Method") < text.index("This reply")
    assert "May lose at most" in text
    assert "Against plain" not in text
    assert SMALL.short == "plain"
