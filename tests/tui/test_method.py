"""The speed-up on the screen."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.tui.texts import in_chat_words, method_text, speed_up_short
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
        assert "cost at most 2% + 2 tokens (9% of this reply)" in shown
        assert "method auto (default)" in shown
        assert "rollback" not in shown
        assert " speed-up 1.6× " in " ".join(d.screen_text())


@pytest.mark.parametrize("width", [24, 36, 60])
def test_details_of_a_plain_reply_contain_the_reason_and_no_speed_up(width: int) -> None:
    text = details_content(
        made_up_stats(9), width, method=SMALL, reply=None, memory_bytes=1, loss_limits=(0.02, 2.0)
    ).plain
    assert f"Speed-up off for now: {SMALL.reason}" in text
    assert text.index("Method") < text.index("This reply")
    assert "Loss limit" in text
    assert "2% + 2 tokens (9% of this reply)" in text
    assert "Speed-up" not in text[text.index("This reply") :].replace("no speed-up", "")
    assert speed_up_short(SMALL) == "speed-up off"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "model+suffix found no draft likely to save time, in 5 tries",
            "5 tries found no guess likely to save time",
        ),
        ("suffix found no draft likely to save time, in 1 try", "1 try found no guess likely to save time"),
        (
            "drafting has not saved time lately; model+suffix is retried now and then",
            "guessing has not saved time lately; it is retried now and then",
        ),
        (
            "a wrong draft could cost 2.0 tokens' time; the last drafts were wrong",
            "a wrong guess could cost 2.0 tokens' time; the last guesses were wrong",
        ),
        (
            "no draft model fits /models/draft model.gguf: give --draft demo-draft",
            "no helper model fits /models/draft model.gguf: give --draft demo-draft",
        ),
    ],
)
def test_reasons_are_shown_in_the_words_of_the_chat(text: str, words: str) -> None:
    assert in_chat_words(text) == words


def test_method_of_the_details_contains_the_speed_up_or_a_measured_loss() -> None:
    assert method_text(LIVE) == (
        "Speed-up automatic (helper model + repeated text): speed-up 1.62x ± 0.08; guesses pay here"
    )
    slow = replace(SMALL, reason="drafting does not save time", gain=-0.13, gain_uncertainty=0.03)
    assert method_text(slow) == (
        "Speed-up off for now: guessing does not save time; trying guesses cost 13% ± 3% of the speed"
    )
    assert "cost" not in method_text(replace(slow, gain_uncertainty=0.1))


def test_peak_memory_is_never_below_current_memory() -> None:
    text = details_content(made_up_stats(9), 34, method=LIVE, reply=None, memory_bytes=200 << 20).plain
    assert text.split("Memory")[1].count("200 MiB") == 2
