"""Generate replies with a pool of sessions, one per concurrent reply."""

from __future__ import annotations

import atexit
import gc
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from time import perf_counter as now
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.decode.drafter_set import DrafterSet, ResolvedMethod
from edgespec.decode.idle import IdleWorker, drafters_with_idle_work
from edgespec.decode.reply import MethodReport
from edgespec.decode.request import Request
from edgespec.engine.acceptance import Invariant, RandomDraws, Rejection
from edgespec.engine.logits import Logits, TokenLogprob
from edgespec.engine.loop import Step, decode
from edgespec.engine.sampling import Sampler
from edgespec.engine.stats import Stats
from edgespec.engine.tree import TokenTree
from edgespec.errors import BusyError, CancelledError, ClosedError, EdgespecError
from edgespec.memory.constants import DEFAULT_RESERVE_BYTES, MIN_ROOM_TOKENS
from edgespec.memory.context_resize import ResizableContext
from edgespec.memory.prefix_cache.cache import PrefixCache
from edgespec.memory.pressure import MemoryPressure
from edgespec.memory.target_cache import TargetCache
from edgespec.methods.auto.controller import ACTIVE_REPLIES, AutoController
from edgespec.methods.base import Drafter
from edgespec.methods.costs.constants import PLAIN_STEP_WEIGHT
from edgespec.model.base import LanguageModel, Progress
from edgespec.model.base_model import scaled_progress
from edgespec.model.image_tokens import text_tokens

__all__ = ["Session", "SessionModels", "SessionPool", "check_process", "measure_target_step"]

# Number of target passes between reports on the drafting. Reporting after every pass would slow down small
# models.
_PASSES_PER_REPORT = 8
# Maximum time in seconds to wait for a running reply when Python exits.
_EXIT_SECONDS = 2.0


class SessionModels(NamedTuple):
    """The models and drafters of one session. Each concurrent reply has its own session."""

    target: LanguageModel
    draft: LanguageModel | None
    drafters: DrafterSet


class SessionPool:
    """Starts each reply in a free session. All methods can be called from any thread.

    Attributes:
        sessions: The sessions. Any of them can generate any reply, because all use the same models and
            drafters, and share cached prefixes.
        first: The first session. Its properties apply to all sessions.
    """

    def __init__(self, sessions: Sequence[Session]) -> None:
        self.sessions, self.first = sessions, sessions[0]
        # Reentrant, because starting a reply can end an abandoned one, whose callback may start yet another.
        self._starting = threading.RLock()

    def start(self, request: Request) -> Session:
        """Reserve the free session whose KV cache saves the most prefill. See `Session.start`.

        Raises:
            BusyError: All sessions are generating replies.
            ClosedError: The pool was closed.
        """
        check_process(self.first.process_id)
        with self._starting:
            sessions = self._free_sessions()
            if len(sessions) > 1:
                # On a tie, prefer the session that has been idle the longest.
                cached = {session: session.cached_prefix_tokens(request.tokens) for session in sessions}
                sessions = sorted(sessions, key=lambda session: (-cached[session], session.ended_at))
            for session in sessions:
                try:
                    session.start(request)
                except BusyError as error:
                    busy = error
                else:
                    ACTIVE_REPLIES.add(id(session))
                    return session
        raise self._all_busy(busy)

    def embed(
        self, texts: Sequence[Sequence[int]], progress: Progress | None = None
    ) -> list[NDArray[np.float32]]:
        """Embed texts in a free session. See `Session.embed`."""
        check_process(self.first.process_id)
        with self._starting:
            sessions = self._free_sessions()
        for session in sessions:
            try:
                return session.embed(texts, progress)
            except BusyError as error:
                busy = error
        raise self._all_busy(busy)

    def _free_sessions(self) -> Sequence[Session]:
        """Return the sessions that are not busy, or all sessions if all are busy.

        A busy session may hold an abandoned reply, which ends when another reply starts.
        """
        return [session for session in self.sessions if not session.is_busy] or self.sessions

    def _all_busy(self, error: BusyError) -> BusyError:
        if len(self.sessions) == 1:
            return error
        return BusyError(
            f"{len(self.sessions)} other replies are still being generated",
            "wait for one of them, cancel one, or use a RequestQueue",
        )

    @contextmanager
    def borrowed_targets(self) -> Iterator[Sequence[LanguageModel]]:
        """Borrow the targets of all sessions. No session can start a reply until they are returned.

        Raises:
            BusyError: A reply is running.
            ClosedError: The pool was closed.
        """
        with ExitStack() as borrowed:
            yield [borrowed.enter_context(session.borrowed_target()) for session in self.sessions]

    def clear_cache(self) -> None:
        """Clear the prefix cache and the caches of all sessions. Raises BusyError or ClosedError."""
        for session in self.sessions:
            session.clear_cache()

    def cancel(self) -> None:
        """Stop all replies in progress after the current target pass."""
        for session in self.sessions:
            session.cancel()

    def close(self) -> None:
        """Stop all replies and free the models. Further calls have no effect."""
        self.cancel()
        for session in self.sessions:
            session.close()


class Session:
    """Owns a target, its drafters and their caches, and runs one reply at a time.

    The models run in the thread that calls `next_step`. `cancel` and `close` can be called from any thread.

    After a fork, the child process cannot use the models. In the child, `close` and `cancel` have no effect,
    and all methods that use the models raise EdgespecError.

    Attributes:
        process_id: ID of the process that loaded the models.
        prefix_cache: KV segments of earlier prompts, or None.
        context: Resizes the target's and draft model's KV caches.
        memory_pressure: Frees caches when other programs need memory.
        unadapted_acceptance: The acceptance rate that was measured without the target's adapters, or None.
        is_closing: Whether `close` has been called.
        published_report: The latest report on the drafting of the current or last reply.
        ended_at: When the last reply ended, or 0 if there was none.
        target_step_seconds: Moving average of the time for a single-token pass of the target.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafters: DrafterSet,
        prefix_cache: PrefixCache | None = None,
        draft: LanguageModel | None = None,
        reserve_bytes: int = DEFAULT_RESERVE_BYTES,
        unadapted_acceptance: float | None = None,
        target_step_seconds: float | None = None,
    ) -> None:
        self.process_id = os.getpid()
        self.target, self.draft = target, draft
        self.unadapted_acceptance = unadapted_acceptance
        self.ended_at = 0.0
        self.prefix_cache = prefix_cache
        self.context = ResizableContext(target, draft)
        self.drafters = drafters
        # Held while a model computes, but not while the caller processes the tokens.
        self._compute_lock = threading.Lock()
        # Reentrant, because a signal handler can call `cancel` in the thread that holds the lock.
        self._state_lock = threading.RLock()
        self._active_request: object | None = None
        # Callbacks that end the replies of garbage-collected streams.
        self._abandoned: deque[Callable[[], None]] = deque()
        self._stopping = False
        self.is_closing = self._closed = False
        # Whether the models have been interrupted.
        self._is_interrupted = False
        # The thread that last read a reply. At exit, MLX models must be closed in this thread.
        self._reader = threading.current_thread()
        self._closed_by_reader = threading.Event()
        self._idle_worker = IdleWorker()
        self.published_report = MethodReport("none", "none", "there was no reply yet")
        # The method and the drafter of the current or last reply.
        self._method: ResolvedMethod | None = None
        self._drafter: Drafter | None = None
        # The last reply's drafters that have work to do between replies.
        self._idle_drafters: Sequence[Drafter] = ()
        self.target_step_seconds = target_step_seconds or measure_target_step(target)
        if prefix_cache:
            prefix_cache.reuse_costs.assume_target_step(self.target_step_seconds)
        store = prefix_cache.store if prefix_cache else None
        self.memory_pressure = MemoryPressure(self.context, store, reserve_bytes=reserve_bytes)
        heads = [head.state for head in drafters.heads]
        self._target_cache = TargetCache(target, prefix_cache, self.context, self.memory_pressure, heads)
        _open_sessions.add(self)

    @property
    def is_busy(self) -> bool:
        """Whether a reply is being generated."""
        return self._active_request is not None

    def cached_prefix_tokens(self, tokens: Sequence[int]) -> int:
        """Return how many of the leading `tokens` are in the target's KV cache. Call only between replies."""
        return self._target_cache.common_tokens(tokens)

    def cached_prefixes(self) -> list[list[int]]:
        """Return the token sequences in the prefix cache."""
        return [tokens.tolist() for tokens in self.prefix_cache.sequences()] if self.prefix_cache else []

    def steps(
        self,
        request: Request,
        *,
        is_stop: Callable[[int], bool],
        is_cancelled: Callable[[], bool],
        stats: Stats,
        progress: Progress | None = None,
    ) -> Iterator[Step]:
        """Prefill the prompt, then decode, yielding the steps of the reply. Fetch them with `next_step`.

        Replaces `published_report` every few target passes and at the end.

        Args:
            request: The request that was passed to `start`. Its prompt must fit in the context.
            is_stop: Called with every emitted token. Returns True if the reply ends with this token.
            is_cancelled: Called between target passes.
            stats: Statistics to update.
            progress: Called during prefill.
        """

        def must_stop() -> bool:
            return self._stopping or is_cancelled()

        settings = request.settings
        self.published_report = request.method.report
        try:
            drafter = self.drafters.choose(request.method)
        except CancelledError:
            yield Step((), 0, "cancelled")
            return
        self._method, self._drafter = request.method, drafter
        if isinstance(drafter, AutoController):
            drafter.limit_loss(settings.max_loss)
        # The target cache keeps a reference to this list, so the reply's tokens are appended to it in place.
        tokens = list(request.tokens)
        self._idle_drafters = ()
        first_logits: Logits | None = None
        scores: tuple[TokenLogprob, ...] | None = None
        started = now()
        stats.prompt_tokens = len(tokens)
        try:
            if not must_stop():
                if self._target_cache.use_adapters(settings.adapter_scales):
                    # Reset the drafters, because heads cache values computed from hidden states under the
                    # previous adapter scales.
                    self.drafters.reset()
                if settings.prompt_logprobs is not None:
                    scores = self._target_cache.score(tokens, settings.prompt_logprobs, stats, progress)
                if settings.max_tokens:
                    first_logits = self._prefill(request, tokens, drafter, stats, progress)
        except CancelledError:
            yield Step((), 0, "cancelled")
            return
        finally:
            stats.prefill_seconds = now() - started - stats.growth_seconds
        if scores is not None:
            # Do not count these tokens as a cache hit, because scoring the prompt has only just cached them.
            stats.cached_prompt_tokens = 0
            yield Step((), 0, None, prompt_logprobs=scores)
        if not settings.max_tokens:
            yield Step((), 0, "cancelled" if must_stop() else "length")
            return
        drafted_tokens, decode_seconds = 0, 0.0
        for step in self._decode(request, tokens, drafter, first_logits, is_stop, must_stop, stats):
            tokens.extend(step.tokens)
            if stats.decoded_tokens and step.tokens and stats.drafted_tokens == drafted_tokens:
                step_seconds = stats.decode_seconds - decode_seconds
                self.target_step_seconds += PLAIN_STEP_WEIGHT * (step_seconds - self.target_step_seconds)
            drafted_tokens, decode_seconds = stats.drafted_tokens, stats.decode_seconds
            if stats.ttft_seconds is None and step.tokens:
                stats.ttft_seconds = now() - started
            ended = step.finish_reason is not None
            if stats.worst_case_loss is None:
                stats.target_step_seconds = self.target_step_seconds
            stats.busy_passes += self.target.threads < self.target.max_threads
            if ended or stats.target_passes % _PASSES_PER_REPORT == 1:
                self._report_drafting(drafter, stats)
            if drafter and ended:
                _count_draft_memory(stats, drafter)
            yield step
            if self.context.needs_room and not (ended or must_stop()):
                stats.growth_seconds += self.context.make_room()
            self.memory_pressure.check_during_reply()

    def _prefill(
        self,
        request: Request,
        tokens: list[int],
        drafter: Drafter | None,
        stats: Stats,
        progress: Progress | None,
    ) -> Logits | None:
        """Run the prompt through the target and the drafter, and return the logits for the first token."""
        room = min(request.settings.max_tokens, MIN_ROOM_TOKENS)
        first_logits = self._target_cache.prepare(tokens, room, stats, progress)
        self.target.run_ahead(drafter is None)
        if drafter:
            # Drafts depend only on the text, because no drafter can see images.
            drafter.begin(text_tokens(tokens) if request.images else tokens)
            _count_draft_memory(stats, drafter)
            self._idle_drafters = drafters_with_idle_work(drafter)
        self.target.pipeline_with(self.drafters.chain_model(request.method))
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
        settings = request.settings
        facts, capabilities = self.target.facts, self.target.facts.capabilities
        is_rejection = settings.acceptance == "rejection"
        return decode(
            self.target,
            drafter,
            Rejection(RandomDraws(settings.seed)) if is_rejection else Invariant(),
            Sampler(
                settings.params,
                settings.seed,
                text_tokens(tokens) if request.images else tokens,
                request.processors,
            ),
            tokens[-1],
            first_logits,
            vocab_size=facts.vocab_size,
            max_width=capabilities.max_width,
            max_branches=capabilities.max_branches if capabilities.tree else 1,
            draft_length=settings.max_draft_length(drafter.chooses_length) if drafter else 0,
            max_tokens=settings.max_tokens,
            is_stop=is_stop,
            is_cancelled=must_stop,
            stats=stats,
            logprobs=settings.logprobs,
        )

    def _report_drafting(self, drafter: Drafter | None, stats: Stats) -> None:
        """Update the statistics that depend on the drafting, and publish a report on it."""
        stats.threads = self.target.threads
        if isinstance(drafter, AutoController):
            stats.target_step_seconds = drafter.target_step_seconds
            stats.ledger_credit_seconds = drafter.loss_tracker.credit_seconds
            stats.worst_case_loss = drafter.loss_tracker.max_loss
        self.published_report = self.report()

    def next_step(self, steps: Iterator[Step]) -> Step | None:
        """Return the next step, or None when the reply has ended. The last step contains the finish reason.

        Raises:
            BackendError: The model failed.
            ClosedError: The session was closed.
        """
        check_process(self.process_id)
        self._reader = threading.current_thread()
        with self._compute_lock:
            if not self.is_closing:
                return next(steps, None)
        self.close()
        self._closed_by_reader.set()
        raise ClosedError("the runtime was closed during the reply", "load the model again")

    def end(self, request: object, *, wait: bool = True) -> bool:
        """End a reply, so that another one can start. Has no effect if the reply is not running.

        Args:
            request: The request that was passed to `start`.
            wait: Whether to wait if the session is locked.

        Returns:
            False if `wait` is False and the session is locked. The reply is then still running.
        """
        if self._is_forked:
            return True
        if wait:
            # Ctrl-C between `acquire` and `try` would leave the lock locked, but `with` is safe.
            with self._state_lock:
                self._end(request)
            return True
        # Garbage collection can run in code that holds the lock. Acquiring it again in the same thread would
        # succeed. `threading.Condition` calls this method too.
        if self._state_lock._is_owned():  # type: ignore[attr-defined]
            return False
        held: list[bool] = []
        try:
            # If Ctrl-C arrives between a call and an assignment, the result of the call would be lost.
            held.extend(filter(None, map(self._state_lock.acquire, [False])))
            if held:
                self._end(request)
        finally:
            if held:
                self._state_lock.release()
        return bool(held)

    def end_later(self, close: Callable[[], None]) -> None:
        """Register a function that ends an abandoned reply, to be called before the next reply starts.

        This method never waits for a lock, so a finalizer can call it at any time.
        """
        self._abandoned.append(close)

    def _end_abandoned(self) -> None:
        while self._abandoned:
            self._abandoned.popleft()()

    @property
    def _is_forked(self) -> bool:
        """Whether another process loaded the models. Locks held during the fork stay locked in the child."""
        return os.getpid() != self.process_id

    def start(self, request: object) -> None:
        """Reserve this session for a reply, or for other work with the models. Call `end` afterwards.

        Args:
            request: Identifies the reply or the work. For a reply, call `steps` next.

        Raises:
            BusyError: Another reply is running.
            ClosedError: The session was closed.
        """
        check_process(self.process_id)
        if self._active_request is not None:
            # Collect abandoned streams, which end their replies when they are garbage-collected.
            gc.collect()
        self._end_abandoned()
        with self._state_lock:
            if self.is_closing:
                raise ClosedError("the runtime is closed", "load the model again")
            if self._active_request is not None:
                raise BusyError(
                    "another reply is still being generated", "wait for it, cancel it, or use a RequestQueue"
                )
            self._idle_worker.stop()
            if self._is_interrupted:
                # A signal handler cancelled the last reply while it was ending.
                self._interrupt(False)
            self._stopping, self._active_request = False, request

    def _end(self, request: object) -> None:
        """End a request if it is active, and start idle work. The caller must hold `_state_lock`."""
        if self._active_request is not request:
            return
        ACTIVE_REPLIES.discard(id(self))
        if not self._closed:
            self._target_cache.sync_length()
            self._interrupt(False)
        self._active_request, self.ended_at = None, now()
        if not self.is_closing and (
            self._idle_drafters
            or self._target_cache.saves_to_disk
            or self._target_cache.has_reply_to_read
            or self.memory_pressure.can_reclaim
        ):
            self._idle_worker.start(self._use_idle_time, self._reclaim_memory)

    def report(self) -> MethodReport:
        """Return a report on the drafting of the current or last reply. There must have been one.

        Call this in the thread that runs the models. Other threads read `published_report`.
        """
        assert self._method is not None
        drafter, report = self._drafter, self._method.report
        notes = [self.context.notice, self.memory_pressure.notice]
        if drafter:
            failures = [self._idle_worker.failures.get(part.name, "") for part in drafter.parts]
            notes = [drafter.note(), *failures, *notes]
        report = replace(report, note=" · ".join(filter(None, notes)))
        if isinstance(drafter, AutoController):
            progress = drafter.report()
            return replace(
                report,
                effective="+".join(progress.drafters) or "none",
                reason=progress.reason,
                chat_reason=progress.chat_reason,
                unused=progress.unused,
                gain=None if progress.speed_up is None else progress.speed_up - 1.0,
                gain_uncertainty=progress.uncertainty,
                loss_limits=drafter.loss_tracker.limits,
            )
        return report

    @contextmanager
    def borrowed_target(self) -> Iterator[LanguageModel]:
        """Borrow the target model, with an empty KV cache, for work other than a reply.

        Raises:
            BusyError: A reply is running.
            ClosedError: The session was closed.
        """
        borrower = object()
        try:
            # Ctrl-C between `start` and `try` would leave the session busy.
            self.start(borrower)
            with self._compute_lock:
                self._idle_drafters = ()
                self._target_cache.set_aside()
                yield self.target
        finally:
            self.end(borrower)

    def embed(
        self, texts: Sequence[Sequence[int]], progress: Progress | None = None
    ) -> list[NDArray[np.float32]]:
        """Return the target's embedding of each text. See `LanguageModel.embed`.

        Raises:
            BusyError: A reply is running.
            CapabilityError: The target cannot embed texts.
            ClosedError: The session was closed.
            ContextFullError: There is not enough memory for the context that a text requires.
        """
        with self.borrowed_target() as target:
            if self._target_cache.use_loaded_adapters():
                self.drafters.reset()
            longest = max(map(len, texts), default=0) + 1
            self.memory_pressure.drop_prefixes()
            self.context.grow_to(longest + target.facts.capabilities.padding_tokens)
            self.context.check_fits(longest)
            return [
                target.embed(
                    tokens, progress and scaled_progress(progress, done / len(texts), 1 / len(texts))
                )
                for done, tokens in enumerate(texts)
            ]

    def clear_cache(self) -> None:
        """Clear the prefix cache and the target's and drafters' caches. Raises BusyError or ClosedError."""
        with self.borrowed_target():
            self.drafters.reset()
            if self.prefix_cache:
                self.prefix_cache.store.clear()

    def save_prefix_cache(self, should_continue: Callable[[], bool] = lambda: True) -> None:
        """Add the target's KV state to the prefix cache, and save the prefix cache if it uses the disk."""
        if not self.prefix_cache or not self._target_cache.saves_to_disk or self._is_forked:
            return
        with self._compute_lock:
            if should_continue() and not self._closed and self._active_request is None:
                self._target_cache.save()
        self.prefix_cache.store.write(should_continue)

    def run_idle_work(self, should_continue: Callable[[], bool]) -> None:
        """Run the idle work of the last reply's drafters in this thread; see `Runtime.run_idle_work`.

        Failures are not raised, but appear in the next `report`.
        """
        check_process(self.process_id)
        with self._compute_lock:
            if self._active_request is not None:
                # The target cache is still recording the tokens of a reply.
                return
            succeeded = self._idle_worker.run_drafters(
                self._idle_drafters,
                lambda: not self.is_closing and self._active_request is None and should_continue(),
            )
            if self._closed:
                return
            if succeeded:
                self._target_cache.sync_length()
            else:
                self._target_cache.invalidate()

    def _read_reply(self, should_continue: Callable[[], bool]) -> None:
        with self._compute_lock:
            if not self._closed and self._active_request is None:
                self._target_cache.read_reply(
                    lambda: not self.is_closing and self._active_request is None and should_continue()
                )

    def _use_idle_time(self, should_continue: Callable[[], bool]) -> None:
        if self._target_cache.has_reply_to_read:
            self._read_reply(should_continue)
        self.save_prefix_cache(should_continue)
        if self._idle_drafters:
            self.run_idle_work(should_continue)

    def _reclaim_memory(self, should_continue: Callable[[], bool]) -> bool:
        """Free memory if other programs need it. Return whether more can be freed."""
        if self.prefix_cache and self.memory_pressure.is_low:
            # Save cached prefixes to disk before they are removed from memory.
            self.prefix_cache.store.write(should_continue)
        with self._compute_lock:
            if should_continue() and not self.is_closing and self._active_request is None:
                self._target_cache.reclaim_idle()
        return self.memory_pressure.can_reclaim

    def cancel(self, request: Request | None = None) -> None:
        """Stop the reply in progress after the current target pass.

        Args:
            request: The request to cancel if it is running. If None, cancel any running request.
        """
        if self._is_forked:
            return
        with self._state_lock:
            self._idle_worker.stop()
            active = self._active_request
            if active is not None and (request or active) is active and not self._closed:
                self._stopping = True
                self._interrupt(True)

    def close(self) -> None:
        """Stop the running reply, save the prefix cache and free the models. Further calls have no effect."""
        if self._is_forked:
            return
        with self._state_lock:
            self.is_closing = True
        self.cancel()
        with self._compute_lock, self._state_lock:
            if not self._closed:
                self._closed = True
                if self._target_cache.saves_to_disk:
                    self._interrupt(False)
                    self._target_cache.save()
                self.drafters.close()
                self.target.close()
        self._idle_worker.join()
        self._end_abandoned()
        if self.prefix_cache:
            self.prefix_cache.store.write()

    def close_at_exit(self) -> None:
        """Close the session when Python exits.

        MLX models must be closed in the thread that last read a reply. If another thread is still reading a
        reply, wait up to two seconds for that thread to close the models.
        """
        if self._is_forked:
            return
        reader = self._reader
        if self._active_request and reader is not threading.current_thread() and reader.is_alive():
            self.is_closing = True
            self.cancel()
            self._closed_by_reader.wait(_EXIT_SECONDS)
        self.close()

    def _interrupt(self, interrupted: bool) -> None:
        # Set this first, because a signal handler can cancel the reply between the calls.
        self._is_interrupted = interrupted
        self.target.interrupt(interrupted)
        self.drafters.interrupt(interrupted)


def check_process(loaded_by: int) -> None:
    """Raise EdgespecError if this process is a fork of the one that loaded a model.

    A fork does not copy threads, so llama.cpp and MLX would wait forever for theirs.

    Args:
        loaded_by: ID of the process that loaded the model.
    """
    if os.getpid() != loaded_by:
        raise EdgespecError(
            f"a model that was loaded in process {loaded_by} cannot be used in a process forked from it",
            "start the process with multiprocessing's `spawn` method and load the model there, or share one"
            " model between processes with `edgespec serve`",
            code="process_forked",
        )


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


_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close all sessions when Python exits, because unloading a library while a thread uses it can crash."""
    for session in list(_open_sessions):
        session.close_at_exit()
