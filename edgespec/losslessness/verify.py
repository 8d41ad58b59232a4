"""Compare every method with plain decoding on the loaded models."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, isfinite
from time import monotonic
from typing import Any

from edgespec.backends.base import LanguageModel
from edgespec.checks import check_integer, check_number
from edgespec.constraints import ConstraintCompiler
from edgespec.engine.distribution import Distribution
from edgespec.engine.processors import LogitsProcessor
from edgespec.engine.sampling import Sampler
from edgespec.engine.sampling_params import SamplingParams
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError, OptionError, shorten
from edgespec.losslessness.cases import DEFAULT_SAMPLES, Case, all_cases, check_at_once, count_case_replies
from edgespec.losslessness.prompts import Prompt, prompt_tokens
from edgespec.losslessness.report import Divergence, MethodFindings, Verdict, VerifyReport
from edgespec.losslessness.rescore import Rescored, is_near_tie, rescore, score_gap
from edgespec.losslessness.sharing import measure_sharing
from edgespec.losslessness.statistics import Sample, p_value
from edgespec.reply import Reply
from edgespec.request import check_options
from edgespec.runtime import Runtime

__all__ = ["verify"]

# Number of tokens at the start of a reply that statistical tests cover.
_TESTED_POSITIONS = 3
# Test the next token after a prefix only if at least this many replies begin with the prefix.
_MIN_SAMPLES = 5
# Statistical tests run without filters, because rounding can move a token across a filter's threshold.
_NO_FILTERS = SamplingParams.disabled_filters()

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
    samples: int = DEFAULT_SAMPLES,
    idle_seconds: float = 2.0,
    at_once: bool = False,
    progress: _Progress | None = None,
    **options: Any,
) -> VerifyReport:
    """Compare every method with plain decoding, for every prompt, temperature and draft length.

    In invariant mode, and in any mode at temperature 0, the tokens must be equal. If they differ, the logits
    at the first difference are computed again (see `rescore`). The difference is a violation if rounding
    errors do not explain it, or if the target was loaded with `exact`.

    In rejection mode above temperature 0, the first three tokens of many replies must follow the distribution
    of plain decoding. A G-test checks each position, given the tokens before it. P-values below 0.001, after
    Holm's correction over all tests of a method, are violations.

    With `at_once`, the methods generate as many replies at a time as the runtime allows, and plain decoding
    one at a time. The rounding errors that other replies in a shared context cause are measured too (see
    `measure_sharing`). If the text of another reply changes the logits, that is a violation.

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
        at_once: Whether to generate several replies at once.
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
        raise OptionError(f"idle_seconds must be at least 0, not {idle_seconds}", "use 0 or more")
    if len({prompt.name for prompt in prompts}) < len(prompts):
        [(repeated, _)] = Counter(prompt.name for prompt in prompts).most_common(1)
        raise OptionError(
            f"two prompts have the same id: {shorten(repeated)}", "give each prompt a unique id"
        )
    cases = all_cases(prompts, methods, temperatures, draft_lengths)
    if at_once:
        check_at_once(acceptance, len(cases))
        if runtime.parallel == 1 and not runtime.target.capabilities.exact:
            raise OptionError(
                f"{runtime.target.name} generates only one reply at a time, so there are no concurrent"
                " replies to compare",
                "omit --parallel",
            )
    compared, sampled = count_case_replies(cases, acceptance, samples)
    run = _Verification(
        *(runtime, max_tokens, seed, acceptance, samples, idle_seconds, progress, options),
        planned_tokens=compared * max_tokens + sampled * min(_TESTED_POSITIONS, max_tokens),
    )
    findings = {method: MethodFindings(len(prompts)) for method in methods}
    if at_once:
        run.check_at_once(cases, findings)
    else:
        for case in cases:
            run.check(case, findings[case.method])
    if progress:
        progress("done", 1.0)
    draft = runtime.draft.name if runtime.draft else None
    results = {method: each.finished_result() for method, each in findings.items()}
    heads = tuple(head.name for head in runtime.heads)
    at_a_time = runtime.parallel if at_once else 1
    return VerifyReport(runtime.target.name, draft, acceptance, results, at_a_time, heads)


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

    def check(self, case: Case, findings: MethodFindings) -> None:
        self.description = f"{case.prompt.name}, {case.method}, temperature {case.temperature:g}"
        if case.is_sampled(self.acceptance):
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

    def _reply(self, case: Case, enough_tokens: float = inf, **options: Any) -> Reply:
        if not self.should_continue():
            raise CancelledError("verification was cancelled")
        reply = self._generate(case, enough_tokens, **options)
        self.done_tokens += min(enough_tokens, self.max_tokens)
        return reply

    def _generate(self, case: Case, enough_tokens: float = inf, **options: Any) -> Reply:
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
        return stream.reply

    def check_at_once(self, cases: Sequence[Case], findings: Mapping[str, MethodFindings]) -> None:
        """Generate concurrent replies, and compare each with a reply that plain decoding generated alone."""
        for case in cases:
            self.description = f"{case.prompt.name}, alone"
            self.runtime.clear_cache()
            self._plain(case)
        self._run_idle_work()
        self.runtime.clear_cache()
        self.description = f"{self.runtime.parallel} replies at once"
        # Sort the cases so that replies to different prompts are generated together.
        mixed = sorted(cases, key=lambda case: (case.temperature, case.draft_length, case.method))
        with ThreadPoolExecutor(self.runtime.parallel) as pool:
            running = [(case, pool.submit(self._generate, case, **self._drafting(case))) for case in mixed]
            try:
                replies = [(case, self._finished(future)) for case, future in running]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.runtime.cancel()
                raise
        for case, reply in replies:
            self._compare(case, reply, findings[case.method])

    def _finished(self, running: Future[Reply]) -> Reply:
        if not self.should_continue():
            raise CancelledError("verification was cancelled")
        reply = running.result()
        self.done_tokens += self.max_tokens
        return reply

    def _plain(self, case: Case) -> Reply:
        key = (case.prompt.name, case.temperature)
        if key not in self.plain:
            self.plain[key] = self._reply(case, method="none", acceptance="invariant")
        return self.plain[key]

    def _drafting(self, case: Case) -> dict[str, Any]:
        return {"method": case.method, "draft_length": case.draft_length, "acceptance": self.acceptance}

    def _check_tokens(self, case: Case, findings: MethodFindings) -> None:
        self._plain(case)
        other = self._reply(case, **self._drafting(case))
        self._run_idle_work()
        self._compare(case, other, findings)

    def _compare(self, case: Case, other: Reply, findings: MethodFindings) -> None:
        plain = self._plain(case)
        findings.count(other)
        if other.tokens != plain.tokens:
            findings.result.divergences.append(self._divergence(case, plain, other))

    def _divergence(self, case: Case, plain: Reply, other: Reply) -> Divergence:
        pairs = zip(plain.tokens, other.tokens, strict=False)
        shorter = min(len(plain.tokens), len(other.tokens))
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
        plain_token, other_token = (
            reply.tokens[at] if at < len(reply.tokens) else None for reply in (plain, other)
        )
        gap = error = sharing = None
        verdict: Verdict = "violation"
        if plain_token is not None and other_token is not None:
            mean_drafted = other.stats.drafted_tokens / max(1, other.stats.target_passes)
            widths = {case.draft_length + 1, round(mean_drafted) + 1} - {1}
            start, shared = self._prompt_tokens(case.prompt), plain.tokens[:at]
            params = self._params(temperature=case.temperature)
            history = [*start, *shared]

            def explains(rescored: Rescored) -> bool:
                return is_near_tie(rescored, params, self.seed, history, plain_token, other_token)

            constraint = self._constraint(case.prompt, shared)
            with self.runtime.borrowed_targets() as targets:
                rescored = rescore(targets[0], start, shared, sorted(widths))
                if len(targets) > 1:
                    sharing = measure_sharing(
                        targets,
                        start,
                        shared,
                        self._texts_beside(case, len(targets) - 1),
                        width=max(widths, default=1),
                        explains=lambda beside: explains(rescored.joined(beside).constrained(constraint)),
                    )
            error = rescored.error
            rescored = (rescored.joined(sharing.rescored) if sharing else rescored).constrained(constraint)
            gap = score_gap(rescored.plain, params, self.seed, history, plain_token, other_token)
            gap = gap if isfinite(gap) else None
            is_possible = not self.runtime.target.capabilities.exact and not (sharing and sharing.leak)
            if is_possible and explains(rescored):
                verdict = "near_tie"
        _, prompt, temperature, draft_length = case
        return Divergence(
            prompt.name,
            temperature,
            draft_length,
            at,
            gap,
            error,
            sharing.rescored.error if sharing else None,
            sharing.leak if sharing else None,
            plain_token,
            other_token,
            verdict,
        )

    def _texts_beside(self, case: Case, count: int) -> list[Sequence[int]]:
        """Return up to `count` texts, each of another prompt followed by its reply."""
        names = [name for name in self.tokens if name != case.prompt.name][:count] or [case.prompt.name]
        return [[*self.tokens[name], *self.plain[name, case.temperature].tokens] for name in names]

    def _check_distribution(self, case: Case, findings: MethodFindings) -> None:
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
        self, case: Case, prefixes: Sequence[tuple[int, ...]]
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
