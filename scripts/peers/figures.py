"""Speeds and ratios of what was measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from edgespec.bench.statistics import geometric_mean, interval, worst
from scripts.peers.configurations import Configuration
from scripts.peers.replies import Run

__all__ = [
    "Comparison",
    "Measured",
    "Speed",
    "Speeds",
    "alike",
    "compare",
    "decode_speed",
    "fastest",
    "whole_speed",
]

# A rate of fewer tokens says little, and one slow moment would weigh as much as a long reply.
_FEWEST_TOKENS = 4

Speed = Callable[[Run], float | None]


@dataclass(frozen=True)
class Measured:
    """One reply of one configuration. ended: its last token ends it and is no text."""

    configuration: Configuration
    prompt: str
    category: str
    temperature: float
    repeat: int
    run: Run
    ended: bool

    @property
    def text_tokens(self) -> tuple[int, ...]:
        """What was said, without the token that ends it: programs differ in showing it."""
        return self.run.tokens[:-1] if self.ended else self.run.tokens

    def to_json(self) -> dict[str, object]:
        """All of it by name."""
        named = {name: value for name, value in asdict(self).items() if name != "configuration"}
        return {"program": self.configuration.program, "configuration": self.configuration.name, **named}


def decode_speed(run: Run) -> float | None:
    """Tokens per second after the first round; None where there are too few."""
    fine = run.later_tokens >= _FEWEST_TOKENS and run.later_seconds > 0
    return run.later_tokens / run.later_seconds if fine else None


def whole_speed(run: Run) -> float | None:
    """Tokens per second of the whole reply, reading the prompt included."""
    return len(run.tokens) / run.seconds if len(run.tokens) >= _FEWEST_TOKENS else None


class Speeds:
    """Speeds of every configuration, by prompt and repeat, at one temperature."""

    def __init__(self, measured: Iterable[Measured], speed: Speed) -> None:
        self._speeds: dict[Configuration, dict[tuple[str, int], float]] = defaultdict(dict)
        self._categories: dict[str, str] = {}
        for each in measured:
            rate = speed(each.run)
            if rate is not None:
                self._speeds[each.configuration][each.prompt, each.repeat] = rate
                self._categories[each.prompt] = each.category

    def mean(self, configuration: Configuration) -> float | None:
        """The geometric mean over prompts of the median over repeats; None where nothing was measured."""
        by_prompt: dict[str, list[float]] = defaultdict(list)
        for (prompt, _), rate in self._speeds[configuration].items():
            by_prompt[prompt].append(rate)
        return geometric_mean(list(by_prompt.values())) if by_prompt else None

    def ratios(self, one: Configuration, other: Configuration) -> dict[str, list[float]]:
        """Of each prompt, how many times faster the one was than the other, in each repeat that both have."""
        by_prompt: dict[str, list[float]] = defaultdict(list)
        for moment, rate in self._speeds[one].items():
            if moment in self._speeds[other]:
                by_prompt[moment[0]].append(rate / self._speeds[other][moment])
        return dict(by_prompt)

    def category(self, prompt: str) -> str:
        """Of a prompt that was measured."""
        return self._categories[prompt]


@dataclass(frozen=True)
class Comparison:
    """How many times faster one configuration is than another.

    ratio: geometric mean over prompts; low, high: its 95 % interval (a bootstrap over prompts and repeats).
    worst: the least of all prompts. categories: the geometric mean of each.
    """

    ratio: float
    low: float
    high: float
    worst: float
    categories: dict[str, float]

    def __str__(self) -> str:
        return f"{self.ratio:.3f}x [{self.low:.3f}, {self.high:.3f}]"


def compare(speeds: Speeds, one: Configuration, other: Configuration) -> Comparison | None:
    """None where they have no prompt in common."""
    ratios = speeds.ratios(one, other)
    if not ratios:
        return None
    by_category: dict[str, list[Sequence[float]]] = defaultdict(list)
    for prompt, each in ratios.items():
        by_category[speeds.category(prompt)].append(each)
    every = list(ratios.values())
    # One reply tells nothing of how far others would be from it.
    low, high = interval(every) or (0.0, float("inf"))
    means = {name: geometric_mean(each) for name, each in sorted(by_category.items())}
    return Comparison(geometric_mean(every), low, high, worst(every), means)


def fastest(speeds: Speeds, configurations: Iterable[Configuration]) -> Configuration | None:
    """The one that is fastest on all prompts together: what hindsight would have set once for all."""
    means = {each: mean for each in configurations if (mean := speeds.mean(each)) is not None}
    return max(means, key=lambda each: means[each]) if means else None


def alike(measured: Sequence[Measured], one: Configuration, other: Configuration) -> tuple[int, int]:
    """In how many of how many replies both said the same tokens."""
    said = {(each.prompt, each.repeat): each.text_tokens for each in measured if each.configuration == other}
    pairs = [
        (each.text_tokens, said[each.prompt, each.repeat])
        for each in measured
        if each.configuration == one and (each.prompt, each.repeat) in said
    ]
    return sum(a == b for a, b in pairs), len(pairs)
