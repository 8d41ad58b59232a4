"""Speeds and speed ratios of the measured replies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from edgespec.bench.figures import geometric_mean, interval, worst
from scripts.peers.configurations import Configuration
from scripts.peers.replies import Run

# Minimum number of tokens for computing a speed. In a shorter reply, a single delay would dominate the
# result.
_MIN_TOKENS = 4

Speed = Callable[[Run], float | None]


@dataclass(frozen=True)
class MeasuredReply:
    """One reply of one configuration.

    Attributes:
        configuration: The program and its configuration.
        prompt: Name of the prompt.
        category: Category of the prompt.
        temperature: Sampling temperature.
        repeat: Index of the repeat.
        run: Tokens and times.
        ended: Whether the last token is an end-of-reply token.
    """

    configuration: Configuration
    prompt: str
    category: str
    temperature: float
    repeat: int
    run: Run
    ended: bool

    @property
    def text_tokens(self) -> tuple[int, ...]:
        """The tokens without an end-of-reply token, because not all programs return it."""
        return self.run.tokens[:-1] if self.ended else self.run.tokens

    def to_json(self) -> dict[str, object]:
        """Return all fields for the JSON output."""
        fields = {name: value for name, value in asdict(self).items() if name != "configuration"}
        return {"program": self.configuration.program, "configuration": self.configuration.name, **fields}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> MeasuredReply:
        """Read back what `to_json` returned."""
        others = {**fields}
        configuration = Configuration(others.pop("program"), others.pop("configuration"))
        run = others.pop("run")
        return cls(configuration=configuration, run=Run(**run | {"tokens": tuple(run["tokens"])}), **others)


def decode_speed(run: Run) -> float | None:
    """Return tokens per second after the first round, or None for fewer than four tokens."""
    enough = run.later_tokens >= _MIN_TOKENS and run.later_seconds > 0
    return run.later_tokens / run.later_seconds if enough else None


def total_speed(run: Run) -> float | None:
    """Return tokens per second including prefill, or None for fewer than four tokens."""
    return len(run.tokens) / run.seconds if len(run.tokens) >= _MIN_TOKENS else None


class Speeds:
    """Speeds of every configuration by prompt and repeat, at one temperature."""

    def __init__(self, replies: Iterable[MeasuredReply], speed: Speed) -> None:
        self._speeds: dict[Configuration, dict[tuple[str, int], float]] = defaultdict(dict)
        self._categories: dict[str, str] = {}
        for reply in replies:
            rate = speed(reply.run)
            if rate is not None:
                self._speeds[reply.configuration][reply.prompt, reply.repeat] = rate
                self._categories[reply.prompt] = reply.category

    def mean(self, configuration: Configuration) -> float | None:
        """Return the geometric mean of the prompts' median speeds, or None if there are no replies."""
        by_prompt: dict[str, list[float]] = defaultdict(list)
        for (prompt, _), rate in self._speeds[configuration].items():
            by_prompt[prompt].append(rate)
        return geometric_mean(list(by_prompt.values())) if by_prompt else None

    def ratios(self, configuration: Configuration, baseline: Configuration) -> dict[str, list[float]]:
        """Return the speed-up over the baseline, by prompt, for the repeats that both have completed."""
        by_prompt: dict[str, list[float]] = defaultdict(list)
        for key, rate in self._speeds[configuration].items():
            if key in self._speeds[baseline]:
                by_prompt[key[0]].append(rate / self._speeds[baseline][key])
        return dict(by_prompt)

    def category(self, prompt: str) -> str:
        """Return the category of a measured prompt."""
        return self._categories[prompt]


@dataclass(frozen=True)
class Comparison:
    """Speed-up of one configuration over another.

    Attributes:
        ratio: Geometric mean over prompts.
        low: Lower end of the 95 % interval (bootstrap over prompts and repeats).
        high: Upper end of the 95 % interval.
        worst: Lowest ratio of any prompt.
        categories: Geometric mean of each category.
    """

    ratio: float
    low: float
    high: float
    worst: float
    categories: dict[str, float]

    def __str__(self) -> str:
        return f"{self.ratio:.3f}x [{self.low:.3f}, {self.high:.3f}]"


def compare(speeds: Speeds, configuration: Configuration, baseline: Configuration) -> Comparison | None:
    """Return the speed-up over the baseline, or None if they have no prompt in common."""
    ratios = speeds.ratios(configuration, baseline)
    if not ratios:
        return None
    by_category: dict[str, list[Sequence[float]]] = defaultdict(list)
    for prompt, repeats in ratios.items():
        by_category[speeds.category(prompt)].append(repeats)
    all_ratios = list(ratios.values())
    # A single reply has no confidence interval.
    low, high = interval(all_ratios) or (0.0, float("inf"))
    means = {name: geometric_mean(each) for name, each in sorted(by_category.items())}
    return Comparison(geometric_mean(all_ratios), low, high, worst(all_ratios), means)


def fastest(speeds: Speeds, configurations: Iterable[Configuration]) -> Configuration | None:
    """Return the configuration with the highest mean speed over all prompts, or None."""
    means = {each: mean for each in configurations if (mean := speeds.mean(each)) is not None}
    return max(means, key=lambda each: means[each]) if means else None


def count_equal(
    replies: Sequence[MeasuredReply], configuration: Configuration, baseline: Configuration
) -> tuple[int, int]:
    """Return the number of equal replies of two configurations, and the number of compared replies."""
    expected = {
        (reply.prompt, reply.repeat): reply.text_tokens
        for reply in replies
        if reply.configuration == baseline
    }
    pairs = [
        (reply.text_tokens, expected[reply.prompt, reply.repeat])
        for reply in replies
        if reply.configuration == configuration and (reply.prompt, reply.repeat) in expected
    ]
    return sum(a == b for a, b in pairs), len(pairs)
