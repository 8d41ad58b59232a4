"""Prefill the prompt of a reply, decode the reply, and record its statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter as now

import numpy as np

from edgespec.auto.controller import AutoController
from edgespec.backends.base import LanguageModel, Progress
from edgespec.drafters.base import Drafter
from edgespec.engine.acceptance import Invariant, RandomDraws, Rejection
from edgespec.engine.logits import Logits
from edgespec.engine.loop import Step, decode
from edgespec.engine.sampling import Sampler
from edgespec.engine.stats import Stats
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError
from edgespec.idle import drafters_with_idle_work
from edgespec.memory.context_resize import MIN_ROOM_TOKENS, ResizableContext
from edgespec.memory.pressure import MemoryPressure
from edgespec.memory.target_cache import TargetCache
from edgespec.methods import DrafterSet
from edgespec.request import Request

__all__ = ["ReplyDecoder", "measure_target_step"]

# Number of target passes between updates of the drafting statistics. Updating them after every pass would
# slow down small models.
_PASSES_PER_REPORT = 8
# Weight of the newest measurement in a moving average of the time per token.
_STEP_WEIGHT = 0.2


class ReplyDecoder:
    """Prefills and decodes one reply at a time. A `Session` owns it, and its locks protect it.

    Args:
        target: The target.
        drafters: The drafters of the methods that a reply can use.
        target_cache: Prepares the target's KV cache for a prompt.
        context: Resizes the KV caches while a reply grows.
        memory_pressure: Frees caches when other programs need memory.
        target_step_seconds: Measured time for a single-token pass of the target.

    Attributes:
        target_step_seconds: Moving average of the time for a single-token pass of the target.
        idle_drafters: The drafters of the last reply that have work for the time between replies.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafters: DrafterSet,
        target_cache: TargetCache,
        context: ResizableContext,
        memory_pressure: MemoryPressure,
        target_step_seconds: float,
    ) -> None:
        self._target, self._drafters, self._target_cache = target, drafters, target_cache
        self._context, self._memory_pressure = context, memory_pressure
        self.target_step_seconds = target_step_seconds
        self.idle_drafters: Sequence[Drafter] = ()

    def steps(
        self,
        request: Request,
        *,
        is_stop: Callable[[int], bool],
        must_stop: Callable[[], bool],
        stats: Stats,
        progress: Progress | None,
    ) -> Iterator[Step]:
        """Yield the steps of a reply. See `Session.steps`."""
        drafter = self._choose_drafter(request)
        # The target cache keeps this list, so the tokens of the reply must be appended to it.
        tokens = list(request.tokens)
        self.idle_drafters = ()
        first_logits: Logits | None = None
        started = now()
        stats.prompt_tokens = len(tokens)
        try:
            if not must_stop():
                first_logits = self._prefill(request, tokens, drafter, stats, progress)
        except CancelledError:
            yield Step((), 0, "cancelled")
            return
        finally:
            stats.prefill_seconds = now() - started - stats.growth_seconds
        drafted_tokens, decode_seconds = 0, 0.0
        for step in self._decode(request, tokens, drafter, first_logits, is_stop, must_stop, stats):
            tokens.extend(step.tokens)
            if stats.decoded_tokens and step.tokens and stats.drafted_tokens == drafted_tokens:
                step_seconds = stats.decode_seconds - decode_seconds
                self.target_step_seconds += _STEP_WEIGHT * (step_seconds - self.target_step_seconds)
            drafted_tokens, decode_seconds = stats.drafted_tokens, stats.decode_seconds
            if stats.ttft_seconds is None and step.tokens:
                stats.ttft_seconds = now() - started
            ended = step.finish_reason is not None
            self._record(drafter, stats, ended=ended)
            yield step
            if self._context.needs_room and not (ended or must_stop()):
                stats.growth_seconds += self._context.make_room()
            self._memory_pressure.check_during_reply()

    def _choose_drafter(self, request: Request) -> Drafter | None:
        drafter, _ = self._drafters.choose(
            request.method,
            constrained=request.constraint is not None,
            limited=request.max_loss is not None,
        )
        if isinstance(drafter, AutoController):
            drafter.limit_loss(request.max_loss)
        return drafter

    def _prefill(
        self,
        request: Request,
        tokens: list[int],
        drafter: Drafter | None,
        stats: Stats,
        progress: Progress | None,
    ) -> Logits | None:
        """Run the prompt through the target and the drafter, and return the logits for the first token."""
        if self._target_cache.use_adapters(request.adapter_scales):
            # Reset the drafters, because heads cache values that they computed from the target's hidden
            # states with other adapter scales.
            self._drafters.reset()
        room = min(request.max_tokens, MIN_ROOM_TOKENS)
        first_logits = self._target_cache.prepare(tokens, room, stats, progress)
        self._target.run_ahead(drafter is None)
        if drafter:
            drafter.begin(tokens)
            _count_draft_memory(stats, drafter)
            self.idle_drafters = drafters_with_idle_work(drafter)
        limited = request.max_loss is not None
        self._target.pipeline_with(self._drafters.chain_model(request.method, limited=limited))
        return first_logits

    def _decode(
        self,
        request: Request,
        tokens: list[int],
        drafter: Drafter | None,
        first_logits: Logits | None,
        is_stop: Callable[[int], bool],
        must_stop: Callable[[], bool],
        stats: Stats,
    ) -> Iterator[Step]:
        facts, capabilities = self._target.facts, self._target.facts.capabilities
        is_rejection = request.acceptance == "rejection"
        return decode(
            self._target,
            drafter,
            Rejection(RandomDraws(request.seed)) if is_rejection else Invariant(),
            Sampler(request.params, request.seed, tokens, request.processors),
            tokens[-1],
            first_logits,
            vocab_size=facts.vocab_size,
            max_width=capabilities.max_width,
            max_branches=capabilities.max_branches if capabilities.tree else 1,
            draft_length=request.max_draft_length(drafter.chooses_length) if drafter else 0,
            max_tokens=request.max_tokens,
            is_stop=is_stop,
            is_cancelled=must_stop,
            stats=stats,
            logprobs=request.logprobs,
        )

    def _record(self, drafter: Drafter | None, stats: Stats, *, ended: bool) -> None:
        """Update the statistics after a step. Those about the drafter are updated only now and then."""
        if stats.worst_case_loss is None:
            stats.target_step_seconds = self.target_step_seconds
        stats.busy_passes += self._target.threads < self._target.max_threads
        reports = ended or stats.target_passes % _PASSES_PER_REPORT == 1
        if reports:
            stats.threads = self._target.threads
        if reports and isinstance(drafter, AutoController):
            report = drafter.report()
            stats.target_step_seconds = report.target_step_seconds
            stats.ledger_credit_seconds, stats.worst_case_loss = report.credit_seconds, report.max_loss
        if drafter and ended:
            _count_draft_memory(stats, drafter)


def measure_target_step(target: LanguageModel) -> float:
    """Return the time in seconds for a single-token pass of the target, whose KV cache must be empty."""
    rows = np.array([0])
    target.verify(TokenTree.chain(0)).at(0, rows)
    # Remove the warm-up token from the KV cache, which may have room for only one token.
    target.truncate(0)
    started = now()
    target.verify(TokenTree.chain(0)).at(0, rows)
    seconds = now() - started
    target.truncate(0)
    return seconds


def _count_draft_memory(stats: Stats, drafter: Drafter) -> None:
    memory = drafter.memory_use
    stats.draft_weight_bytes, stats.draft_kv_bytes = memory.weight_bytes, memory.cache_bytes
    stats.draft_other_bytes = memory.other_bytes
