"""The proof on a user's own pair: every method against plain decoding."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from edgespec.backends.base import LanguageModel
from edgespec.checks import check_integer, check_number
from edgespec.engine.distribution import Distribution
from edgespec.engine.sampling import Sampler
from edgespec.engine.sampling_params import SamplingParams
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError, OptionError
from edgespec.losslessness.prompts import Prompt, prompt_tokens
from edgespec.losslessness.report import Divergence, MethodResult, Report, Verdict
from edgespec.losslessness.rescore import is_near_tie, rescore, score_gap
from edgespec.losslessness.statistics import Sample, holm, p_value
from edgespec.reply import Reply
from edgespec.runtime import Runtime

__all__ = ["verify"]

# How many first tokens the statistical test looks at, and how often a beginning must have come up
# for the token after it to be tested.
_POSITIONS = 3
_FEWEST = 5
_SIGNIFICANT = 0.001
# A filter's edge would turn rounding into a law of its own: the test is made without filters.
_OPEN = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}

_Progress = Callable[[str, float], bool]


def verify(
    runtime: Runtime,
    prompts: Sequence[Prompt],
    *,
    methods: Sequence[str] = ("auto",),
    temperatures: Sequence[float] = (0.0, 0.8),
    draft_lengths: Sequence[int] = (4,),
    max_tokens: int = 64,
    seed: int = 0,
    acceptance: str = "invariant",
    samples: int = 200,
    rest_seconds: float = 2.0,
    progress: _Progress | None = None,
    **sampling: Any,
) -> Report:
    """Compare every method with plain decoding, for every prompt, temperature and draft length.

    Invariant mode, and any mode at temperature 0: the tokens must be equal. A first divergence is scored
    again at both widths (see `rescore`); what the measured rounding cannot explain is a violation, and where
    the target was loaded `exact` any divergence is.

    Rejection mode above temperature 0: the first three tokens of `samples` replies, each with a seed of its
    own, must follow the law that plain passes give (G-test per position, conditional on the beginning;
    Holm's correction over all tests of a method; a violation below 0.001).

    rest_seconds: how long drafters that learn between replies may do so after each (in rejection mode after
    all samples of a prompt); others are not waited for. What was drafted is in the report: where it is
    nothing, nothing was proved. A runtime that was loaded `always_draft` drafts whether or not it pays.

    progress: called with (what, fraction); False cancels with CancelledError. `sampling` as for generate.
    Raises OptionError for settings that make no sense, and what generating raises.
    """
    if not prompts or not methods or not temperatures or not draft_lengths:
        raise OptionError(
            "there is nothing to verify", "give prompts, methods, temperatures and draft lengths"
        )
    check_integer("samples", samples, 1, 1 << 31)
    if not check_number("rest_seconds", rest_seconds, "from 0 up") >= 0:
        raise OptionError(f"rest_seconds is {rest_seconds}", "give a number from 0 up")
    if len({prompt.name for prompt in prompts}) < len(prompts):
        raise OptionError("two prompts have the same id", "give each its own")
    proof = _Proof(runtime, max_tokens, seed, acceptance, samples, rest_seconds, progress, sampling)
    cases = [
        (method, prompt, temperature, draft_length)
        for prompt in prompts
        for temperature in temperatures
        for method in methods
        for draft_length in (draft_lengths if method != "none" else draft_lengths[:1])
    ]
    findings: dict[str, _Findings] = {method: _Findings() for method in methods}
    for done, (method, prompt, temperature, draft_length) in enumerate(cases):
        proof.begin(f"{prompt.name}, {method}, temperature {temperature:g}", done / len(cases))
        proof.check(findings[method], method, prompt, temperature, draft_length)
    if progress:
        progress("done", 1.0)
    draft = runtime.draft.name if runtime.draft else None
    results = {method: found.result(len(prompts)) for method, found in findings.items()}
    return Report(runtime.target.name, draft, acceptance, results)


class _Findings:
    """What came up for one method while the proof runs."""

    def __init__(self) -> None:
        self.replies = self.drafted_tokens = self.accepted_tokens = 0
        self.note = ""
        self.divergences: list[Divergence] = []
        # (prompt, p-value) of every statistical test.
        self.tests: list[tuple[str, float]] = []

    def count(self, reply: Reply) -> None:
        self.replies += 1
        self.drafted_tokens += reply.stats.drafted_tokens
        self.accepted_tokens += reply.stats.accepted_tokens
        self.note = reply.method.note or (reply.method.reason if reply.method.effective == "none" else "")

    def result(self, prompts: int) -> MethodResult:
        corrected = holm([p for _, p in self.tests])
        wrong = {name for (name, _), p in zip(self.tests, corrected, strict=True) if p < _SIGNIFICANT}
        wrong |= {d.prompt for d in self.divergences if d.verdict == "violation"}
        excused = {d.prompt for d in self.divergences} - wrong
        return MethodResult(
            prompts=prompts,
            replies=self.replies,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            identical=prompts - len(wrong) - len(excused),
            near_tie=len(excused),
            violations=len(wrong),
            divergences=self.divergences,
            smallest_corrected_p_value=min(corrected, default=None),
            note=self.note,
        )


class _Proof:
    """One run of `verify`: the plain replies and laws are made once and compared with many."""

    def __init__(
        self,
        runtime: Runtime,
        max_tokens: int,
        seed: int,
        acceptance: str,
        samples: int,
        rest_seconds: float,
        progress: _Progress | None,
        sampling: dict[str, Any],
    ) -> None:
        self._runtime = runtime
        self._max_tokens = max_tokens
        self._seed = seed
        self._acceptance = acceptance
        self._samples = samples
        self._rest_seconds = rest_seconds
        self._progress = progress
        self._case = ("", 0.0)
        self._sampling = sampling
        self._tokens: dict[str, list[int]] = {}
        self._plain: dict[tuple[str, float], Reply] = {}

    def begin(self, case: str, fraction: float) -> None:
        """Say what comes next. Raises CancelledError."""
        self._case = case, fraction
        if not self._wanted():
            raise CancelledError("the proof was cancelled")

    def _wanted(self) -> bool:
        return self._progress is None or self._progress(*self._case)

    def _rest(self) -> None:
        """Let the drafters of the last reply learn from it, until they have or the time is up."""
        end = monotonic() + self._rest_seconds
        self._runtime.run_idle_work(lambda: monotonic() < end and self._wanted())

    def check(
        self, found: _Findings, method: str, prompt: Prompt, temperature: float, draft_length: int
    ) -> None:
        """One method on one prompt at one temperature and draft length."""
        if self._acceptance == "rejection" and temperature > 0:
            self._check_law(found, method, prompt, temperature, draft_length)
        else:
            self._check_equal(found, method, prompt, temperature, draft_length)

    def _prompt_tokens(self, prompt: Prompt) -> list[int]:
        if prompt.name not in self._tokens:
            self._tokens[prompt.name] = prompt_tokens(self._runtime, prompt)
        return self._tokens[prompt.name]

    def _reply(self, prompt: Prompt, temperature: float, **options: Any) -> Reply:
        stream = self._runtime.stream_tokens(
            self._prompt_tokens(prompt),
            max_tokens=self._max_tokens,
            seed=self._seed,
            temperature=temperature,
            **(self._sampling | options),
        )
        for _ in stream:
            pass
        if stream.reply.finish_reason == "cancelled":
            raise CancelledError("the proof was cancelled")
        return stream.reply

    def _check_equal(
        self, found: _Findings, method: str, prompt: Prompt, temperature: float, draft_length: int
    ) -> None:
        key = (prompt.name, temperature)
        if key not in self._plain:
            self._plain[key] = self._reply(prompt, temperature, method="none", acceptance="invariant")
        plain = self._plain[key]
        other = self._reply(
            prompt, temperature, method=method, draft_length=draft_length, acceptance=self._acceptance
        )
        found.count(other)
        self._rest()
        if other.tokens != plain.tokens:
            found.divergences.append(self._judged(prompt, temperature, draft_length, plain, other))

    def _judged(
        self, prompt: Prompt, temperature: float, draft_length: int, plain: Reply, other: Reply
    ) -> Divergence:
        """Score the first divergence again and say whether rounding explains it."""
        pairs = zip(plain.tokens, other.tokens, strict=False)
        shorter = min(len(plain.tokens), len(other.tokens))
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
        tokens = [reply.tokens[at] if at < len(reply.tokens) else None for reply in (plain, other)]
        plain_token, other_token = tokens
        gap = error = None
        verdict: Verdict = "violation"
        if plain_token is not None and other_token is not None:
            stats = other.stats
            widths = {draft_length + 1, round(stats.drafted_tokens / max(1, stats.target_passes)) + 1} - {1}
            start, shared = self._prompt_tokens(prompt), plain.tokens[:at]
            with self._runtime.borrowed_target() as target:
                rescored = rescore(target, start, shared, sorted(widths))
            params = SamplingParams(temperature=temperature, **self._sampling)
            history = [*start, *shared]
            gap = score_gap(rescored.plain, params, self._seed, history, plain_token, other_token)
            error = rescored.error
            exact = self._runtime.target.capabilities.exact
            if not exact and is_near_tie(rescored, params, self._seed, history, plain_token, other_token):
                verdict = "near_tie"
        return Divergence(
            prompt.name, temperature, draft_length, at, gap, error, plain_token, other_token, verdict
        )

    def _check_law(
        self, found: _Findings, method: str, prompt: Prompt, temperature: float, draft_length: int
    ) -> None:
        """Draw first tokens many times and test each position against the exact law."""
        after: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for i in range(self._samples):
            reply = self._beginning(prompt, temperature, method, draft_length, self._seed + i)
            found.count(reply)
            drawn = reply.tokens[:_POSITIONS]
            for position, token in enumerate(drawn):
                after[drawn[:position]][token] += 1
        self._rest()
        known = {prefix: counts for prefix, counts in after.items() if counts.total() >= _FEWEST}
        laws = self._laws(prompt, temperature, list(known))
        for position in range(_POSITIONS):
            samples: list[Sample] = [
                (counts, laws[prefix]) for prefix, counts in known.items() if len(prefix) == position
            ]
            p = p_value(samples)
            if p is not None:
                found.tests.append((prompt.name, p))

    def _beginning(
        self, prompt: Prompt, temperature: float, method: str, draft_length: int, seed: int
    ) -> Reply:
        """A reply that was given up after the first tokens."""
        stream = self._runtime.stream_tokens(
            self._prompt_tokens(prompt),
            max_tokens=max(_POSITIONS, draft_length + 1),
            seed=seed,
            temperature=temperature,
            method=method,
            draft_length=draft_length,
            acceptance="rejection",
            **(self._sampling | _OPEN),
        )
        count = 0
        for piece in stream:
            count += piece.token_count
            if count >= _POSITIONS:
                break
        else:
            if stream.reply.finish_reason == "cancelled":
                raise CancelledError("the proof was cancelled")
        stream.close()
        return stream.reply

    def _laws(
        self, prompt: Prompt, temperature: float, prefixes: Sequence[tuple[int, ...]]
    ) -> dict[tuple[int, ...], Distribution]:
        """The exact law after each beginning, by single steps."""
        start = self._prompt_tokens(prompt)
        params = SamplingParams(temperature=temperature, **(self._sampling | _OPEN))
        laws = {}
        with self._runtime.borrowed_target() as target:
            target.prefill(start[:-1])
            for prefix in prefixes:
                laws[prefix] = _law(target, params, start, prefix)
        return laws


def _law(
    target: LanguageModel, params: SamplingParams, start: Sequence[int], prefix: Sequence[int]
) -> Distribution:
    *before, last = [start[-1], *prefix]
    for token in before:
        target.verify(TokenTree.chain(token))
        target.commit(())
    law = Sampler(params, 0, [*start, *prefix]).distribution(target.verify(TokenTree.chain(last)), 0)
    target.truncate(len(start) - 1)
    target.prefill(start[target.length : -1])
    return law
