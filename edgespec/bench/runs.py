"""Run a benchmark plan, one reply at a time, each with an empty prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from time import monotonic, perf_counter
from typing import Literal

from edgespec.api.runtime import Runtime
from edgespec.bench.constants import WARM_UP_TOKENS
from edgespec.bench.plan import BenchPlan, BenchRound, MethodConfig
from edgespec.decode.reply import Reply
from edgespec.errors import CancelledError, ContextFullError, EdgespecError
from edgespec.losslessness import Prompt, prompt_tokens
from edgespec.methods.costs.curve import CostCurve
from edgespec.model.base import Progress

__all__ = ["BenchRun", "Ending", "Measurement", "run"]

Ending = Literal["complete", "cancelled", "time", "failed"]


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

    Drafters are not trained between replies, so that they do not change during the run.

    Args:
        runtime: The runtime to measure. Its prefix cache is cleared before every reply.
        plan: The replies to measure.
        max_seconds: No new reply is started after this time. None means no limit.
        progress: Called with a description and the fraction of the replies that are finished. Returning False
            cancels the run.

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
        """Tokenize a prompt. Raises ContextFullError if the prompt and its reply do not fit the context."""
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
        """Measure the duration of verify passes, and run every drafting method once to warm up."""
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
