"""Simulated replies: where each drafter is right, how confident it is, and where it drafts nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Trace:
    """One drafter's predictions for a reply of n tokens.

    Attributes:
        is_right: Whether the drafter's most likely token is the target's, bool [n].
        confidence: The drafter's probability of that token, float64 [n].
        has_draft: Whether the drafter drafts at this position, bool [n]; None for all positions.
    """

    is_right: NDArray[np.bool_]
    confidence: NDArray[np.float64]
    has_draft: NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """A reply, with the predictions of a draft model and of other drafters.

    Attributes:
        lookup: The predictions of the lookup drafter, if there is one.
        others: The predictions of further draft models and heads, by name.
    """

    name: str
    model: Trace
    lookup: Trace | None = None
    prompt_tokens: int = 1
    others: Mapping[str, Trace] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Number of tokens in the reply."""
        return len(self.model.is_right)

    def after(self, prompt_tokens: int) -> Text:
        """Return the same reply to a prompt of another length."""
        return replace(self, prompt_tokens=prompt_tokens)


def stationary(rate: float, length: int, seed: int, *, informed: bool = True) -> Text:
    """Return a reply with a constant acceptance rate; see `stretches`."""
    return stretches([rate], length, seed, informed=informed)


def flips(first: float, then: float, every: int, length: int, seed: int) -> Text:
    """Return a reply whose acceptance rate switches between two values every `every` tokens."""
    return stretches([(first, then)[at % 2] for at in range(-(-length // every))], length, seed)


def stretches(rates: Sequence[float], length: int, seed: int, *, informed: bool = True) -> Text:
    """Return a reply in stretches of equal length, each with its own acceptance rate.

    Args:
        rates: Acceptance rate of each stretch. The confidence is drawn from a Beta distribution around it.
        length: Tokens of the reply.
        seed: Seed of the random numbers.
        informed: Whether the draft model's confidence is the true probability that its prediction is right.
    """
    random = np.random.default_rng(seed)
    rate = np.array([rates[i * len(rates) // length] for i in range(length)])
    weight = 2.0 if informed else 400.0
    confidence = random.beta(weight * rate + 1e-3, weight * (1.0 - rate) + 1e-3)
    chance = confidence if informed else rate
    name = " then ".join(f"{each:g}" for each in dict.fromkeys(rates))
    return Text(name, Trace(random.random(length) < chance, confidence))


def passages(
    text: Text, share: float, passage_tokens: int, seed: int, *, right: float = 0.97, stray: float = 0.05
) -> Text:
    """Return the same reply with copied passages, which a lookup drafter predicts.

    Args:
        text: The reply.
        share: Share of the reply that is copied.
        passage_tokens: Tokens of a passage.
        seed: Seed of the random numbers.
        right: Acceptance rate of the lookup drafter within passages.
        stray: Share of other positions where the lookup drafter drafts too, mostly wrongly.
    """
    random = np.random.default_rng(seed)
    length = text.length
    copied = np.zeros(length, np.bool_)
    while copied.mean() < share:
        start = int(random.integers(0, length))
        copied[start : start + passage_tokens] = True
    has_draft = copied | (random.random(length) < stray)
    hits = random.random(length) < np.where(copied, right, 0.2)
    lookup = Trace(hits, np.where(copied, right, 0.2), has_draft)
    return replace(text, name=f"{text.name}, {share:.0%} copied", lookup=lookup)


@cache
def replies(temperature: float) -> tuple[Text, ...]:
    """Return the demo target's replies to held-out prompts, with the demo draft model's predictions.

    `scripts/record_traces.py` recorded them at temperature 0 and 0.8.
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
    """Return the recorded replies, joined into one long reply per skill, such as code."""
    skills: dict[str, list[Trace]] = {}
    for reply in replies(temperature):
        skills.setdefault(reply.name, []).append(reply.model)
    return tuple(
        Text(
            f"{name}, T {temperature:g}",
            Trace(
                np.concatenate([trace.is_right for trace in traces]),
                np.concatenate([trace.confidence for trace in traces]),
            ),
        )
        for name, traces in skills.items()
    )
