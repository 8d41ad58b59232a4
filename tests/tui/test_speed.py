"""Displays of speed: the sparkline, `/why`, the legend, the status line and the race."""

from __future__ import annotations

import re
import shutil
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import constants

import edgespec
from edgespec import MethodReport, Stats
from edgespec.bench.race import Race
from edgespec.errors import CancelledError
from edgespec.methods.auto.combined_drafter import UnusedDrafter
from edgespec.store.catalogue import models_folder
from edgespec.store.download import Progress
from edgespec.tui.commands.information import why, why_text
from edgespec.tui.commands.results import RaceProgress, RunningRace
from edgespec.tui.screens.race import RaceScreen
from edgespec.tui.texts import notices, speed_up_short, speed_up_text
from edgespec.tui.widgets.details import SpeedHistory, details_content, sparkline
from edgespec.tui.worker import Load
from tests.cases import first
from tests.store.fake_stores import add_to_lmstudio
from tests.tui.driving import driving, until
from tests.tui.scripted import LIVE, Script, ScriptedRuntime, as_runtime, facts, loading, made_up_stats

QUESTION = "How do I count the lines of a file?"


def test_the_sparkline_is_relative_to_the_highest_rate() -> None:
    assert sparkline([], 10) == ""
    assert sparkline([0.0, 5.0, 10.0], 10) == "▁▅█"
    assert sparkline([0.0, 0.0], 10) == "▁▁"
    assert sparkline([1.0, 1.0, 4.0, 4.0], 2) == "▃█"
    assert len(sparkline([1.0] * 64, 35)) == 35


def test_the_history_counts_tokens_per_interval_and_stays_small() -> None:
    history = SpeedHistory()
    assert history.rates() == []
    for place in range(8):
        history.add(5, place * 0.25)
    assert history.rates() == [20.0] * 7
    for place in range(8, 4000):
        history.add(5, place * 0.25)
    assert len(history.rates()) <= 64
    assert all(rate == 20.0 for rate in history.rates())


def test_a_pause_is_seen() -> None:
    history = SpeedHistory()
    history.add(10, 0.0)
    history.add(10, 2.0)
    assert history.rates() == [40.0, *[0.0] * 7]


async def test_the_details_show_the_sparkline_of_a_reply(tmp_path: Path) -> None:
    runtime = ScriptedRuntime([Script("word " * 60, pause_seconds=0.04)])
    async with driving(loading(runtime), tmp_path, size=(120, 40)) as d:
        await d.press("f3")
        await d.say("a question")
        assert any("█" in line and "▏" not in line for line in d.screen_text() if "tok/s" not in line)
        assert d.chat.speeds.rates()
        await d.press("ctrl+n")
        await d.settled()
        assert d.chat.speeds.rates() == []


OFF = MethodReport("auto", "none", "drafting does not save time: the last drafts lost 0.3 tokens' time each")
NONE = MethodReport("none", "none", "asked for")


@pytest.mark.parametrize(
    ("method", "stats", "said"),
    [
        (LIVE, made_up_stats(30), ("1.62x as fast (± 0.08)", "29 of 40 guesses", "/race")),
        (
            replace(LIVE, gain=0.01),
            made_up_stats(30),
            ("too small to measure", "29 of 40", "/set temperature"),
        ),
        (
            replace(LIVE, gain=1.52, gain_uncertainty=0.79),
            made_up_stats(30),
            ("varied too much", "29 of 40 guesses were accepted (72%).", "/race"),
        ),
        (
            replace(LIVE, gain=None),
            Stats(),
            ("too short to tell", "nothing to guess from", "temperature 0"),
        ),
        (OFF, made_up_stats(30), ("off for now", "lost 0.3 tokens' time", "")),
        (replace(OFF, gain=-0.2), made_up_stats(30), ("20% ± 1% slower", "lost 0.3", "")),
        (NONE, made_up_stats(30), ("one token at a time", "method is set to none", "/set method auto")),
    ],
)
def test_why_is_three_sentences(method: MethodReport, stats: Stats, said: tuple[str, str, str]) -> None:
    stats.accepted_tokens = 29 if stats.drafted_tokens else 0
    told = why(method, stats, missing_draft=None, is_demo=False, is_random=True)
    assert len(told) == 3
    for sentence, part in zip(told, said, strict=True):
        assert sentence.endswith(".")
        if part != "/set temperature":
            assert part in sentence


def test_why_suggests_a_draft_model_and_a_real_model() -> None:
    slow = replace(LIVE, gain=0.05)
    told = why(slow, made_up_stats(30), missing_draft="1b-q4", is_demo=False, is_random=False)
    assert "/draft 1b-q4" in told[2]
    told = why(slow, made_up_stats(30), missing_draft="", is_demo=False, is_random=False)
    assert "No draft model for this model" in told[2]
    assert "/draft" not in told[2]
    assert "demo" in why(slow, made_up_stats(30), missing_draft=None, is_demo=True, is_random=False)[2]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("demo-7b.gguf", "/models/demo-7b.gguf"),
        ("demo", "/models/demo"),
        ("demonstrator:latest", "/ollama/blobs/sha256-1"),
    ],
)
def test_a_users_model_is_not_called_a_toy_because_of_its_name(name: str, path: str) -> None:
    scripted = ScriptedRuntime()
    runtime = as_runtime(scripted)
    assert "demo model" in why_text(runtime, replace(LIVE, gain=0.05), made_up_stats(30), {})
    scripted.target = replace(facts(name), path=path)
    assert "demo model" not in why_text(runtime, replace(LIVE, gain=0.05), made_up_stats(30), {})
    assert not [text for text in notices(runtime) if "toy" in text]


NOT_USED = (
    "The draft model demo-draft is loaded, but was not used in this reply: one guess takes 46% of the time of"
    " a word, and 55% of its first guesses are right. With it, replies would be about 0.93x as fast as"
    " without guesses."
)


@pytest.mark.parametrize(
    ("unused", "said"),
    [
        (
            UnusedDrafter("model", 0.46, 0.55, 0.93),
            NOT_USED,
        ),
        (UnusedDrafter("model", 0.3, 0.8, 1.2), "is tried again as soon as the limit on slowdowns allows."),
        (UnusedDrafter("model", 0.3, None, None), "one guess takes 30% of the time of a word."),
        (UnusedDrafter("model", 0.0, None, None), "its speed has not been measured yet."),
        (UnusedDrafter("eagle", 0.3, None, None), "The EAGLE head is loaded, but was not used"),
    ],
)
@pytest.mark.parametrize("effective", ["suffix", "none"])
def test_why_says_why_a_loaded_draft_model_is_not_used(
    unused: UnusedDrafter, said: str, effective: str
) -> None:
    runtime, stats = as_runtime(ScriptedRuntime()), made_up_stats(30)
    method = replace(LIVE, effective=effective, unused=(unused,))
    assert said in why_text(runtime, method, stats, {})
    assert "is loaded" not in why_text(runtime, replace(method, requested="suffix"), stats, {})
    assert "unused" not in method.to_json()


def test_why_suggests_only_a_draft_model_that_exists(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    own = tmp_path / "own.gguf"
    shutil.copy(models_folder() / "demo-target-q8_0.gguf", own)
    runtime = as_runtime(ScriptedRuntime(target=replace(facts("own.gguf"), path=str(own)), draft=None))
    why = partial(why_text, runtime, replace(LIVE, gain=0.05), made_up_stats(30), {})
    assert "No draft model for this model" in why()
    small = models_folder() / "demo-draft-q8_0.gguf"
    add_to_lmstudio(tmp_path / ".lmstudio" / "models", "maker/small/small.gguf", small)
    assert "/draft maker/small" in why()


def test_why_suggests_auto_if_a_named_method_is_slow() -> None:
    stats = replace(made_up_stats(30), verify_seconds=10.0)
    named = MethodReport("eagle", "eagle", "as requested")
    told = why(named, stats, missing_draft=None, is_demo=True, is_random=False)
    assert "That made this reply about 98% slower." in told[0]
    assert "type /set method auto" in told[2]


def test_the_status_line_names_only_measured_speed_ups() -> None:
    assert speed_up_short(LIVE, None) == "speed-up 1.6x"
    assert speed_up_short(replace(LIVE, gain_uncertainty=0.3), None) == "speed-up about 1.6x"
    assert speed_up_short(replace(LIVE, gain_uncertainty=0.4), None) == "speed-up on", "it can be chance"
    assert speed_up_short(replace(LIVE, gain=None), Stats()) == "speed-up on"
    assert speed_up_short(replace(LIVE, gain=None), made_up_stats(30)).startswith("speed-up about ")
    assert speed_up_short(LIVE, Stats(drafted_tokens=4)) == "speed-up on", "no guess was accepted yet"
    assert speed_up_short(replace(LIVE, gain=-0.3), Stats(drafted_tokens=4)) == "30% slower"
    assert speed_up_short(OFF, made_up_stats(30)) == "", "/why explains it"
    assert speed_up_short(NONE, made_up_stats(30)) == "speed-up off"


def test_a_reply_of_a_few_tokens_has_no_speed_up() -> None:
    """Its few passes show how busy the machine was, not whether drafting saves time."""
    slow, short = replace(LIVE, gain=-0.19, gain_uncertainty=0.02), made_up_stats(14)
    assert speed_up_short(slow, made_up_stats(30)) == "19% slower"
    assert speed_up_short(slow, short) == "speed-up on"
    assert speed_up_text(slow, short) == speed_up_text(replace(slow, gain=None))
    off = replace(OFF, gain=-0.6, gain_uncertainty=0.04)
    assert "60%" in speed_up_text(off, made_up_stats(30))
    assert "60%" not in speed_up_text(off, short)
    for method in (slow, off):
        told = why(method, short, missing_draft=None, is_demo=False, is_random=True)
        assert "slower" not in told[0]
        assert "saved" not in told[1]
        details = details_content(
            short, 40, method=method, reply=None, rates=[], memory_bytes=1, loss_limits=None
        )
        assert "slower" not in details.plain
        assert "0.81x" not in details.plain


def test_why_fits_a_slower_reply_and_a_short_one() -> None:
    stats = replace(made_up_stats(30), accepted_tokens=3)
    told = why(replace(LIVE, gain=-0.4), stats, missing_draft=None, is_demo=False, is_random=True)
    assert "That made this reply 40% slower (± 8%)." in told[0]
    assert told[1].startswith("Only 3 of 40 guesses were accepted")
    told = why(replace(LIVE, gain=-0.4), made_up_stats(30), missing_draft=None, is_demo=False, is_random=True)
    assert told[1].startswith("29 of 40 guesses were accepted")
    assert "at least as much time" in told[1]
    short = replace(made_up_stats(14), verify_seconds=10.0)
    told = why(replace(LIVE, gain=None), short, missing_draft=None, is_demo=False, is_random=True)
    assert "This reply is too short to tell" in told[0]
    assert "slower" not in told[0]


@pytest.mark.long
async def test_the_legend_names_the_drafters(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path, size=(120, 40)) as d:
        await d.press("f4")
        await d.say("a question")
        await d.said("guessed correctly (draft model + repeated text)")
        await d.said("from the model itself")


@pytest.mark.parametrize("size", first([(80, 24), (40, 20), (200, 60)]))
async def test_a_race_on_the_screen(demo: Load, tmp_path: Path, size: tuple[int, int]) -> None:
    async with driving(demo, tmp_path, size=size, settings={"max_tokens": 24}) as d:
        await d.say(QUESTION)
        await d.say("/why")
        await d.said("Why this speed")
        before = d.chat.current_chat.messages
        await d.send("/race")
        await until(d.pilot, lambda: isinstance(d.app.screen, RaceScreen), "the race")
        await until(d.pilot, lambda: "✓" in "\n".join(d.screen_text()), "the end of the race", 30)
        await d.pilot.pause(0.2)
        shown = d.screen_text()
        assert all(len(line) <= size[0] for line in shown)
        assert "without the speed-up" in " ".join("\n".join(shown).split()) or size[0] == 40
        assert "auto" in "\n".join(shown)
        await d.press("r")
        await until(d.pilot, lambda: "\n".join(d.screen_text()).count("✓") == 2, "the end of the replay", 30)
        await d.press("escape")
        await d.settled()
        assert d.chat.current_chat.messages == before
        await d.say("And the words?")
        assert len(d.chat.current_chat.messages) == 4


@pytest.mark.parametrize("size", first([(40, 20), (80, 24)]))
async def test_a_chat_with_a_head_names_it_and_races_its_method(
    tmp_path: Path, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Measured costs depend on what else is running, and can mean that drafting does not help.
    monkeypatch.setattr(edgespec.Runtime, "pass_costs", {})

    def load(progress: Progress) -> edgespec.Runtime:
        return edgespec.load(
            "demo", "none", method="eagle", head="demo-head", context=512, threads=1, progress=progress
        )

    async with driving(load, tmp_path, size=size, settings={"max_tokens": 24}) as d:
        assert "speed-up: head demo-head" in " ".join(d.transcript().split())
        await d.say(QUESTION)
        await d.say("/why")
        await d.said("edgespec guessed words, from: EAGLE head.")
        await d.say("/show")
        assert "head demo-head" in " ".join(d.transcript().split())
        await d.press("f3")
        await d.sees("demo-head")
        await d.press("f3")
        await d.press("f9")

        def is_named() -> bool:
            words = re.findall(r"[\w-]+", "\n".join(d.screen_text()))
            return "model with the head demo-head" in " ".join(words)

        await until(d.pilot, is_named, "the head")
        await d.press("escape")
        await d.send("/race")
        await until(d.pilot, lambda: isinstance(d.app.screen, RaceScreen), "the race")
        await until(d.pilot, lambda: "✓" in "\n".join(d.screen_text()), "the end of the race", 30)
        assert "eagle" in "\n".join(d.screen_text())
        await d.press("escape")


async def test_a_race_can_be_cancelled_and_the_chat_goes_on(demo: Load, tmp_path: Path) -> None:
    async with driving(demo, tmp_path, settings={"max_tokens": 200}) as d:
        await d.send(f"/race {QUESTION}")
        await until(d.pilot, lambda: isinstance(d.app.screen, RaceScreen), "the race")
        await d.press("escape")
        await until(d.pilot, lambda: not isinstance(d.app.screen, RaceScreen), "the chat")
        assert d.chat.current_chat.messages == ()
        await d.say(QUESTION)
        assert len(d.chat.current_chat.messages) == 2


async def test_a_tick_after_the_end_closes_no_other_screen(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        race: Future[Race] = Future()
        cancelled = CancelledError("the race was cancelled")
        running = RunningRace("auto", QUESTION, race, RaceProgress())
        screen = RaceScreen(running, lambda: race.set_exception(cancelled))
        await d.app.push_screen(screen)
        screen.action_close()
        screen._tick()
        assert d.app.screen is d.chat


@pytest.mark.long
async def test_a_race_without_a_message_and_one_that_fails(demo: Load, tmp_path: Path) -> None:
    async with driving(demo, tmp_path, settings={"acceptance": "rejection"}) as d:
        await d.say("/race")
        await d.said("There is no message to race with yet")
        await d.send(f"/race {QUESTION}")
        await d.sees("rejection")
        await d.press("escape")
        await until(d.pilot, lambda: not isinstance(d.app.screen, RaceScreen), "the chat")
