"""The replies, one after another, each as if it were the first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Literal

from edgespec.backends.base import Progress
from edgespec.bench.energy import EnergyMeter
from edgespec.bench.plan import Plan, Round, Way
from edgespec.costs.curve import CostCurve
from edgespec.errors import CancelledError, ContextFullError, EdgespecError
from edgespec.losslessness import Prompt, prompt_tokens
from edgespec.reply import Reply
from edgespec.runtime import Runtime

__all__ = ["Ending", "Measured", "Row", "run"]

Ending = Literal["complete", "cancelled", "time", "failed"]
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Row:
    """One reply. position: its place in its round. seconds: all of it. joules: of the whole processors."""

    prompt: str
    category: str
    temperature: float
    repeat: int
    position: int
    way: Way
    seconds: float
    joules: float | None
    reply: Reply

    def to_json(self) -> dict[str, object]:
        """All of it by name, without the text."""
        reply = self.reply.to_json()
        del reply["text"]
        return {
            "prompt": self.prompt,
            "category": self.category,
            "temperature": self.temperature,
            "repeat": self.repeat,
            "position": self.position,
            "method": self.way.method,
            "draft_length": self.way.draft_length,
            "again": self.way.again,
            "seconds": self.seconds,
            "joules": self.joules,
            "reply": reply,
        }


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured before the end, whatever ended it.

    ending: `time` is the limit that was set; `failed`: with `trouble`. no_energy: why no energy was measured;
    empty where it was.
    """

    rows: tuple[Row, ...]
    curve: CostCurve
    ending: Ending
    trouble: str = ""
    no_energy: str = ""


def run(
    runtime: Runtime,
    plan: Plan,
    *,
    max_seconds: float | None = None,
    progress: Progress | None = None,
    meter: EnergyMeter | None = None,
) -> Measured:
    """Measure what passes cost, let every way write a few tokens to warm up, and run the plan.

    Drafters that learn between replies find no time to: they go by what they have learnt before.
    max_seconds: no reply is begun after so many. progress: called with (what, fraction); False ends it.
    What was measured before an end is kept. Raises OptionError and ContextFullError for a plan that this
    runtime cannot serve, CancelledError where nothing was measured yet, and what fails until then.
    """
    bench = _Bench(runtime, plan, max_seconds, progress, meter or EnergyMeter())
    bench.prepare()
    rows: list[Row] = []
    ending: Ending = "complete"
    trouble = ""
    try:
        rows.extend(bench.rows())
        if len(rows) < plan.replies:
            ending = "time"
    except CancelledError:
        if not rows:
            raise
        ending = "cancelled"
    except EdgespecError as error:
        if not rows:
            raise
        ending, trouble = "failed", str(error)
    return Measured(tuple(rows), bench.curve, ending, trouble, bench.meter.reason)


class _Bench:
    """One run of a plan."""

    curve: CostCurve

    def __init__(
        self,
        runtime: Runtime,
        plan: Plan,
        max_seconds: float | None,
        progress: Progress | None,
        meter: EnergyMeter,
    ) -> None:
        self.meter = meter
        self._runtime = runtime
        self._plan = plan
        self._progress = progress
        self._max_seconds = max_seconds
        self._began = monotonic()
        self._done = 0
        self._tokens = {prompt.name: self._fitting(prompt) for prompt in plan.prompts}
        for way in plan.ways:
            runtime.method_for(way.method)

    def _fitting(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt. Raises ContextFullError now, not after an hour."""
        tokens = prompt_tokens(self._runtime, prompt)
        context = self._runtime.context_tokens
        if len(tokens) + self._plan.max_tokens > context:
            raise ContextFullError(
                f"prompt {prompt.name} has {len(tokens)} tokens, which with {self._plan.max_tokens} of the"
                f" reply do not fit a context of {context}",
                "use a larger --context, a smaller -n, or other prompts",
            )
        return tokens

    def prepare(self) -> None:
        """The cost curve, and a short reply in every way: what is read or compiled once is not counted."""
        self.curve = self._runtime.measure_costs(self._progress)
        prompt = self._plan.prompts[0]
        for way in self._plan.ways:
            what = f"warming up {way.name}"
            self._tell(what)
            self._reply(what, prompt, self._plan.temperatures[0], way, _WARM_UP_TOKENS)

    def rows(self) -> Iterator[Row]:
        """The replies of all rounds, until the time is over. Raises CancelledError."""
        for each in self._plan.rounds():
            for position, way in enumerate(each.ways):
                if self._time_share() >= 1.0:
                    return
                yield self._row(each, position, way)
                self._done += 1

    def _row(self, each: Round, position: int, way: Way) -> Row:
        what = f"{each.prompt.name}, {way.name}, temperature {each.temperature:g}"
        self._tell(what)
        # Every reply is to read its prompt.
        self._runtime.clear_cache()
        before = self.meter.read()
        started = perf_counter()
        reply = self._reply(what, each.prompt, each.temperature, way, self._plan.max_tokens)
        seconds = perf_counter() - started
        joules = self.meter.joules(before, self.meter.read())
        return Row(
            each.prompt.name,
            each.prompt.category,
            each.temperature,
            each.repeat,
            position,
            way,
            seconds,
            joules,
            reply,
        )

    def _reply(self, what: str, prompt: Prompt, temperature: float, way: Way, max_tokens: int) -> Reply:
        stream = self._runtime.stream_tokens(
            self._tokens[prompt.name],
            max_tokens=max_tokens,
            temperature=temperature,
            seed=self._plan.seed,
            method=way.method,
            draft_length=way.draft_length,
            acceptance=self._plan.acceptance,
        )
        try:
            for _ in stream:
                self._tell(what)
        finally:
            stream.close()
        if stream.reply.finish_reason == "cancelled":
            raise CancelledError("the benchmark was cancelled")
        return stream.reply

    def _time_share(self) -> float:
        """How much of the time that it may take is over."""
        return (monotonic() - self._began) / self._max_seconds if self._max_seconds else 0.0

    def _tell(self, what: str) -> None:
        share = max(self._done / self._plan.replies, self._time_share())
        if self._progress and not self._progress(what, min(1.0, share)):
            raise CancelledError("the benchmark was cancelled")
