"""A target and its drafters: one reply after another over the same caches, and what is done between them."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter as now

import numpy as np

from edgespec.auto.active_replies import ACTIVE_REPLIES
from edgespec.auto.controller import AutoController
from edgespec.backends.base import LanguageModel, Progress
from edgespec.drafters.base import Drafter
from edgespec.engine.acceptance import Acceptance, Invariant, RandomDraws, Rejection
from edgespec.engine.loop import Step, decode
from edgespec.engine.sampling import Sampler
from edgespec.engine.stats import Stats
from edgespec.engine.tree import TokenTree
from edgespec.errors import BusyError, CancelledError, ClosedError
from edgespec.idle import IdleWorker, drafters_with_idle_work
from edgespec.memory.context_resize import MIN_ROOM_TOKENS, ResizableContext
from edgespec.memory.prefix_cache import PrefixCache
from edgespec.memory.pressure import MemoryPressure
from edgespec.memory.target_cache import TargetCache
from edgespec.methods import DrafterSet
from edgespec.reply import MethodReport
from edgespec.request import Request

__all__ = ["Session"]

# How a reply stands is put into words now and then: on a small target every round would take longer for it.
_ACCOUNT_ROUNDS = 8


class Session:
    """Keeps target and drafters in step with the tokens they have seen.

    `target_step_seconds`: the last known cost of a plain step of the target. `prefix_cache`: what it has read
    of other texts, to go back to. `context`: how much target and draft model take, and may come to take.
    `memory_pressure`: what of that other programs are given back.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafters: DrafterSet,
        prefix_cache: PrefixCache | None = None,
        draft: LanguageModel | None = None,
    ) -> None:
        self.target = target
        self.prefix_cache = prefix_cache
        self.context = ResizableContext(target, draft)
        self.drafters = drafters
        # `_working` is held while a model runs, never while a caller looks at what came out.
        self._working = threading.Lock()
        self._state = threading.Lock()
        self._current: object | None = None
        self._stopping = False
        self._closing = self._closed = False
        # Between replies these improve; they belong to the last reply, whose tokens are cached.
        self._idle_worker = IdleWorker()
        self._idle_drafters: Sequence[Drafter] = ()
        self.target_step_seconds = self._measure_target_step()
        self.memory_pressure = MemoryPressure(self.context, prefix_cache.store if prefix_cache else None)
        self._text = TargetCache(target, prefix_cache, self.context, self.memory_pressure)
        _open_sessions.add(self)

    @property
    def closed(self) -> bool:
        """True once `close` was called."""
        return self._closing

    def _measure_target_step(self) -> float:
        """The first step pays for cold memory, the second tells."""
        anything = np.array([0])
        self.target.verify(TokenTree.chain(0)).at(0, anything)
        self.target.truncate(0)  # the context may hold one token
        started = now()
        self.target.verify(TokenTree.chain(0)).at(0, anything)
        seconds = now() - started
        self.target.truncate(0)
        return seconds

    def run(
        self,
        request: Request,
        *,
        is_stop: Callable[[int], bool],
        is_cancelled: Callable[[], bool],
        stats: Stats,
        progress: Progress | None = None,
    ) -> Generator[Step]:
        """Decode one reply. The prompt must fit the context.

        Raises BusyError, ClosedError and what the backend raises; a cancel ends with a last Step.
        """
        self._start(request)
        tokens = list(request.tokens)
        try:
            steps = self._steps(
                request, tokens, is_stop, lambda: self._stopping or is_cancelled(), stats, progress
            )
            with ACTIVE_REPLIES.one_more():
                while (step := self._next(steps)) is not None:
                    yield step
        finally:
            self._end()

    def _start(self, request: object) -> None:
        with self._state:
            if self._closing:
                raise ClosedError("the runtime is closed", "load the model again")
            if self._current is not None:
                raise BusyError("another reply is still being produced", "finish or close that one first")
            self._idle_worker.stop()
            self._current, self._stopping = request, False

    @contextmanager
    def borrowed_target(self) -> Iterator[LanguageModel]:
        """The target with an empty cache, for other work than a reply. Raises BusyError, ClosedError."""
        self._start(object())
        try:
            with self._working:
                self._idle_drafters = ()
                self._text.distrust()
                self.target.truncate(0)
                yield self.target
        finally:
            self._end()

    def clear_cache(self) -> None:
        """Give up what target and drafters hold of any text. Raises BusyError, ClosedError."""
        with self.borrowed_target():
            self.drafters.reset()
            if self.prefix_cache:
                self.prefix_cache.store.forget()

    def _next(self, steps: Iterator[Step]) -> Step | None:
        with self._working:
            if self._closing:
                raise ClosedError("the runtime was closed during the reply", "load the model again")
            return next(steps, None)

    def _end(self) -> None:
        with self._state:
            if not self._closed:
                self._text.settle()
                self._interrupt(False)
            self._current = None
            if not self._closing and (
                self._idle_drafters or self._text.saved or self.memory_pressure.anything
            ):
                self._idle_worker.start(self._use_quiet, self._give_way)

    def _use_quiet(self, wanted: Callable[[], bool]) -> None:
        """What is done while nobody asks: the text is kept, and drafters improve."""
        self.save_prefix_cache(wanted)
        if self._idle_drafters:
            self.run_idle_work(wanted)

    def _give_way(self, wanted: Callable[[], bool]) -> bool:
        """Give memory to other programs while nobody asks; False where nothing is left to give."""
        if self.prefix_cache and self.memory_pressure.short:
            self.prefix_cache.store.write(wanted)  # what is on disk is soon dropped
        with self._working:
            if wanted() and not self._closing and self._current is None:
                self._text.give_way()
        return self.memory_pressure.anything

    def save_prefix_cache(self, wanted: Callable[[], bool] = lambda: True) -> None:
        """Keep the text in the cache, on disk too, while `wanted()`; a reply may begin meanwhile."""
        if not self.prefix_cache or not self._text.saved:
            return
        with self._working:
            if wanted() and not self._closed and self._current is None:
                self._text.keep()
        self.prefix_cache.store.write(wanted)

    def run_idle_work(self, should_continue: Callable[[], bool]) -> None:
        """Run the idle work of the last reply's drafters in this thread.

        It ends when `should_continue()` returns False or a reply begins. A failure is no error of a reply:
        see `note`.
        """
        with self._working:
            fine = self._idle_worker.run_drafters(
                self._idle_drafters, lambda: not self._closing and self._current is None and should_continue()
            )
            if self._closed:
                return
            if fine:
                self._text.settle()  # what a rest lost is lost
            else:
                self._text.distrust()

    def report(self, method: str) -> MethodReport:
        """How the running or last reply by this method stands: what guesses, why, and what that gains.

        With it what the drafters have learnt, which learn no more, a context that found no memory, and what
        other programs were given of it.
        """
        drafter, report = self.drafters.choose(method)
        memory = (self.context.notice, self.memory_pressure.notice)
        if drafter is None:
            return replace(report, note=" · ".join(filter(None, memory)))
        trouble = (self._idle_worker.failures.get(part.name, "") for part in drafter.parts)
        notes = (drafter.note(), *trouble, *memory)
        report = replace(report, note=" · ".join(filter(None, notes)))
        if controller := self.drafters.controller(method):
            account = controller.report()
            return replace(
                report,
                effective="+".join(account.drafters) or "none",
                reason=account.reason,
                gain=account.speed_up - 1.0,
                gain_uncertainty=account.uncertainty,
            )
        return report

    def _steps(
        self,
        request: Request,
        tokens: list[int],
        is_stop: Callable[[int], bool],
        is_cancelled: Callable[[], bool],
        stats: Stats,
        progress: Progress | None,
    ) -> Iterator[Step]:
        """Prefill, then rounds. `tokens` grows with what is emitted."""
        drafter, _ = self.drafters.choose(request.how.method)
        controller = self.drafters.controller(request.how.method)
        self._idle_drafters = ()
        started = now()
        stats.prompt_tokens = len(tokens)
        try:
            if not is_cancelled():
                self._begin(tokens, min(request.max_tokens, MIN_ROOM_TOKENS), drafter, stats, progress)
        except CancelledError:
            yield Step((), 0, "cancelled")
            return
        finally:
            stats.prefill_seconds = now() - started - stats.growth_seconds
        drafted, seconds = 0, 0.0
        for step in self._rounds(request, tokens, drafter, is_stop, is_cancelled, stats):
            tokens.extend(step.tokens)
            if step.tokens and stats.drafted_tokens == drafted:
                self.target_step_seconds += 0.2 * (stats.decode_seconds - seconds - self.target_step_seconds)
            drafted, seconds = stats.drafted_tokens, stats.decode_seconds
            if stats.worst_case_loss is None:
                stats.target_step_seconds = self.target_step_seconds
            if stats.ttft_seconds is None and step.tokens:
                stats.ttft_seconds = now() - started
            if drafter:
                _count_drafter(stats, drafter, controller, ended=step.finish_reason is not None)
            yield step
            if self.context.short and not (step.finish_reason or is_cancelled()):
                stats.growth_seconds += self.context.make_room()
            self.memory_pressure.within_reply()

    def _begin(
        self, tokens: list[int], beyond: int, drafter: Drafter | None, stats: Stats, progress: Progress | None
    ) -> None:
        """Bring target and drafter to the prompt, with room for `beyond` tokens more."""
        stats.cached_prompt_tokens = self._text.become(tokens, beyond, stats, progress)
        self.target.run_ahead(drafter is None)
        if drafter:
            drafter.begin(tokens)
            _count_memory(stats, drafter)
            self._idle_drafters = drafters_with_idle_work(drafter)

    def _rounds(
        self,
        request: Request,
        tokens: list[int],
        drafter: Drafter | None,
        is_stop: Callable[[int], bool],
        is_cancelled: Callable[[], bool],
        stats: Stats,
    ) -> Iterator[Step]:
        """The loop, as the request wants it and as target and drafter can do it."""
        capabilities = self.target.facts.capabilities
        self.target.run_ahead(drafter is None)
        self.target.pipeline_with(self.drafters.chain_model(request.how.method))
        return decode(
            self.target,
            drafter,
            _acceptance_rule(request),
            Sampler(request.params, request.seed, tokens),
            tokens[-1],
            vocab_size=self.target.facts.vocab_size,
            max_width=capabilities.max_width,
            max_branches=capabilities.max_branches if capabilities.tree else 1,
            draft_length=request.how.levels(drafter.chooses_length) if drafter else 0,
            max_tokens=request.max_tokens,
            is_stop=is_stop,
            is_cancelled=is_cancelled,
            stats=stats,
        )

    def _interrupt(self, wanted: bool) -> None:
        self.target.interrupt(wanted)
        self.drafters.interrupt(wanted)

    def cancel(self, request: Request | None = None) -> None:
        """End the running reply within one round, from any thread; with a request, only if it is that one."""
        with self._state:
            self._idle_worker.stop()
            if (
                self._current is not None
                and (request is None or request is self._current)
                and not self._closed
            ):
                self._stopping = True
                self._interrupt(True)

    def close(self) -> None:
        """Stop what runs and free target and drafters. Closing again does nothing."""
        with self._state:
            self._closing = True
        self.cancel()
        with self._working, self._state:
            if not self._closed:
                self._closed = True
                if self._text.saved:
                    self._interrupt(False)
                    self._text.keep()
                self.drafters.close()
                self.target.close()
        self._idle_worker.join()
        if self.prefix_cache:
            self.prefix_cache.store.write()


def _count_memory(stats: Stats, drafter: Drafter) -> None:
    """What looks guesses up has grown by the end of a reply, or began in it."""
    memory = drafter.memory_use
    stats.draft_weight_bytes, stats.draft_kv_bytes = memory.weight_bytes, memory.cache_bytes
    stats.draft_other_bytes = memory.other_bytes


def _count_drafter(stats: Stats, drafter: Drafter, controller: AutoController | None, *, ended: bool) -> None:
    """How the reply stands by its ledger, where somebody keeps one: now and then, and at the end."""
    if not ended and stats.target_passes % _ACCOUNT_ROUNDS != 1:
        return
    if controller:
        account = controller.report()
        stats.target_step_seconds = account.target_step_seconds
        stats.ledger_credit_seconds = account.credit_seconds
        stats.worst_case_loss = account.worst_loss
    if ended:
        _count_memory(stats, drafter)


def _acceptance_rule(request: Request) -> Acceptance:
    """The rule a request asks for."""
    return Rejection(RandomDraws(request.seed)) if request.how.acceptance == "rejection" else Invariant()


_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A native library must not be torn down under a thread that still computes in it."""
    for session in list(_open_sessions):
        session.close()
