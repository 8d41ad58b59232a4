"""The speed-up on the screen."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.tui.texts import speed_up_short
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


async def test_speed_up_is_shown_during_the_reply(tmp_path: Path) -> None:
    gate = threading.Event()
    runtime = ScriptedRuntime(scripts=[Script(text="word " * 40, gate=gate)])
    async with driving(loading(runtime), tmp_path, size=(120, 40)) as d:
        status = d.chat.query_one(StatusLine)
        assert status.facts.speed_up == "speed-up on"
        await d.press("f3")
        await d.send("Say something.")
        await until(d.pilot, lambda: status.facts.writing and status.facts.speed_up == "speed-up 1.6×")
        await d.sees("speed-up 1.62x")
        gate.set()
        await d.settled()
        assert status.facts.speed_up == "speed-up 1.6×"
        assert not status.facts.writing


@pytest.mark.parametrize("size", [(40, 20), (80, 24), (100, 30)], ids=str)
async def test_show_contains_the_speed_up_and_the_loss_limit_at_any_size(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path, size=size) as d:
        await d.say("Say something.")
        await d.say("/show")
        shown = " ".join(d.transcript().split())
        assert "1.6× as fast · automatic (helper model + repeated text)" in shown
        assert LIVE.reason in shown
        assert "at most 9% of a" in shown
        assert " speed-up 1.6× " in " ".join(d.screen_text())


@pytest.mark.parametrize("width", [24, 36, 60])
def test_details_of_a_plain_reply_contain_the_reason_and_no_speed_up(width: int) -> None:
    text = details_content(made_up_stats(9), width, method=SMALL, reply=None, memory_bytes=1).plain
    assert SMALL.summary in text
    assert text.index("Method") < text.index("This reply")
    assert "Loss limit" in text
    assert "Speed-up" not in text
    assert speed_up_short(SMALL) == "speed-up off"
