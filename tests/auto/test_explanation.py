"""The reason of a reply says what is so, with the numbers of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.auto.explanation import DraftingStatus

# A large target in the middle of a reply, and nothing guessed yet.
START = DraftingStatus(
    name="model+suffix",
    drafts=False,
    gains=False,
    tokens=20,
    guessed=False,
    asked=0,
    held_back=0,
    guess_steps=1.5,
    may_lose_steps=2.4,
    round_steps=0.0,
    plain_seconds=0.05,
)
GUESSED = replace(START, drafts=True, guessed=True, asked=6, round_steps=-0.2)


@pytest.mark.parametrize(
    ("standing", "reason"),
    [
        (replace(GUESSED, gains=True), "guesses pay here"),
        (replace(GUESSED, gains=True, replies=3), "guesses pay here, among 3 replies at once"),
        (GUESSED, "guesses are being tried, and have not paid so far"),
        (replace(GUESSED, drafts=False), "guesses do not pay: a round with one lost 20% of a plain step"),
        (
            replace(GUESSED, drafts=False, gains=True, round_steps=-1.3),
            "guesses no longer pay: a round with one lost 1.3 plain steps",
        ),
        (replace(START, tokens=0), "what a plain step takes is measured first"),
        (replace(START, tokens=1), "what a plain step takes is measured first"),
        (
            replace(START, round_steps=-0.2),
            "guesses have not paid lately; model+suffix is tried again now and then",
        ),
        (
            replace(START, asked=4),
            "model+suffix had no guess that was likely to pay, the 4 times it was asked",
        ),
        (
            replace(START, asked=1),
            "model+suffix had no guess that was likely to pay, the one time it was asked",
        ),
        (
            replace(START, held_back=9, guess_steps=3.25),
            "a wrong guess may cost 3.2 plain steps, and this reply may lose 2.4 by now",
        ),
        (
            replace(GUESSED, drafts=False, held_back=9, may_lose_steps=-0.1),
            "what guessing may cost this reply (--max-loss) is used up",
        ),
        (
            replace(GUESSED, plain_seconds=0.00061),
            "this target is so small (0.61 ms a token) that guessing costs more than it brings",
        ),
        (replace(GUESSED, plain_seconds=0.00061, gains=True), "guesses pay here"),
    ],
)
def test_a_reason(standing: DraftingStatus, reason: str) -> None:
    assert standing.reason == reason


@given(
    st.builds(
        DraftingStatus,
        name=st.just("suffix"),
        tokens=st.integers(0, 100),
        asked=st.integers(0, 20),
        held_back=st.integers(0, 20),
        guess_steps=st.floats(0, 1e3),
        may_lose_steps=st.floats(-1e3, 1e3),
        round_steps=st.floats(-1e3, 1e3),
        plain_seconds=st.floats(1e-6, 10),
    )
)
def test_there_is_always_one_and_it_fits_a_line(standing: DraftingStatus) -> None:
    assert 0 < len(standing.reason) < 100
    assert "\n" not in standing.reason
