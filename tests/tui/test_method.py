"""The speed-up on the screen."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec import Exactness
from edgespec.options.option import Option
from edgespec.tui.commands.information import why_text
from edgespec.tui.open_chat import OpenChat
from edgespec.tui.settings import LOAD_SETTINGS
from edgespec.tui.texts import drafting_explanation, sentences, show_rows, speed_up_short, speed_up_text
from edgespec.tui.widgets.details import StatusLine, details_content
from tests.tui.driving import driving, until
from tests.tui.scripted import (
    LIVE,
    METHOD,
    Script,
    ScriptedRuntime,
    as_runtime,
    facts,
    loading,
    made_up_stats,
)

SMALL = replace(
    METHOD,
    effective="none",
    reason="this target is so small (0.6 ms a token) that guessing costs more than it brings",
    gain=-0.004,
    gain_uncertainty=0.02,
)
LIMITS = (0.02, 2.0)
WHY = "2% plus the time of 2 tokens"


@pytest.mark.long
async def test_no_acceptance_is_shown_while_the_speed_up_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        status = d.chat.query_one(StatusLine)
        await d.say("one")
        assert status.facts.acceptance_rate == 29 / 40
        monkeypatch.setattr("tests.tui.scripted.LIVE", SMALL)
        await d.say("two")
        assert status.facts.speed_up == ""
        assert status.facts.segments()[0][0].endswith("tok/s")
        assert status.facts.acceptance_rate is None


@pytest.mark.long
async def test_speed_up_is_shown_during_the_reply(tmp_path: Path) -> None:
    gate = threading.Event()
    runtime = ScriptedRuntime(scripts=[Script(text="word " * 40, gate=gate)])
    async with driving(loading(runtime), tmp_path, size=(120, 40)) as d:
        status = d.chat.query_one(StatusLine)
        assert status.facts.speed_up == "speed-up on"
        await d.press("f3")
        await d.send("Say something.")
        await until(d.pilot, lambda: status.facts.writing and status.facts.speed_up == "speed-up 1.6x")
        await d.sees("1.6x as fast")
        gate.set()
        await d.settled()
        assert status.facts.speed_up == "speed-up 1.6x"
        assert not status.facts.writing


@pytest.mark.parametrize("size", [(40, 20), (80, 24), (100, 30)], ids=str)
async def test_show_contains_the_speed_up_and_the_loss_limit_at_any_size(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path, size=size) as d:
        await d.say("Say something.")
        await d.say("/show")
        shown = " ".join(d.transcript().split())
        assert "1.6x as fast, automatic (guesses from: draft model + repeated text)" in shown
        assert LIVE.reason in shown
        assert f"at worst the speed-up made the last reply up to 9% slower (allowed: {WHY})" in shown
        assert "method auto (default)" in shown
        assert "rollback" not in shown
        assert " speed-up 1.6x " in " ".join(d.screen_text())


@pytest.mark.parametrize("width", [24, 36, 60])
def test_details_of_a_plain_reply_contain_the_reason_and_no_speed_up(width: int) -> None:
    text = details_content(
        made_up_stats(9), width, method=SMALL, reply=None, rates=[], memory_bytes=1, loss_limits=LIMITS
    ).plain
    assert f"Off for now: {SMALL.reason}" in text
    assert text.index("Speed-up") < text.index("This reply")
    worst = " ".join(text[text.index("Slowdown at worst") :].split())
    assert worst.startswith(f"Slowdown at worst 9% allowed: {WHY} ")
    assert "Speed-up" not in text[text.index("This reply") :]
    assert speed_up_short(SMALL, None) == ""


def test_speed_up_text_contains_the_speed_up_or_a_measured_loss() -> None:
    assert speed_up_text(LIVE) == "1.6x as fast, automatic (guesses from: draft model + repeated text)"
    assert speed_up_text(replace(LIVE, requested="none", effective="none")) == "off"
    slow = replace(
        SMALL,
        reason="drafting does not save time",
        chat_reason="guessing does not save time",
        gain=-0.13,
        gain_uncertainty=0.03,
    )
    assert speed_up_text(slow) == (
        "off for now: guessing does not save time; trying it made this reply 13% ± 3% slower"
    )
    assert "slower" not in speed_up_text(replace(slow, gain_uncertainty=0.1))


def test_peak_memory_is_never_below_current_memory() -> None:
    text = details_content(
        made_up_stats(9), 34, method=LIVE, reply=None, rates=[], memory_bytes=200 << 20, loss_limits=LIMITS
    ).plain
    assert text.split("Memory")[1].count("200 MiB") == 2


def test_names_at_the_start_of_a_sentence_are_not_capitalised() -> None:
    assert (
        sentences("x.html is not JSON", "choose another file") == "x.html is not JSON. Choose another file."
    )
    assert sentences("top_p is 2", "don't") == "top_p is 2. Don't."
    assert sentences("the file is gone") == "The file is gone."
    assert sentences("threads is now 1", "threads: 1") == "threads is now 1. threads: 1."
    assert sentences("workers are missing") == "Workers are missing."


@pytest.mark.parametrize("option", LOAD_SETTINGS.values(), ids=LOAD_SETTINGS)
def test_descriptions_have_no_backticks(option: Option) -> None:
    assert "`" not in sentences(option.help)


def test_advice_has_no_backticks() -> None:
    assert sentences("x is 1", "use `auto` or --draft none") == "X is 1. Use auto or /draft none."


BITS = Exactness("auto", True, "are identical to plain decoding", (1, 2, 3), 1.0)
ROUNDING = Exactness("auto", False, "can differ from plain decoding by rounding", (), 0.8)
OFF = Exactness("off", False, ROUNDING.outcome, cause="exactness")


@pytest.mark.parametrize(
    ("exactness", "contains", "lacks"),
    [
        (BITS, ["identical with and without the speed-up"], ["/set exactness", "rounding"]),
        (
            replace(BITS, expected_speed=0.95),
            ["identical with and without the speed-up", "/set exactness off", "5%"],
            [],
        ),
        (replace(BITS, widths=(1,)), ["identical with and without the speed-up", "/set exactness off"], []),
        (
            ROUNDING,
            [
                "can differ slightly from those without the speed-up because of rounding",
                "/set exactness bits",
                "25%",
            ],
            ["identical"],
        ),
        (
            OFF,
            ["can differ from those without the speed-up by rounding, because exactness is off"],
            ["identical", "%"],
        ),
    ],
)
def test_the_chat_says_whether_replies_are_identical(
    exactness: Exactness, contains: list[str], lacks: list[str]
) -> None:
    target = replace(facts("demo"), exactness=exactness)
    details = details_content(
        None, 400, method=LIVE, reply=None, rates=[], memory_bytes=1, loss_limits=LIMITS, exactness=exactness
    ).plain
    runtime = as_runtime(ScriptedRuntime(target=target))
    shown = dict(show_rows(runtime, OpenChat(), METHOD, None))["replies"]
    for text in (details, shown):
        assert all(each in text for each in contains)
        assert not any(each in text for each in lacks)
    why = why_text(runtime, LIVE, made_up_stats(30), {})
    assert ("replies stay the same" in drafting_explanation(runtime)) == exactness.bits
    # `/why` mentions the rule only if it explains the speed or if replies can differ.
    assert ("can differ" in why) == (not exactness.bits)
    assert ("/set exactness off" in why) == (exactness.bits and exactness != BITS)


@pytest.mark.long
@pytest.mark.parametrize("exactness", [BITS, ROUNDING, OFF])
async def test_a_switch_to_a_model_whose_replies_can_differ_says_so(
    exactness: Exactness, tmp_path: Path
) -> None:
    other = ScriptedRuntime(target=replace(facts("other"), exactness=exactness))
    async with driving(loading(ScriptedRuntime()), tmp_path, load_other=lambda _: loading(other)) as d:
        await d.say("one")
        await d.send("/model demo-mlx")
        await d.said("This chat now uses other.")
        assert ("/set exactness bits" in d.transcript()) == (exactness == ROUNDING)


@pytest.mark.long
async def test_the_details_follow_the_settings_of_the_chat(tmp_path: Path) -> None:
    target = replace(facts("demo"), exactness=BITS)
    async with driving(loading(ScriptedRuntime(target=target)), tmp_path, size=(120, 40)) as d:
        await d.press("f3")
        await d.sees("Replies are identical")
        await d.say("/set acceptance rejection")
        await d.sees("Replies can differ")
        await d.say("/set temperature 0")
        await d.sees("Replies are identical")
