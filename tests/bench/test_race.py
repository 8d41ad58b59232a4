"""Races: both replies have the same text, and the saved pictures show the measured speeds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

import edgespec
from edgespec.bench.race import Lane, Race, RaceChunk, run_race
from edgespec.bench.race_pictures import Picture, save_picture
from edgespec.errors import CancelledError, OptionError
from tests.raising import raises

PROMPT = "How do I count the lines of a file?"


@pytest.fixture(scope="module")
def demo() -> Iterator[edgespec.Runtime]:
    with edgespec.load("demo", threads=1) as runtime:
        yield runtime


def raced(runtime: edgespec.Runtime, method: str = "auto", **options: object) -> Race:
    return run_race(
        lambda **each: runtime.stream(PROMPT, **each), {"max_tokens": 40, **options}, method=method
    )


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", ["auto", "model", "suffix"])
def test_both_replies_are_those_of_plain_decoding(
    demo: edgespec.Runtime, temperature: float, method: str
) -> None:
    race = raced(demo, method, temperature=temperature, seed=5)
    plain = demo.generate(PROMPT, temperature=temperature, seed=5, max_tokens=40, method="none")
    assert race.is_same_text
    assert race.plain.reply.tokens == race.other.reply.tokens == plain.tokens
    assert race.plain.text == plain.text
    assert race.plain.reply.seed == race.other.reply.seed == 5
    assert race.plain.reply.stats.drafted_tokens == 0
    assert (race.plain.reply.method.requested, race.other.reply.method.requested) == ("none", method)


def test_a_seed_is_drawn_for_both(demo: edgespec.Runtime) -> None:
    race = raced(demo, temperature=0.8)
    assert race.plain.reply.seed == race.other.reply.seed
    assert race.is_same_text


def test_both_find_the_prompt_in_the_cache(demo: edgespec.Runtime) -> None:
    demo.clear_cache()
    race = raced(demo)
    cached = {lane.reply.stats.cached_prompt_tokens for lane in (race.plain, race.other)}
    assert len(cached) == 1
    assert cached.pop() > 0


def test_a_race_can_be_cancelled_at_any_time(demo: edgespec.Runtime) -> None:
    calls = 0
    raced(demo)
    for last in (0, 1, 5, 20, 60):
        calls = 0

        def progress(_description: str, _fraction: float, last: int = last) -> bool:
            nonlocal calls
            calls += 1
            return calls <= last

        with pytest.raises(CancelledError):
            run_race(lambda **each: demo.stream(PROMPT, **each), {"max_tokens": 40}, progress=progress)
    assert raced(demo).is_same_text


def test_what_cannot_be_raced_is_refused(demo: edgespec.Runtime) -> None:
    with raises(OptionError, "none"):
        raced(demo, "none")
    with raises(OptionError, code="option_conflict"):
        raced(demo, acceptance="rejection")


def race_of(race: Race, plain_seconds: float, other_seconds: float, drift: float | None = 0.0) -> Race:
    """Return the race with changed times, as if each token had taken this long."""

    def lane(of: Lane, seconds: float) -> Lane:
        chunks = [
            RaceChunk((place + 1) * seconds, chunk.text, 1, chunk.accepted)
            for place, chunk in enumerate(of.chunks)
        ]
        return replace(of, chunks=tuple(chunks))

    return Race(lane(race.plain, plain_seconds), lane(race.other, other_seconds), drift)


@pytest.fixture(scope="module")
def finished(demo: edgespec.Runtime) -> Race:
    return raced(demo, "model", temperature=0.0)


def test_the_headline_is_honest(finished: Race) -> None:
    assert race_of(finished, 0.02, 0.01).headline().startswith("model was 2.00x as fast as plain decoding")
    slower = race_of(finished, 0.01, 0.02)
    stats = finished.other.reply.stats
    accepted = f"accepted {stats.accepted_tokens} of {stats.drafted_tokens} drafted tokens"
    assert slower.headline().startswith("model was slower here (0.50x): ")
    assert slower.headline().endswith(f"{accepted}, which was not enough to save time.")
    assert race_of(finished, 0.0100, 0.0099).headline().startswith("model was no faster here")
    assert not slower.is_faster


def test_without_accepted_tokens_a_race_claims_nothing(finished: Race) -> None:
    race = with_drafts(finished, drafted=12)
    same = race_of(race, 0.01, 0.01)
    assert same.headline().startswith("model was no faster here: ")
    assert same.headline().endswith("accepted 0 of 12 drafted tokens, which was not enough to save time.")
    assert same.chat_headline().endswith(
        "accepted 0 of 12 guessed tokens, which was not enough to save time."
    )
    faster = race_of(race, 0.01, 0.009)
    assert "so its higher speed comes from the machine" in faster.headline()
    assert not faster.is_faster
    assert race_of(race, 0.01, 0.02).headline().startswith("model was slower here (0.50x): ")


def test_without_drafts_only_the_machine_explains_a_difference(finished: Race) -> None:
    race = with_drafts(finished, drafted=0)
    for seconds in (0.009, 0.02):
        headline = race_of(race, 0.01, seconds).headline()
        assert headline.startswith(
            "model drafted no tokens here, so any difference in speed comes from the machine: "
        )
        assert headline.endswith(f"Reason for not drafting: {finished.other.reply.method.reason}.")
        guess = race_of(race, 0.01, seconds).chat_headline()
        assert guess.startswith(
            "model guessed no tokens here, so any difference in speed comes from the machine: "
        )


@pytest.mark.parametrize(("seconds", "exceeds"), [(0.0106, False), (0.02, True)])
def test_a_slower_race_states_the_loss_limit(finished: Race, seconds: float, *, exceeds: bool) -> None:
    race = with_drafts(finished, drafted=2, loss_limits=(0.05, 2.0))
    headline = race_of(race, 0.01, seconds).headline()
    assert "Trying drafts may slow a reply down by 5% plus the time needed to generate 2 tokens" in headline
    assert headline.endswith("so the rest is probably due to the machine.") == exceeds


def with_drafts(race: Race, *, drafted: int, loss_limits: tuple[float, float] | None = None) -> Race:
    """Return the race as if the other method had drafted this many tokens, all of them rejected."""
    reply = race.other.reply
    stats = replace(reply.stats, drafted_tokens=drafted, accepted_tokens=0)
    method = replace(reply.method, loss_limits=loss_limits)
    return replace(race, other=replace(race.other, reply=replace(reply, stats=stats, method=method)))


def test_the_remarks_say_how_the_race_was_run(finished: Race) -> None:
    remarks = " ".join(race_of(finished, 0.01, 0.01).remarks())
    assert "Both replies are identical" in remarks
    assert "one after the other" in remarks


def test_a_race_on_a_disturbed_machine_claims_nothing(finished: Race) -> None:
    for drift, said in ((0.5, "became 50% slower"), (-2.0, "became 200% faster")):
        race = race_of(finished, 0.02, 0.01, drift)
        assert race.headline().startswith("The comparison was not fair, because ")
        assert said in race.headline()
        assert not race.is_faster
        assert not race.is_fair
    # Drafting alone cannot make a reply a hundred times as fast.
    race = race_of(finished, 1.0, 0.01)
    assert race.headline().startswith(
        "The comparison was not fair, because the machine became faster during the race."
    )
    assert not race.is_faster
    assert race_of(finished, 0.02, 0.01, 0.1).is_faster
    assert race_of(finished, 0.02, 0.01, None).is_faster


def test_different_replies_are_reported(finished: Race) -> None:
    tokens = (*finished.plain.reply.tokens[:7], 0)
    plain = replace(finished.plain, reply=replace(finished.plain.reply, tokens=tokens))
    race = replace(finished, plain=plain)
    assert not race.is_same_text
    assert race.remarks()[0].startswith("The replies differ after 7 tokens.")


def screen_at(picture: Picture, seconds: float) -> list[str]:
    """Return the rows that a terminal shows at this time."""
    rows = [[" "] * picture.columns for _ in range(picture.rows)]
    for event in picture.events:
        if event.seconds <= seconds:
            rows[event.row][event.column : event.column + len(event.text)] = event.text
    return ["".join(row).rstrip() for row in rows]


@pytest.mark.parametrize("columns", [40, 100, 250])
def test_a_terminal_shows_both_texts_at_their_speeds(finished: Race, columns: int) -> None:
    race = race_of(finished, 0.02, 0.01)
    picture = Picture(race, PROMPT, columns)
    end = screen_at(picture, 1e9)
    middle = columns // 2 + 1
    words = [
        " ".join(" ".join(part).split())
        for part in zip(*((r[:middle], r[middle:]) for r in end), strict=True)
    ]
    start = " ".join(race.plain.text.split())[:20]
    assert start in words[0]
    assert start in words[1]
    assert race.headline()[:18] in "\n".join(end)
    half = screen_at(picture, race.other.seconds)
    assert f"{len(race.other.chunks)} tokens"[: columns // 2 - 20] in "\n".join(half)
    assert race.headline()[:18] not in "\n".join(half)


def test_the_saved_picture_is_valid_and_shows_the_end(finished: Race, tmp_path: Path) -> None:
    race = race_of(finished, 0.02, 0.01)
    save_picture(race, "<b> & \x1b[31m", tmp_path / "race.svg")
    root = ET.parse(tmp_path / "race.svg").getroot()
    texts = list(root.iter("{http://www.w3.org/2000/svg}text"))
    shown = [text.text or "" for text in texts]
    assert "> <b> & [31m" in shown
    assert any(text.startswith("model was 2.00x") for text in shown)
    placed = [(float(text.get("y", "")), float(text.get("x", "")), text.text or "") for text in texts]
    left = "".join(text for _, x, text in sorted(placed) if x < 400)
    assert "".join(race.plain.text.split())[:15] in "".join(left.split())
    assert [text.endswith("✓") for text in shown if "tokens in" in text] == [True, True]


def test_wide_characters_and_long_words_stay_in_their_columns(finished: Race) -> None:
    chunks = tuple(
        RaceChunk(0.01 * (i + 1), text, 1, True)
        for i, text in enumerate(["日本語の" * 9, "x" * 90, "\ta b\n\nc"])
    )
    race = Race(replace(finished.plain, chunks=chunks), replace(finished.other, chunks=chunks), None)
    picture = Picture(race, PROMPT, 60)
    from rich.cells import cell_len

    for event in picture.events:
        assert event.column + cell_len(event.text) <= 60
        if event.column == 0 and event.style in ("32", "33"):
            assert cell_len(event.text) <= 28


@pytest.mark.parametrize("name", ["race.png", "race.cast", "race", "missing/race.svg"])
def test_other_file_names_are_refused(finished: Race, tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError):
        save_picture(finished, PROMPT, tmp_path / name)
