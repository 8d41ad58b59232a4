"""Compare every method with plain decoding on a loaded model pair."""

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

# Statistical tests cover this many first tokens of a reply.
_TESTED_POSITIONS = 3
# A token is only tested if the tokens before it were drawn at least this often.
_MIN_SAMPLES = 5
# P-values below this, after Holm's correction, count as a violation.
_SIGNIFICANCE = 0.001
# Statistical tests run without filters, because rounding can move a token across the bound of a filter.
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
    samples: int = 200,
    idle_seconds: float = 2.0,
    progress: _Progress | None = None,
    **sampling: Any,
) -> Report:
    """Compare every method with plain decoding, for every prompt, temperature and draft length.

    In invariant mode, and in any mode at temperature 0, the tokens must be equal. The first difference is
    scored again at both widths (see `rescore`). It is a violation if the rounding error does not explain it,
    or if the target was loaded with `exact`.

    In rejection mode above temperature 0, the first three tokens of many replies must follow the distribution
    of plain decoding. They are tested by a G-test per position, conditional on the tokens before. P-values
    below 0.001 after Holm's correction over all tests of a method are violations.

    The report contains the number of drafted tokens. If it is 0, nothing was verified; load the runtime with
    `always_draft` to draft even where that is slower.

    Args:
        runtime: The loaded models.
        prompts: The prompts. Their names must differ.
        methods: The methods to verify.
        temperatures: The temperatures to verify.
        draft_lengths: The draft lengths to verify.
        max_tokens: Maximum number of tokens per reply.
        seed: Seed of the replies, and of the first sample in rejection mode.
        acceptance: The acceptance rule: `invariant` or `rejection`.
        samples: Replies per case in rejection mode, each with its own seed.
        idle_seconds: Time for online training after each reply (in rejection mode after all samples of a
            case). Methods without training do not wait.
        progress: Called with the current case and the fraction done. It cancels by returning False.
        **sampling: Sampling settings, as for `Runtime.generate`.

    Raises:
        OptionError: A setting is invalid.
        CancelledError: `progress` returned False.
    """
    if not prompts or not methods or not temperatures or not draft_lengths:
        raise OptionError("nothing to verify", "give prompts, methods, temperatures and draft lengths")
    check_integer("samples", samples, 1, 1 << 31)
    if not check_number("idle_seconds", idle_seconds, "from 0 up") >= 0:
        raise OptionError(f"idle_seconds is {idle_seconds}", "give a number from 0 up")
    if len({prompt.name for prompt in prompts}) < len(prompts):
        raise OptionError("two prompts have the same id", "give each prompt its own id")
    verification = _Verification(
        runtime, max_tokens, seed, acceptance, samples, idle_seconds, progress, sampling
    )
    cases = [
        (method, prompt, temperature, draft_length)
        for prompt in prompts
        for temperature in temperatures
        for method in methods
        for draft_length in (draft_lengths if method != "none" else draft_lengths[:1])
    ]
    findings: dict[str, _MethodFindings] = {method: _MethodFindings() for method in methods}
    for done, (method, prompt, temperature, draft_length) in enumerate(cases):
        verification.start_case(f"{prompt.name}, {method}, temperature {temperature:g}", done / len(cases))
        verification.check(findings[method], method, prompt, temperature, draft_length)
    if progress:
        progress("done", 1.0)
    draft = runtime.draft.name if runtime.draft else None
    results = {method: each.result(len(prompts)) for method, each in findings.items()}
    return Report(runtime.target.name, draft, acceptance, results)


class _MethodFindings:
    """The results of one method so far."""

    def __init__(self) -> None:
        self.replies = self.drafted_tokens = self.accepted_tokens = 0
        self.note = ""
        self.divergences: list[Divergence] = []
        # The prompt and p-value of every statistical test.
        self.tests: list[tuple[str, float]] = []

    def count(self, reply: Reply) -> None:
        self.replies += 1
        self.drafted_tokens += reply.stats.drafted_tokens
        self.accepted_tokens += reply.stats.accepted_tokens
        self.note = reply.method.note or (reply.method.reason if reply.method.effective == "none" else "")

    def result(self, prompts: int) -> MethodResult:
        corrected = holm([p for _, p in self.tests])
        wrong = {name for (name, _), p in zip(self.tests, corrected, strict=True) if p < _SIGNIFICANCE}
        wrong |= {d.prompt for d in self.divergences if d.verdict == "violation"}
        near_ties = {d.prompt for d in self.divergences} - wrong
        return MethodResult(
            prompts=prompts,
            replies=self.replies,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            identical=prompts - len(wrong) - len(near_ties),
            near_tie=len(near_ties),
            violations=len(wrong),
            divergences=self.divergences,
            smallest_corrected_p_value=min(corrected, default=None),
            note=self.note,
        )


class _Verification:
    """One run of `verify`. It caches the replies of plain decoding, which all methods are compared with."""

    def __init__(
        self,
        runtime: Runtime,
        max_tokens: int,
        seed: int,
        acceptance: str,
        samples: int,
        idle_seconds: float,
        progress: _Progress | None,
        sampling: dict[str, Any],
    ) -> None:
        self._runtime = runtime
        self._max_tokens = max_tokens
        self._seed = seed
        self._acceptance = acceptance
        self._samples = samples
        self._idle_seconds = idle_seconds
        self._progress = progress
        self._case = ("", 0.0)
        self._sampling = sampling
        self._tokens: dict[str, list[int]] = {}
        self._plain: dict[tuple[str, float], Reply] = {}

    def start_case(self, case: str, fraction: float) -> None:
        """Report the next case. Raises CancelledError if `progress` returned False."""
        self._case = case, fraction
        if not self._should_continue():
            raise CancelledError("verification was cancelled")

    def _should_continue(self) -> bool:
        return self._progress is None or self._progress(*self._case)

    def _run_idle_work(self) -> None:
        """Let drafters train on the last reply until they are done or the time is up."""
        end = monotonic() + self._idle_seconds
        self._runtime.run_idle_work(lambda: monotonic() < end and self._should_continue())

    def check(
        self, findings: _MethodFindings, method: str, prompt: Prompt, temperature: float, draft_length: int
    ) -> None:
        """Verify one method for one prompt, temperature and draft length."""
        if self._acceptance == "rejection" and temperature > 0:
            self._check_distribution(findings, method, prompt, temperature, draft_length)
        else:
            self._check_tokens(findings, method, prompt, temperature, draft_length)

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
            raise CancelledError("verification was cancelled")
        return stream.reply

    def _check_tokens(
        self, findings: _MethodFindings, method: str, prompt: Prompt, temperature: float, draft_length: int
    ) -> None:
        key = (prompt.name, temperature)
        if key not in self._plain:
            self._plain[key] = self._reply(prompt, temperature, method="none", acceptance="invariant")
        plain = self._plain[key]
        other = self._reply(
            prompt, temperature, method=method, draft_length=draft_length, acceptance=self._acceptance
        )
        findings.count(other)
        self._run_idle_work()
        if other.tokens != plain.tokens:
            findings.divergences.append(self._divergence(prompt, temperature, draft_length, plain, other))

    def _divergence(
        self, prompt: Prompt, temperature: float, draft_length: int, plain: Reply, other: Reply
    ) -> Divergence:
        """Score the first difference again and decide whether rounding explains it."""
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

    def _check_distribution(
        self, findings: _MethodFindings, method: str, prompt: Prompt, temperature: float, draft_length: int
    ) -> None:
        """Sample the first tokens many times and test each position against the exact distribution."""
        after: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for i in range(self._samples):
            reply = self._sample(prompt, temperature, method, draft_length, self._seed + i)
            findings.count(reply)
            drawn = reply.tokens[:_TESTED_POSITIONS]
            for position, token in enumerate(drawn):
                after[drawn[:position]][token] += 1
        self._run_idle_work()
        known = {prefix: counts for prefix, counts in after.items() if counts.total() >= _MIN_SAMPLES}
        distributions = self._distributions(prompt, temperature, list(known))
        for position in range(_TESTED_POSITIONS):
            samples: list[Sample] = [
                (counts, distributions[prefix]) for prefix, counts in known.items() if len(prefix) == position
            ]
            p = p_value(samples)
            if p is not None:
                findings.tests.append((prompt.name, p))

    def _sample(self, prompt: Prompt, temperature: float, method: str, draft_length: int, seed: int) -> Reply:
        """Generate the first tokens of a reply in rejection mode."""
        stream = self._runtime.stream_tokens(
            self._prompt_tokens(prompt),
            max_tokens=max(_TESTED_POSITIONS, draft_length + 1),
            seed=seed,
            temperature=temperature,
            method=method,
            draft_length=draft_length,
            acceptance="rejection",
            **(self._sampling | _NO_FILTERS),
        )
        count = 0
        for piece in stream:
            count += piece.token_count
            if count >= _TESTED_POSITIONS:
                break
        else:
            if stream.reply.finish_reason == "cancelled":
                raise CancelledError("verification was cancelled")
        stream.close()
        return stream.reply

    def _distributions(
        self, prompt: Prompt, temperature: float, prefixes: Sequence[tuple[int, ...]]
    ) -> dict[tuple[int, ...], Distribution]:
        """Return the exact distribution after each prefix, computed by single-token passes."""
        start = self._prompt_tokens(prompt)
        params = SamplingParams(temperature=temperature, **(self._sampling | _NO_FILTERS))
        distributions = {}
        with self._runtime.borrowed_target() as target:
            target.prefill(start[:-1])
            for prefix in prefixes:
                distributions[prefix] = _distribution(target, params, start, prefix)
        return distributions


def _distribution(
    target: LanguageModel, params: SamplingParams, start: Sequence[int], prefix: Sequence[int]
) -> Distribution:
    """Return the distribution after `start` and `prefix`. The cache holds `start` without its last token."""
    *before, last = [start[-1], *prefix]
    for token in before:
        target.verify(TokenTree.chain(token))
        target.commit(())
    distribution = Sampler(params, 0, [*start, *prefix]).distribution(target.verify(TokenTree.chain(last)), 0)
    target.truncate(len(start) - 1)
    target.prefill(start[target.length : -1])
    return distribution
