"""What drafters would say of a text: where they are right, how sure they are, and where they say nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["Text", "Trace", "flips", "passages", "recorded", "replies", "stationary", "stretches"]


@dataclass(frozen=True, slots=True)
class Trace:
    """What one drafter says of a reply of so many tokens.

    right: bool [n], its best guess for each is the target's token. sure: float64 [n], in [0, 1], the
    probability that it gives to that guess. speaks: bool [n], it guesses there; None: everywhere.
    """

    right: NDArray[np.bool_]
    sure: NDArray[np.float64]
    speaks: NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """A reply to a prompt of so many tokens, and what a draft model and a lookup say of it."""

    name: str
    model: Trace
    lookup: Trace | None = None
    prompt_tokens: int = 1

    @property
    def length(self) -> int:
        """Tokens of the reply."""
        return len(self.model.right)

    def after(self, prompt_tokens: int) -> Text:
        """The same reply to a longer prompt."""
        return replace(self, prompt_tokens=prompt_tokens)


def stationary(rate: float, length: int, seed: int, *, informed: bool = True) -> Text:
    """A draft that is right at one rate. informed: it is surer where it is right."""
    return stretches([rate], length, seed, informed=informed)


def flips(first: float, then: float, every: int, length: int, seed: int) -> Text:
    """Rates that change after every so many tokens."""
    return stretches([(first, then)[at % 2] for at in range(-(-length // every))], length, seed)


def stretches(rates: Sequence[float], length: int, seed: int, *, informed: bool = True) -> Text:
    """Stretches of equal length, each with a rate of its own.

    How sure it is, is drawn from a Beta law around the rate; where it is informed, right and wrong are then
    drawn with that very chance, as by a draft whose probabilities are true.
    """
    random = np.random.default_rng(seed)
    at = np.array([rates[i * len(rates) // length] for i in range(length)])
    weight = 2.0 if informed else 400.0
    sure = random.beta(weight * at + 1e-3, weight * (1.0 - at) + 1e-3)
    chance = sure if informed else at
    name = " then ".join(f"{rate:g}" for rate in dict.fromkeys(rates))
    return Text(name, Trace(random.random(length) < chance, sure))


def passages(
    text: Text, share: float, passage_tokens: int, seed: int, *, right: float = 0.97, stray: float = 0.05
) -> Text:
    """The same reply, of which a share is copied in passages that a lookup finds.

    There it is right at a rate of `right`; elsewhere it finds something, mostly wrong, at the share `stray`
    of places.
    """
    random = np.random.default_rng(seed)
    length = text.length
    copied = np.zeros(length, np.bool_)
    while copied.mean() < share:
        start = int(random.integers(0, length))
        copied[start : start + passage_tokens] = True
    speaks = copied | (random.random(length) < stray)
    hits = random.random(length) < np.where(copied, right, 0.2)
    lookup = Trace(hits, np.where(copied, right, 0.2), speaks)
    return replace(text, name=f"{text.name}, {share:.0%} copied", lookup=lookup)


@cache
def replies(temperature: float) -> tuple[Text, ...]:
    """What the demo draft said of the demo target's replies to held-out prompts, at temperature 0 or 0.8.

    Each by itself, after its own prompt. `scripts/record_traces.py` made the file.
    """
    recordings = json.loads((Path(__file__).parent / "recorded.json").read_text(encoding="utf-8"))
    return tuple(
        Text(
            one["name"],
            Trace(np.array([each == "1" for each in one["right"]]), np.array(one["sure_percent"]) / 100.0),
            prompt_tokens=one["prompt_tokens"],
        )
        for one in recordings
        if one["temperature"] == temperature
    )


@cache
def recorded(temperature: float) -> tuple[Text, ...]:
    """The same replies, as one text for each skill, such as code: they are short."""
    skills: dict[str, list[Trace]] = {}
    for reply in replies(temperature):
        skills.setdefault(reply.name, []).append(reply.model)
    return tuple(
        Text(
            f"{name}, T {temperature:g}",
            Trace(np.concatenate([one.right for one in said]), np.concatenate([one.sure for one in said])),
        )
        for name, said in skills.items()
    )
