"""Plan a benchmark: which prompts and methods to run, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest
from pathlib import Path

from edgespec.errors import OptionError
from edgespec.losslessness import Prompt, read_prompts

__all__ = [
    "AUTO",
    "CONTROL",
    "PLAIN",
    "BenchPlan",
    "BenchRound",
    "MethodConfig",
    "bench_prompts",
    "method_configs",
]


@dataclass(frozen=True, slots=True)
class MethodConfig:
    """A method to measure, with its draft length.

    Attributes:
        method: Name of the method, as in `--method`.
        draft_length: Draft length in tokens. Defaults to the runtime's draft length.
        again: Whether this is a second measurement of plain decoding, to estimate the noise.
    """

    method: str
    draft_length: int | None = None
    again: bool = False

    @property
    def name(self) -> str:
        """Return the name of the configuration in tables, such as `model k=4`."""
        length = "" if self.draft_length is None else f" k={self.draft_length}"
        return f"{self.method}{length}{' again' if self.again else ''}"


PLAIN, AUTO = MethodConfig("none"), MethodConfig("auto")
# The second measurement of plain decoding. Its difference from the first shows the measurement noise.
CONTROL = MethodConfig("none", again=True)


@dataclass(frozen=True, slots=True)
class BenchRound:
    """One prompt at one temperature, answered once per method configuration."""

    prompt: Prompt
    temperature: float
    repeat: int
    configs: tuple[MethodConfig, ...]


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """A plan to run every method configuration on every prompt at every temperature, several times.

    Attributes:
        prompts: Prompts to answer, with unique names.
        configs: Method configurations. Plain decoding must be one of them.
        temperatures: Sampling temperatures. Every prompt is answered at each temperature in every repeat.
        repeats: Number of times the whole plan runs.
        max_tokens: Maximum reply length in tokens.
        seed: Random seed for every reply.
        acceptance: The rule for accepting draft tokens, `invariant` or `rejection`.

    Raises:
        OptionError: The plan is empty, lacks plain decoding, or lists an entry twice.
    """

    prompts: tuple[Prompt, ...]
    configs: tuple[MethodConfig, ...]
    temperatures: tuple[float, ...] = (0.0,)
    repeats: int = 2
    max_tokens: int = 64
    seed: int = 1
    acceptance: str = "invariant"

    def __post_init__(self) -> None:
        if not self.prompts or not self.temperatures or PLAIN not in self.configs:
            raise OptionError(
                "the benchmark has nothing to measure",
                "specify at least one prompt and one temperature, and list none among the methods",
            )
        for kind, entries in (
            ("prompts", [prompt.name for prompt in self.prompts]),
            ("methods", [config.name for config in self.configs]),
            ("temperatures", self.temperatures),
        ):
            if len(set(entries)) < len(entries):
                twice = next(entry for at, entry in enumerate(entries) if entry in entries[:at])
                raise OptionError(f"the list of {kind} contains {twice} twice", "list each entry once")

    @property
    def replies(self) -> int:
        """Return the total number of replies in the plan."""
        return len(self.prompts) * len(self.temperatures) * self.repeats * len(self.configs)

    def rounds(self) -> Iterator[BenchRound]:
        """Yield all rounds of the benchmark. Each round answers one prompt with every configuration.

        The order of the configurations changes from round to round, so that a gradual slowdown of the
        machine, such as thermal throttling, affects all of them equally. Categories alternate, so that a
        partial run covers all of them.
        """
        for repeat in range(self.repeats):
            pairs = product(_spread(self.prompts), self.temperatures)
            for turn, (prompt, temperature) in enumerate(pairs, repeat // 2 + 1):
                at = turn % len(self.configs)
                configs = self.configs[at:] + self.configs[:at]
                yield BenchRound(prompt, temperature, repeat, configs[::-1] if repeat % 2 else configs)


def method_configs(
    methods: Sequence[str], draft_lengths: Sequence[int] = (), *, control: bool = False
) -> tuple[MethodConfig, ...]:
    """Return the configurations to measure: plain decoding first, then each method and draft length.

    Args:
        methods: Method names. `auto` and `none` have no draft length.
        draft_lengths: Draft lengths in tokens. If empty, the runtime's default is used.
        control: Whether to measure plain decoding a second time, to show the measurement noise.
    """
    configs = [PLAIN, CONTROL] if control else [PLAIN]
    for method in methods:
        lengths = (None,) if method in (PLAIN.method, AUTO.method) else draft_lengths or (None,)
        configs += [MethodConfig(method, length) for length in lengths]
    return tuple(dict.fromkeys(configs))


def bench_prompts() -> list[Prompt]:
    """Return the built-in benchmark prompts: three in each of eight categories."""
    return read_prompts(Path(__file__).with_name("prompts.jsonl"))


def _spread(prompts: Sequence[Prompt]) -> list[Prompt]:
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    return [prompt for row in zip_longest(*by_category.values()) for prompt in row if prompt is not None]
