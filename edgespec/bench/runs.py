"""Plan and run a benchmark, one reply at a time, clearing the prefix cache before each reply.

The plan determines which prompts and methods to run, and in which order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product, zip_longest
from pathlib import Path
from time import monotonic, perf_counter
from typing import Literal

from edgespec.api.runtime import Runtime
from edgespec.bench.constants import WARM_UP_TOKENS
from edgespec.decode.reply import Reply
from edgespec.errors import CancelledError, ContextFullError, EdgespecError, OptionError
from edgespec.losslessness.cases import Prompt, prompt_tokens, read_prompts
from edgespec.methods.costs.curve import CostCurve
from edgespec.model.base import Progress

__all__ = [
    "AUTO",
    "CONTROL",
    "PLAIN",
    "BenchPlan",
    "BenchRun",
    "Ending",
    "Measurement",
    "MethodConfig",
    "bench_prompts",
    "method_configs",
    "run",
]

Ending = Literal["complete", "cancelled", "time", "failed"]


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
        """Return the configuration's name in tables, such as `model k=4`."""
        length = "" if self.draft_length is None else f" k={self.draft_length}"
        return f"{self.method}{length}{' again' if self.again else ''}"


PLAIN, AUTO = MethodConfig("none"), MethodConfig("auto")
# A second measurement of plain decoding, whose difference from the first shows the measurement noise.
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
        temperatures: Sampling temperatures. In each repeat, every prompt is answered at every
            temperature.
        repeats: Number of times to run the whole plan.
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
                "specify at least one prompt and one temperature, and include `none` in the methods",
            )
        for kind, entries in (
            ("prompts", [prompt.name for prompt in self.prompts]),
            ("methods", [config.name for config in self.configs]),
            ("temperatures", self.temperatures),
        ):
            if len(set(entries)) < len(entries):
                twice = next(entry for at, entry in enumerate(entries) if entry in entries[:at])
                raise OptionError(
                    f"the list of {kind} contains {twice} more than once", "list each entry once"
                )

    @property
    def replies(self) -> int:
        """Return the total number of replies in the plan."""
        return len(self.prompts) * len(self.temperatures) * self.repeats * len(self.configs)

    def rounds(self) -> Iterator[BenchRound]:
        """Yield all rounds of the benchmark. Each round answers one prompt with every configuration.

        The order of the configurations changes from round to round, so that a gradual slowdown of the
        machine, such as from thermal throttling, affects all of them equally. Categories alternate, so that
        a partial run covers all of them.
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


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measured reply of a benchmark.

    Attributes:
        prompt: Name of the prompt.
        repeat: Index of the repeat, from 0.
        position: Index of the reply within its `BenchRound`, from 0.
        config: The method configuration that produced the reply.
        seconds: Wall-clock time of the whole reply.
    """

    prompt: str
    category: str
    temperature: float
    repeat: int
    position: int
    config: MethodConfig
    seconds: float
    reply: Reply

    def to_json(self) -> dict[str, object]:
        """Return the measurement as a JSON object without the reply's text."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        reply = self.reply.to_json()
        del values["config"], reply["text"]
        return values | asdict(self.config) | {"reply": reply}


@dataclass(frozen=True, slots=True)
class BenchRun:
    """The replies measured in a complete or partial run of a plan.

    Attributes:
        rows: Measured replies, in the order they ran.
        curve: Measured duration of verify passes, by number of tokens in the pass.
        ending: Why the run ended: `complete`, `cancelled`, `time` (the time limit) or `failed`.
        error: The error message, if `ending` is `failed`.
    """

    rows: tuple[Measurement, ...]
    curve: CostCurve
    ending: Ending
    error: str = ""


def run(
    runtime: Runtime,
    plan: BenchPlan,
    *,
    max_seconds: float | None = None,
    progress: Progress | None = None,
) -> BenchRun:
    """Run a benchmark plan: measure pass durations, warm up every method, and measure each reply.

    Drafters are not trained between replies, so they do not change during the run.

    Args:
        runtime: The runtime to measure. Its prefix cache is cleared before every reply.
        plan: The replies to measure.
        max_seconds: Time limit in seconds, after which no new reply is started. None means no limit.
        progress: Called with a description and the fraction of the replies that are finished. Returning
            False cancels the run.

    Returns:
        All replies measured, even if the run was cancelled, reached its time limit or failed.

    Raises:
        OptionError, ContextFullError: The runtime cannot run the plan.
        CancelledError: The run was cancelled before the first reply.
    """
    bench = _Bench(runtime, plan, max_seconds, progress)
    curve = bench.prepare()
    rows: list[Measurement] = []
    ending: Ending = "complete"
    error = ""
    try:
        rows.extend(bench.rows())
        if len(rows) < plan.replies:
            ending = "time"
    except CancelledError:
        if not rows:
            raise
        ending = "cancelled"
    except EdgespecError as failure:
        if not rows:
            raise
        ending, error = "failed", str(failure)
    return BenchRun(tuple(rows), curve, ending, error)


@dataclass
class _Bench:
    runtime: Runtime
    plan: BenchPlan
    max_seconds: float | None
    progress: Progress | None

    def __post_init__(self) -> None:
        self._began = monotonic()
        self._done = 0
        self._tokens = {prompt.name: self._fitting_tokens(prompt) for prompt in self.plan.prompts}
        for config in self.plan.configs:
            self.runtime.method_for(config.method)

    def _fitting_tokens(self, prompt: Prompt) -> list[int]:
        """Tokenize a prompt. Raises ContextFullError if it and its reply do not fit in the context."""
        tokens = prompt_tokens(self.runtime, prompt)
        context = self.runtime.context_tokens
        if len(tokens) + self.plan.max_tokens > context:
            raise ContextFullError(
                f"prompt {prompt.name} has {len(tokens):,} tokens and its reply up to"
                f" {self.plan.max_tokens:,} more, but the context holds only {context:,}",
                "use a larger --context, a smaller -n, or other prompts",
            )
        return tokens

    def prepare(self) -> CostCurve:
        """Measure the duration of verify passes, and warm up every method with a short reply."""
        curve = self.runtime.measure_costs(self.progress)
        prompt = self.plan.prompts[0]
        for config in self.plan.configs:
            description = f"warming up {config.name}"
            self._report_progress(description)
            self._reply(description, prompt, self.plan.temperatures[0], config, WARM_UP_TOKENS)
        return curve

    def rows(self) -> Iterator[Measurement]:
        """Measure and yield replies until the plan is complete or the time is up."""
        for each in self.plan.rounds():
            for position, config in enumerate(each.configs):
                if self.max_seconds and monotonic() - self._began >= self.max_seconds:
                    return
                yield self._row(each, position, config)
                self._done += 1

    def _row(self, each: BenchRound, position: int, config: MethodConfig) -> Measurement:
        description = f"{each.prompt.name}, {config.name}, temperature {each.temperature:g}"
        self._report_progress(description)
        # Clear the prefix cache, so that every method has to prefill the prompt.
        self.runtime.clear_cache()
        started = perf_counter()
        reply = self._reply(description, each.prompt, each.temperature, config, self.plan.max_tokens)
        seconds = perf_counter() - started
        prompt, category = each.prompt.name, each.prompt.category
        return Measurement(prompt, category, each.temperature, each.repeat, position, config, seconds, reply)

    def _reply(
        self, description: str, prompt: Prompt, temperature: float, config: MethodConfig, max_tokens: int
    ) -> Reply:
        stream = self.runtime.stream_tokens(
            self._tokens[prompt.name],
            max_tokens=max_tokens,
            temperature=temperature,
            seed=self.plan.seed,
            method=config.method,
            draft_length=config.draft_length,
            acceptance=self.plan.acceptance,
            schema=prompt.schema,
        )
        try:
            for _ in stream:
                self._report_progress(description)
        finally:
            stream.close()
        if stream.reply.finish_reason == "cancelled":
            raise CancelledError("the benchmark was cancelled")
        return stream.reply

    def _report_progress(self, description: str) -> None:
        if self.progress and not self.progress(description, self._done / self.plan.replies):
            raise CancelledError("the benchmark was cancelled")
