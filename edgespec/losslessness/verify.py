"""Compare every method with plain decoding on the loaded models."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from time import monotonic
from typing import Any, cast

from edgespec.api.requests import TokensPrompt
from edgespec.api.runtime import Runtime
from edgespec.constraints.compiler import ConstraintCompiler
from edgespec.decode.reply import Reply
from edgespec.decode.request import ReplySettings, StreamArguments
from edgespec.engine.processors import LogitsProcessor
from edgespec.engine.sampling import Distribution, Sampler
from edgespec.engine.sampling_params import SamplingParams
from edgespec.engine.tree import TokenTree, common_prefix_length
from edgespec.errors import CancelledError, OptionError, shorten
from edgespec.losslessness.cases import (
    DEFAULT_SAMPLES,
    Case,
    Prompt,
    all_cases,
    check_at_once,
    count_case_replies,
    prompt_tokens,
)
from edgespec.losslessness.replay import Judgement, MadeReply, PromptRead, Reason, find_fault, judge
from edgespec.losslessness.report import Divergence, MethodFindings, Sample, VerifyReport, p_value
from edgespec.losslessness.sharing import measure_sharing
from edgespec.model.base import LanguageModel
from edgespec.options.option import Integer, checked_number
from edgespec.system.cores import CPU_LOAD

__all__ = ["verify"]

# Number of tokens at the start of each reply that the statistical tests cover.
_TESTED_POSITIONS = 3
# Test the next token after a prefix only if at least this many replies begin with the prefix.
_MIN_SAMPLES = 5
# Number of tokens of the previous prompt to cache beyond the prefix that it shares with the current one, so
# that the cache has to drop them.
_UNSHARED_TOKENS = 8
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

    In invariant mode, and in any mode at temperature 0, the tokens must be equal. If they differ, the passes
    of the reply are rerun in an empty context (see `judge`). If the rerun reproduces the reply's tokens, the
    difference is due to rounding; otherwise, it is a fault. The passes of every plain-decoding reply are
    rerun too, as are those of one reply per method and draft length.

    In rejection mode above temperature 0, the first three tokens of many replies must follow the distribution
    of plain decoding. A G-test checks each position, given the preceding tokens. P-values below 0.001 after
    Holm's correction over all tests of a method count as faults.

    With `at_once`, the methods generate as many concurrent replies as the runtime allows, and plain decoding
    generates one at a time. If a reply differs, the same method regenerates it on its own, and that reply is
    judged. If the text of another reply changes the logits (see `measure_sharing`), that is a fault too.

    During verification, the number of CPU threads does not follow the machine's load, because the number of
    threads can change how logits are rounded.

    The report contains the number of drafted tokens. If that is 0, nothing was verified. Load the runtime
    with `always_draft` to draft even where drafting is slower.

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
        **options: Sampling settings and a constraint, as for `Runtime.generate`. The schema of a prompt takes
            precedence.

    Raises:
        OptionError: A setting is invalid.
        CancelledError: `progress` returned False.
    """
    if not prompts or not methods or not temperatures or not draft_lengths:
        raise OptionError(
            "there is nothing to verify", "pass at least one prompt, method, temperature and draft length"
        )
    Integer(1).check("samples", samples)
    if not checked_number("idle_seconds", idle_seconds, "of at least 0") >= 0:
        raise OptionError(
            f"idle_seconds must not be negative, but is {idle_seconds}", "use 0, or a positive number"
        )
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
                code="option_without_effect",
            )
    compared, sampled = count_case_replies(cases, acceptance, samples)
    run = _Verification(
        *(runtime, max_tokens, seed, acceptance, samples, idle_seconds, progress, options),
        planned_tokens=compared * max_tokens + sampled * min(_TESTED_POSITIONS, max_tokens),
    )
    findings = {method: MethodFindings(len(prompts)) for method in methods}
    with CPU_LOAD.ignored():
        if at_once:
            run.check_at_once(cases, findings)
        else:
            for prompt in prompts:
                run.check_prompt([case for case in cases if case.prompt is prompt], findings)
    if progress:
        progress("done", 1.0)
    draft = runtime.draft.name if runtime.draft else None
    results = {method: each.finished_result() for method, each in findings.items()}
    heads = tuple(head.name for head in runtime.heads)
    at_a_time = runtime.parallel if at_once else 1
    is_exact = runtime.target.capabilities.exact
    return VerifyReport(runtime.target.name, draft, acceptance, results, at_a_time, heads, is_exact)


@dataclass(frozen=True, slots=True)
class _Generated:
    """A reply, and the prompts that its target has processed since its cache was empty."""

    reply: Reply
    reads: tuple[PromptRead, ...]


@dataclass
class _Verification:
    """One run of `verify`, with the plain-decoding replies that all methods are compared with."""

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
    plain: dict[tuple[str, float], _Generated] = field(default_factory=dict)
    # For each reply in `plain`, its fault and the position of its first wrong token, or None if it is
    # correct.
    plain_faults: dict[tuple[str, float], tuple[Judgement, int] | None] = field(default_factory=dict)
    # The (method, draft length) pairs for which an identical reply has been checked for leaks.
    leaks_checked: set[tuple[str, int]] = field(default_factory=set)
    # The prompts whose tokens are in the target's cache, in processing order.
    reads: tuple[PromptRead, ...] = ()
    last_prompt: Sequence[int] = ()

    @cached_property
    def constraints(self) -> ConstraintCompiler:
        return ConstraintCompiler(self.runtime.vocabulary, self.runtime.target.vocab_size)

    def should_continue(self) -> bool:
        return self.progress is None or self.progress(
            self.description, self.done_tokens / self.planned_tokens
        )

    def check_prompt(self, cases: Sequence[Case], findings: Mapping[str, MethodFindings]) -> None:
        """Check all cases of one prompt.

        All replies to the prompt are generated before any is judged, because a replay clears the cache.
        """
        self._begin_prompt(cases[0].prompt)
        replies: list[tuple[Case, _Generated]] = []
        for case in cases:
            self.description = f"{case.prompt.name}, {case.method}, temperature {case.temperature:g}"
            if not case.is_sampled(self.acceptance):
                self._plain(case)
                replies.append((case, self._reply(case, **self._drafting(case))))
                self._run_idle_work()
        for case, made in replies:
            self._compare(case, made, findings[case.method])
        for case in cases:
            self.description = f"{case.prompt.name}, {case.method}, temperature {case.temperature:g}"
            if case.is_sampled(self.acceptance):
                self._check_distribution(case, findings[case.method])

    def _begin_prompt(self, prompt: Prompt) -> None:
        """Clear all caches, and prefill the start of the previous prompt into the target's cache.

        The first reply to `prompt` then reuses the tokens that both prompts share. The caches are cleared
        because a replay can reproduce cached tokens only if it knows which prompts they came from.
        """
        tokens, before = self._prompt_tokens(prompt), self.last_prompt
        self.last_prompt = tokens
        self._clear_cache()
        if before and self._reuses_prefixes:
            start = before[: common_prefix_length(before, tokens) + _UNSHARED_TOKENS]
            stream = self.runtime.stream_tokens(start, max_tokens=1, method="none", temperature=0.0)
            self._note_read(start, stream.wait())

    def _clear_cache(self) -> None:
        self.runtime.clear_cache()
        self.reads = ()

    @property
    def _reuses_prefixes(self) -> bool:
        """Whether replies may use cached tokens.

        For recurrent models, the passes over a prompt depend on the stored state checkpoints. In a shared
        context, the positions of a reply's KV cells depend on the cached tokens of all replies.
        """
        return self.runtime.target.capabilities.partial_truncate and self.runtime.parallel == 1

    def _note_read(self, tokens: Sequence[int], reply: Reply) -> None:
        """Record which prompt tokens came from the cache, and which ones the target has processed."""
        cached = reply.stats.cached_prompt_tokens
        if self.reads:
            # A correct cache never reuses more tokens than this. If a faulty cache does, the replay must not
            # repeat the mistake.
            cached = min(cached, common_prefix_length(self.reads[-1].tokens, tokens))
        # Drop the prompts that have no tokens left in the cache.
        kept = tuple(read for read in self.reads if read.cached_tokens < cached)
        self.reads = (*kept, PromptRead(tuple(tokens), cached if kept else 0))

    def _run_idle_work(self) -> None:
        end = monotonic() + self.idle_seconds
        self.runtime.run_idle_work(lambda: monotonic() < end and self.should_continue())

    def _prompt_tokens(self, prompt: Prompt) -> list[int]:
        if prompt.name not in self.tokens:
            self.tokens[prompt.name] = prompt_tokens(self.runtime, prompt)
        return self.tokens[prompt.name]

    def _reply(self, case: Case, enough_tokens: float = inf, **options: Any) -> _Generated:
        if not self.should_continue():
            raise CancelledError("verification was cancelled")
        if not self._reuses_prefixes:
            self._clear_cache()
        reply = self._generate(case, enough_tokens, **options)
        self._note_read(self._prompt_tokens(case.prompt), reply)
        self.done_tokens += min(enough_tokens, self.max_tokens)
        return _Generated(reply, self.reads)

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
        """Generate concurrent replies, and compare each with a plain-decoding reply generated on its own."""
        for case in cases:
            self.description = f"{case.prompt.name}, alone"
            self._clear_cache()
            self._plain(case)
        self._run_idle_work()
        self._clear_cache()
        self.description = f"{self.runtime.parallel} replies at once"
        # Sort the cases, so that replies to different prompts are generated together.
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
            self.description = f"{case.prompt.name}, {case.method}, temperature {case.temperature:g}"
            # A reply that shared passes with others cannot be replayed, because it depends on them.
            self._compare(case, _Generated(reply, ()), findings[case.method])

    def _finished(self, running: Future[Reply]) -> Reply:
        if not self.should_continue():
            raise CancelledError("verification was cancelled")
        reply = running.result()
        self.done_tokens += self.max_tokens
        return reply

    def _plain(self, case: Case) -> _Generated:
        key = (case.prompt.name, case.temperature)
        if key not in self.plain:
            self.plain[key] = self._reply(case, method="none", acceptance="invariant")
        return self.plain[key]

    def _drafting(self, case: Case) -> dict[str, Any]:
        return {"method": case.method, "draft_length": case.draft_length, "acceptance": self.acceptance}

    def _compare(self, case: Case, other: _Generated, findings: MethodFindings) -> None:
        """Count a reply, and judge it if it differs from plain decoding or if the plain reply is wrong."""
        if not self.should_continue():
            raise CancelledError("verification was cancelled")
        findings.count(other.reply)
        plain, plain_fault = self._plain(case), self._judge_plain(case)
        position, leak = _first_difference(plain.reply.tokens, other.reply.tokens), None
        if plain_fault:
            judgement, position = plain_fault
        elif position is not None:
            judgement, leak = self._judge(case, other, position)
        elif fault := self._find_leak(case, other):
            judgement, position = fault
        else:
            return
        findings.result.divergences.append(
            Divergence(
                prompt=case.prompt.name,
                temperature=case.temperature,
                draft_length=case.draft_length,
                position=position,
                plain_token=_token_at(plain.reply.tokens, position),
                other_token=_token_at(other.reply.tokens, position),
                verdict=judgement.verdict,
                reason=judgement.reason,
                largest_difference=judgement.largest_difference,
                leak=leak,
            )
        )

    def _judge_plain(self, case: Case) -> tuple[Judgement, int] | None:
        """Return the fault in the plain-decoding reply and its position, or None if the reply is correct."""
        key = (case.prompt.name, case.temperature)
        if key not in self.plain_faults:
            plain = self.plain[key]
            with self.runtime.borrowed_target() as target:
                fault = find_fault(target, self._made(case, plain))
            if fault:
                reason, position = fault
                reason = self._refined(reason, case, plain, method="none", acceptance="invariant")
                self.plain_faults[key] = Judgement("fault", reason), position
            else:
                self.plain_faults[key] = None
        return self.plain_faults[key]

    def _find_leak(self, case: Case, other: _Generated) -> tuple[Judgement, int] | None:
        """Check that rejected tokens do not change later logits, once per method and draft length."""
        key, made = (case.method, case.draft_length), self._made(case, other)
        if key in self.leaks_checked or not other.reads or not made.has_rejected_tokens:
            return None
        self.leaks_checked.add(key)
        with self.runtime.borrowed_target() as target:
            fault = find_fault(target, made, finds_leaks=True)
        return (Judgement("fault", fault[0]), fault[1]) if fault else None

    def _judge(self, case: Case, other: _Generated, position: int) -> tuple[Judgement, float | None]:
        """Judge a reply that differs from plain decoding. Also return `Divergence.leak`."""
        plain = self._plain(case).reply
        if position in (len(plain.tokens), len(other.reply.tokens)):
            # The tokens before this position are equal, and they alone determine whether a reply ends.
            return Judgement("fault", Reason.ENDING), None
        if not other.reads:
            return self._judge_at_once(case, position)
        with self.runtime.borrowed_target() as target:
            made = self._made(case, other)
            judgement = judge(target, made, self._made(case, self._plain(case)), position)
        if judgement.reason:
            reason = self._refined(judgement.reason, case, other, **self._drafting(case))
            judgement = judgement._replace(reason=reason)
        return judgement, None

    def _judge_at_once(self, case: Case, position: int) -> tuple[Judgement, float | None]:
        """Judge a reply generated together with others, by regenerating it on its own."""
        alone = self._generated_alone(case, **self._drafting(case))
        plain = self._plain(case).reply.tokens
        found = Judgement("rounding")
        own_position = _first_difference(plain, alone.reply.tokens)
        if own_position is not None:
            found, _ = self._judge(case, alone, own_position)
        if found.verdict == "fault" or self.runtime.parallel == 1:
            return found, None
        widths = [len(each.tokens) for each in alone.reply.stats.rounds]
        with self.runtime.borrowed_targets() as targets:
            sharing = measure_sharing(
                targets,
                self._prompt_tokens(case.prompt),
                plain[:position],
                self._texts_beside(case, len(targets) - 1),
                width=max(widths),
            )
        largest = max(sharing.largest_difference, found.largest_difference or 0.0)
        if sharing.leak or not largest:
            return Judgement("fault", Reason.OTHER_REPLIES, largest), sharing.leak
        return Judgement("rounding", None, largest), sharing.leak

    def _generated_alone(self, case: Case, **options: Any) -> _Generated:
        """Generate a reply without cached tokens while no other reply is running."""
        self._clear_cache()
        reply = self._generate(case, **options)
        self._note_read(self._prompt_tokens(case.prompt), reply)
        return _Generated(reply, self.reads)

    def _refined(self, reason: Reason, case: Case, wrong: _Generated, **options: Any) -> Reason:
        """Return STALE_CACHE if the reply is wrong only when it reuses cached tokens, else `reason`."""
        if reason is not Reason.NOT_REPRODUCED or len(wrong.reads) < 2:
            return reason
        alone = self._generated_alone(case, **options)
        with self.runtime.borrowed_target() as target:
            fault = find_fault(target, self._made(case, alone))
        return reason if fault else Reason.STALE_CACHE

    def _made(self, case: Case, generated: _Generated) -> MadeReply:
        tokens = self._prompt_tokens(case.prompt)
        params = self._params(temperature=case.temperature)

        def sampler() -> Sampler:
            return Sampler(params, self.seed, tokens, self._constraint(case.prompt, ()))

        return MadeReply(generated.reads, generated.reply.stats.rounds, generated.reply.tokens, sampler)

    def _texts_beside(self, case: Case, count: int) -> list[Sequence[int]]:
        """Return up to `count` texts, each consisting of another prompt and its reply.

        Without other prompts, return the case's own prompt and reply.
        """
        names = [name for name in self.tokens if name != case.prompt.name][:count] or [case.prompt.name]
        return [[*self.tokens[name], *self.plain[name, case.temperature].reply.tokens] for name in names]

    def _check_distribution(self, case: Case, findings: MethodFindings) -> None:
        options = {"method": case.method, "draft_length": case.draft_length, "acceptance": "rejection"}
        options |= {"max_tokens": max(_TESTED_POSITIONS, case.draft_length + 1), **_NO_FILTERS}
        after: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for i in range(self.samples):
            reply = self._reply(case, _TESTED_POSITIONS, **(options | {"seed": self.seed + i})).reply
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
        return self._settings(self.options | changes).params

    def _settings(self, options: Mapping[str, Any]) -> ReplySettings:
        """Return the settings of a reply with these options, including the model's own defaults."""
        return self.runtime.checked_request(TokensPrompt((), ""), cast(StreamArguments, options)).settings

    def _options(self, prompt: Prompt) -> dict[str, Any]:
        return self.options | ({"schema": prompt.schema} if prompt.schema else {})

    def _constraint(self, prompt: Prompt, reply: Sequence[int]) -> list[LogitsProcessor]:
        """Return the constraint's processor, if any, advanced past the first tokens of a reply."""
        constraint = self._settings(self._options(prompt)).constraint
        if constraint is None:
            return []
        processor = self.constraints.processor(constraint, self._prompt_tokens(prompt))
        for token in reply:
            processor.push(token)
        return [processor]


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the index of the first differing token, or None if the replies are equal."""
    return None if a == b else common_prefix_length(a, b)


def _token_at(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None


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
