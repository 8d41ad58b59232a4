"""What is measured, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from edgespec.checks import check_integer
from edgespec.engine.chain import SamplingParams
from edgespec.errors import OptionError
from edgespec.losslessness import Prompt, read_prompts

__all__ = ["AUTO", "CONTROL", "PLAIN", "Plan", "Round", "Way", "bench_prompts", "ways_of"]

_MOST = 1 << 31


@dataclass(frozen=True, slots=True)
class Way:
    """A method at a draft length; None is the runtime's own. again: it is measured a second time."""

    method: str
    draft_length: int | None = None
    again: bool = False

    @property
    def name(self) -> str:
        """What tables call it."""
        length = "" if self.draft_length is None else f" k={self.draft_length}"
        return f"{self.method}{length}{' again' if self.again else ''}"


PLAIN, AUTO = Way("none"), Way("auto")
# What differs from plain decoding no more than this does not differ.
CONTROL = Way("none", again=True)


@dataclass(frozen=True, slots=True)
class Round:
    """One prompt at one temperature, answered in every way, right after one another."""

    prompt: Prompt
    temperature: float
    repeat: int
    ways: tuple[Way, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Every way on every prompt at every temperature, `repeats` times. The seed is the same in all.

    Raises OptionError for what makes no sense.
    """

    prompts: tuple[Prompt, ...]
    ways: tuple[Way, ...]
    temperatures: tuple[float, ...] = (0.0,)
    repeats: int = 2
    max_tokens: int = 64
    seed: int = 1
    acceptance: str = "invariant"

    def __post_init__(self) -> None:
        if not self.prompts or not self.temperatures or PLAIN not in self.ways:
            raise OptionError(
                "there is nothing to measure", "give prompts and temperatures, and none among the methods"
            )
        for what, several in (
            ("prompts", [prompt.name for prompt in self.prompts]),
            ("ways", self.ways),
            ("temperatures", self.temperatures),
        ):
            if len(set(several)) < len(several):
                raise OptionError(f"two of the {what} are the same", "name each once")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)
        check_integer("repeats", self.repeats, 1, _MOST)
        check_integer("max_tokens", self.max_tokens, 1, _MOST)

    @property
    def replies(self) -> int:
        """How many replies are measured in all."""
        return len(self.prompts) * len(self.temperatures) * self.repeats * len(self.ways)

    def rounds(self) -> Iterator[Round]:
        """Every round, so that what ends early has a little of every category.

        Who comes first rotates from round to round, and of two repeats one runs backwards: what drifts
        steadily during a round, as heat does, meets all ways alike.
        """
        for repeat in range(self.repeats):
            turn = repeat // 2
            for prompt in _spread(self.prompts):
                for temperature in self.temperatures:
                    turn += 1
                    at = turn % len(self.ways)
                    ways = self.ways[at:] + self.ways[:at]
                    yield Round(prompt, temperature, repeat, ways if repeat % 2 == 0 else ways[::-1])


def ways_of(
    methods: Sequence[str], draft_lengths: Sequence[int] = (), *, control: bool = False
) -> tuple[Way, ...]:
    """Plain decoding, then each method at each draft length. `auto` has no length: it is to choose.

    control: plain decoding once more, as if it were another method.
    """
    ways = [PLAIN, CONTROL] if control else [PLAIN]
    for method in methods:
        lengths = (None,) if method in (PLAIN.method, AUTO.method) else draft_lengths or (None,)
        ways += [Way(method, length) for length in lengths]
    return tuple(dict.fromkeys(ways))


def bench_prompts() -> list[Prompt]:
    """The prompts that come with edgespec for this: three of each of eight categories."""
    return read_prompts(Path(__file__).with_name("prompts.jsonl"))


def _spread(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first of each category, then the second of each, and so on."""
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    return [prompt for row in zip_longest(*by_category.values()) for prompt in row if prompt is not None]
