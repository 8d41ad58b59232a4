"""Compare every method with plain decoding on the loaded models."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, isfinite
from time import monotonic
from typing import Any, NamedTuple

from edgespec.backends.base import LanguageModel
from edgespec.checks import check_integer, check_number
from edgespec.constraints import ConstraintCompiler
from edgespec.engine.distribution import Distribution
from edgespec.engine.processors import LogitsProcessor
from edgespec.engine.sampling import Sampler
from edgespec.engine.sampling_params import SamplingParams
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError, OptionError
from edgespec.losslessness.prompts import Prompt, prompt_tokens
from edgespec.losslessness.report import Divergence, MethodResult, Report, Verdict
from edgespec.losslessness.rescore import is_near_tie, rescore, score_gap
from edgespec.losslessness.statistics import Sample, holm, p_value
from edgespec.reply import Reply
from edgespec.request import check_options
from edgespec.runtime import Runtime

__all__ = ["count_replies", "verify"]

# Number of tokens at the start of a reply that statistical tests cover.
_TESTED_POSITIONS = 3
# Test the next token after a prefix only if at least this many replies begin with the prefix.
_MIN_SAMPLES = 5
# A statistical test fails if its p-value, after Holm's correction, is below this.
_SIGNIFICANCE = 0.001
# Statistical tests run without filters, because rounding can move a token across a filter's threshold.
_NO_FILTERS = SamplingParams.disabled_filters()

# Default number of replies per prompt, method, temperature and draft length in rejection mode.
_SAMPLES = 200

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
    samples: int = _SAMPLES,
    idle_seconds: float = 2.0,
    progress: _Progress | None = None,
    **options: Any,
) -> Report:
    """Compare every method with plain decoding, for every prompt, temperature and draft length.

    In invariant mode, and in any mode at temperature 0, the tokens must be equal. If they differ, the logits
    at the first difference are computed again (see `rescore`). The difference is a violation if rounding
    errors do not explain it, or if the target was loaded with `exact`.

    In rejection mode above temperature 0, the first three tokens of many replies must follow the distribution
    of plain decoding. A G-test checks each position, given the tokens before it. P-values below 0.001, after
    Holm's correction over all tests of a method, are violations.

    The report contains the number of drafted tokens. If it is 0, nothing was verified. Load the runtime with
    `always_draft` to draft even where drafting is slower.

    Args:
        runtime: The loaded models.
        prompts: The prompts. Their names must be unique.
        methods: The methods to compare.
        temperatures: The temperatures of the replies.
        draft_lengths: The draft lengths of the replies.
        max_tokens: Maximum number of tokens per reply.
        seed: Seed of the replies, and of the first sample in rejection mode.
        acceptance: The acceptance rule: `invariant` or `rejection`.
        samples: Number of replies per prompt, method, temperature and draft length in rejection mode, each
            with its own seed.
        idle_seconds: Maximum time for online training after each reply. In rejection mode, drafters train
            only once per `samples` replies.
        progress: Called with a description of the current reply and the fraction completed. Returns False to
            cancel.
        **options: Sampling settings and a constraint, as for `Runtime.generate`. The schema of a prompt
            takes precedence.

    Raises:
        OptionError: A setting is invalid.
        CancelledError: `progress` returned False.
    """
    if not prompts or not methods or not temperatures or not draft_lengths:
        raise OptionError(
            "there is nothing to verify", "pass at least one prompt, method, temperature and draft length"
        )
    check_integer("samples", samples, 1, 1 << 31)
    if not check_number("idle_seconds", idle_seconds, "from 0 up") >= 0:
        raise OptionError(f"invalid idle_seconds: {idle_seconds}", "use 0 or more")
    if len({prompt.name for prompt in prompts}) < len(prompts):
        raise OptionError("two prompts have the same id", "give each prompt a unique id")
    cases = _cases(prompts, methods, temperatures, draft_lengths)
    compared, sampled = _count_replies(cases, acceptance, samples)
    run = _Verification(
        *(runtime, max_tokens, seed, acceptance, samples, idle_seconds, progress, options),
        planned_tokens=compared * max_tokens + sampled * min(_TESTED_POSITIONS, max_tokens),
    )
    findings = {method: _MethodFindings(len(prompts)) for method in methods}
    for case in cases:
        run.check(case, findings[case.method])
    if progress:
        progress("done", 1.0)
    draft = runtime.draft.name if runtime.draft else None
    results = {method: each.finished_result() for method, each in findings.items()}
    return Report(runtime.target.name, draft, acceptance, results)


class _Case(NamedTuple):
    method: str
    prompt: Prompt
    temperature: float
    draft_length: int


def _cases(
    prompts: Sequence[Prompt],
    methods: Sequence[str],
    temperatures: Sequence[float],
    draft_lengths: Sequence[int],
) -> list[_Case]:
    return [
        _Case(method, prompt, temperature, draft_length)
        for prompt in prompts
        for temperature in temperatures
        for method in methods
        for draft_length in (draft_lengths if method != "none" else draft_lengths[:1])
    ]


def count_replies(
    prompts: Sequence[Prompt],
    *,
    methods: Sequence[str],
    temperatures: Sequence[float],
    draft_lengths: Sequence[int],
    acceptance: str = "invariant",
    samples: int = _SAMPLES,
) -> int:
    """Return the number of replies that `verify` generates with these arguments.

    Args:
        prompts: The prompts.
        methods: The methods to compare.
        temperatures: The temperatures of the replies.
        draft_lengths: The draft lengths of the replies.
        acceptance: The acceptance rule: `invariant` or `rejection`.
        samples: Number of replies per case in rejection mode, as for `verify`.
    """
    return sum(_count_replies(_cases(prompts, methods, temperatures, draft_lengths), acceptance, samples))


def _count_replies(cases: Sequence[_Case], acceptance: str, samples: int) -> tuple[int, int]:
    sampled = [case for case in cases if _is_sampled(case, acceptance)]
    plain = {(case.prompt.name, case.temperature) for case in cases if not _is_sampled(case, acceptance)}
    return len(plain) + len(cases) - len(sampled), samples * len(sampled)


def _is_sampled(case: _Case, acceptance: str) -> bool:
    return acceptance == "rejection" and case.temperature > 0


class _MethodFindings:
    """The results of one method so far, and the prompt and p-value of each statistical test."""

    def __init__(self, prompts: int) -> None:
        self.result = MethodResult(prompts)
        self.tests: list[tuple[str, float]] = []

    def count(self, reply: Reply) -> None:
        result, method = self.result, reply.method
        result.replies += 1
        result.tokens += len(reply.tokens)
        result.target_passes += reply.stats.target_passes
        result.drafted_tokens += reply.stats.drafted_tokens
        result.accepted_tokens += reply.stats.accepted_tokens
        result.note = method.note or (method.reason if method.effective == "none" else "")

    def finished_result(self) -> MethodResult:
        result, corrected = self.result, holm([p for _, p in self.tests])
        wrong = {name for (name, _), p in zip(self.tests, corrected, strict=True) if p < _SIGNIFICANCE}
        wrong |= {d.prompt for d in result.divergences if d.verdict == "violation"}
        near_ties = {d.prompt for d in result.divergences} - wrong
        result.violations, result.near_tie = len(wrong), len(near_ties)
        result.identical = result.prompts - len(wrong) - len(near_ties)
        result.smallest_corrected_p_value = min(corrected, default=None)
        return result


@dataclass
class _Verification:
    """One run of `verify`, with the replies from plain decoding that all methods are compared with."""

    runtime: Runtime
    max_tokens: int
    seed: int
    acceptance: str
    samples: int
    idle_seconds: float
    progress: _Progress | None
    options: dict[str, Any]
    planned_tokens: int
    done_tokens: float = 0
    description: str = ""
    tokens: dict[str, list[int]] = field(default_factory=dict)
    plain: dict[tuple[str, float], Reply] = field(default_factory=dict)

    @cached_property
    def constraints(self) -> ConstraintCompiler:
        return ConstraintCompiler(self.runtime.vocabulary, self.runtime.target.vocab_size)

    def should_continue(self) -> bool:
        return self.progress is None or self.progress(
            self.description, self.done_tokens / self.planned_tokens
        )

    def check(self, case: _Case, findings: _MethodFindings) -> None:
        self.description = f"{case.prompt.name}, {case.method}, temperature {case.temperature:g}"
        if _is_sampled(case, self.acceptance):
            self._check_distribution(case, findings)
        else:
            self._check_tokens(case, findings)

    def _run_idle_work(self) -> None:
        end = monotonic() + self.idle_seconds
        self.runtime.run_idle_work(lambda: monotonic() < end and self.should_continue())

    def _prompt_tokens(self, prompt: Prompt) -> list[int]:
        if prompt.name not in self.tokens:
            self.tokens[prompt.name] = prompt_tokens(self.runtime, prompt)
        return self.tokens[prompt.name]

    def _reply(self, case: _Case, enough_tokens: float = inf, **options: Any) -> Reply:
        if not self.should_continue():
            raise CancelledError("verification was cancelled")
        stream = self.runtime.stream_tokens(
            self._prompt_tokens(case.prompt),
            temperature=case.temperature,
            **({"max_tokens": self.max_tokens, "seed": self.seed} | self._options(case.prompt) | options),
        )
        count = 0
        for piece in stream:
            count += piece.token_count
            if count >= enough_tokens:
                break
        else:
            if stream.reply.finish_reason == "cancelled":
                raise CancelledError("verification was cancelled")
        stream.close()
        self.done_tokens += min(enough_tokens, self.max_tokens)
        return stream.reply

    def _check_tokens(self, case: _Case, findings: _MethodFindings) -> None:
        key = (case.prompt.name, case.temperature)
        if key not in self.plain:
            self.plain[key] = self._reply(case, method="none", acceptance="invariant")
        plain = self.plain[key]
        other = self._reply(
            case, method=case.method, draft_length=case.draft_length, acceptance=self.acceptance
        )
        findings.count(other)
        self._run_idle_work()
        if other.tokens != plain.tokens:
            findings.result.divergences.append(self._divergence(case, plain, other))

    def _divergence(self, case: _Case, plain: Reply, other: Reply) -> Divergence:
        pairs = zip(plain.tokens, other.tokens, strict=False)
        shorter = min(len(plain.tokens), len(other.tokens))
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
        plain_token, other_token = (
            reply.tokens[at] if at < len(reply.tokens) else None for reply in (plain, other)
        )
        gap = error = None
        verdict: Verdict = "violation"
        if plain_token is not None and other_token is not None:
            mean_drafted = other.stats.drafted_tokens / max(1, other.stats.target_passes)
            widths = {case.draft_length + 1, round(mean_drafted) + 1} - {1}
            start, shared = self._prompt_tokens(case.prompt), plain.tokens[:at]
            with self.runtime.borrowed_target() as target:
                rescored = rescore(target, start, shared, sorted(widths))
            rescored = rescored.constrained(self._constraint(case.prompt, shared))
            params = self._params(temperature=case.temperature)
            history = [*start, *shared]
            gap = score_gap(rescored.plain, params, self.seed, history, plain_token, other_token)
            gap = gap if isfinite(gap) else None
            error = rescored.error
            exact = self.runtime.target.capabilities.exact
            if not exact and is_near_tie(rescored, params, self.seed, history, plain_token, other_token):
                verdict = "near_tie"
        _, prompt, temperature, draft_length = case
        return Divergence(
            prompt.name, temperature, draft_length, at, gap, error, plain_token, other_token, verdict
        )

    def _check_distribution(self, case: _Case, findings: _MethodFindings) -> None:
        options = {"method": case.method, "draft_length": case.draft_length, "acceptance": "rejection"}
        options |= {"max_tokens": max(_TESTED_POSITIONS, case.draft_length + 1), **_NO_FILTERS}
        after: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for i in range(self.samples):
            reply = self._reply(case, _TESTED_POSITIONS, **(options | {"seed": self.seed + i}))
            findings.count(reply)
            drawn = reply.tokens[:_TESTED_POSITIONS]
            for position, token in enumerate(drawn):
                after[drawn[:position]][token] += 1
        self._run_idle_work()
        known = {prefix: counts for prefix, counts in after.items() if counts.total() >= _MIN_SAMPLES}
        distributions = self._distributions(case, list(known))
        for position in range(_TESTED_POSITIONS):
            samples: list[Sample] = [
                (counts, distributions[prefix]) for prefix, counts in known.items() if len(prefix) == position
            ]
            p = p_value(samples)
            if p is not None:
                findings.tests.append((case.prompt.name, p))

    def _distributions(
        self, case: _Case, prefixes: Sequence[tuple[int, ...]]
    ) -> dict[tuple[int, ...], Distribution]:
        start = self._prompt_tokens(case.prompt)
        params = self._params(temperature=case.temperature, **_NO_FILTERS)
        with self.runtime.borrowed_target() as target:
            target.prefill(start[:-1])
            return {
                prefix: _distribution(target, params, start, prefix, self._constraint(case.prompt, prefix))
                for prefix in prefixes
            }

    def _params(self, **changes: Any) -> SamplingParams:
        return check_options(self.runtime.target, self.options | changes)[0]

    def _options(self, prompt: Prompt) -> dict[str, Any]:
        return self.options | ({"schema": prompt.schema} if prompt.schema else {})

    def _constraint(self, prompt: Prompt, reply: Sequence[int]) -> list[LogitsProcessor]:
        """Return the processor of the constraint after the first tokens of a reply, if there is one."""
        constraint = check_options(self.runtime.target, self._options(prompt))[1]["constraint"]
        if constraint is None:
            return []
        processor = self.constraints.processor(constraint, self._prompt_tokens(prompt))
        for token in reply:
            processor.push(token)
        return [processor]


def _distribution(
    target: LanguageModel,
    params: SamplingParams,
    start: Sequence[int],
    prefix: Sequence[int],
    processors: Sequence[LogitsProcessor],
) -> Distribution:
    """Return the next-token distribution after `start + prefix`. `start[:-1]` is already in the KV cache."""
    *before, last = [start[-1], *prefix]
    for token in before:
        target.verify(TokenTree.chain(token))
        target.commit(())
    sampler = Sampler(params, 0, [*start, *prefix], processors)
    distribution = sampler.distribution(target.verify(TokenTree.chain(last)), 0)
    target.truncate(len(start) - 1)
    target.prefill(start[target.length : -1])
    return distribution
