"""Generate replies one at a time with a target and its drafters, and run idle work between them."""

from __future__ import annotations

import atexit
import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter as now

import numpy as np
from numpy.typing import NDArray

from edgespec.auto.active_replies import ACTIVE_REPLIES
from edgespec.auto.controller import AutoController
from edgespec.backends.base import LanguageModel, Progress
from edgespec.backends.base_model import scaled_progress
from edgespec.engine.loop import Step
from edgespec.engine.stats import Stats
from edgespec.errors import BusyError, ClosedError
from edgespec.idle import IdleWorker
from edgespec.memory.budget import DEFAULT_RESERVE_BYTES
from edgespec.memory.context_resize import ResizableContext
from edgespec.memory.prefix_cache import PrefixCache
from edgespec.memory.pressure import MemoryPressure
from edgespec.memory.target_cache import TargetCache
from edgespec.methods import DrafterSet
from edgespec.reply import MethodReport
from edgespec.reply_steps import ReplyDecoder, measure_target_step
from edgespec.request import Request

__all__ = ["Session"]

# Maximum time in seconds to wait for a running reply when Python exits.
_EXIT_SECONDS = 2.0


class Session:
    """Owns a target, its drafters and their caches, and runs one reply at a time.

    The models run in the thread that calls `next_step`. `cancel` and `close` can be called from any thread.

    Attributes:
        prefix_cache: KV segments of earlier prompts, or None.
        context: Resizes the target's and draft model's KV caches.
        memory_pressure: Frees caches when other programs need memory.
        unadapted_acceptance: The acceptance rate that was measured without the target's adapters, or None.
        ended_at: When the last reply ended, or 0 if there was none.
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
        self.target, self.draft = target, draft
        self.unadapted_acceptance = unadapted_acceptance
        self.ended_at = 0.0
        self.prefix_cache = prefix_cache
        self.context = ResizableContext(target, draft)
        self.drafters = drafters
        # Held while a model computes, but not while the caller processes the tokens.
        self._compute_lock = threading.Lock()
        self._state_lock = threading.Lock()
        self._active_request: object | None = None
        # Functions that end replies whose streams were garbage-collected.
        self._abandoned: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._closing = self._closed = False
        # The thread that last read a reply. At exit, MLX models must be closed in this thread.
        self._reader = threading.current_thread()
        self._closed_by_reader = threading.Event()
        self._idle_worker = IdleWorker()
        target_step_seconds = target_step_seconds or measure_target_step(target)
        store = prefix_cache.store if prefix_cache else None
        self.memory_pressure = MemoryPressure(self.context, store, reserve_bytes=reserve_bytes)
        heads = [head.state for head in drafters.heads]
        self._target_cache = TargetCache(target, prefix_cache, self.context, self.memory_pressure, heads)
        self._decoder = ReplyDecoder(
            target, drafters, self._target_cache, self.context, self.memory_pressure, target_step_seconds
        )
        _open_sessions.add(self)

    @property
    def closed(self) -> bool:
        return self._closing

    @property
    def target_step_seconds(self) -> float:
        """Moving average of the time for a single-token pass of the target."""
        return self._decoder.target_step_seconds

    @property
    def is_busy(self) -> bool:
        """Whether a reply is being generated."""
        return self._active_request is not None

    def cached_prefix_tokens(self, tokens: Sequence[int]) -> int:
        """Return how many of the first `tokens` are in the target's KV cache. Call it between replies."""
        return self._target_cache.common_tokens(tokens)

    def cached_prefixes(self) -> list[list[int]]:
        """Return the token sequences in the prefix cache."""
        return [tokens.tolist() for tokens in self.prefix_cache.sequences()] if self.prefix_cache else []

    def start(self, request: Request) -> None:
        """Reserve this session for a reply. Read its `steps` next, then call `end`.

        Raises:
            BusyError: Another reply is running.
            ClosedError: The session was closed.
        """
        self._start(request)
        ACTIVE_REPLIES.add(request)

    def steps(
        self,
        request: Request,
        *,
        is_stop: Callable[[int], bool],
        is_cancelled: Callable[[], bool],
        stats: Stats,
        progress: Progress | None = None,
    ) -> Iterator[Step]:
        """Yield the steps of a started reply: prefill the prompt, then decode. Read them with `next_step`.

        Args:
            request: The request that was passed to `start`. Its prompt must fit in the context.
            is_stop: Called with every emitted token. Returns True if the reply ends with this token.
            is_cancelled: Called between target passes.
            stats: Statistics to update.
            progress: Called during prefill.
        """
        return self._decoder.steps(
            request,
            is_stop=is_stop,
            must_stop=lambda: self._stopping or is_cancelled(),
            stats=stats,
            progress=progress,
        )

    def next_step(self, steps: Iterator[Step]) -> Step | None:
        """Return the next step, or None when the reply has ended. The last step contains the finish reason.

        Raises:
            BackendError: The model failed.
            ClosedError: The session was closed.
        """
        self._reader = threading.current_thread()
        with self._compute_lock:
            if not self._closing:
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
        if not self._state_lock.acquire(blocking=wait):
            return False
        try:
            ACTIVE_REPLIES.discard(request)
            if self._active_request is request:
                self._end()
        finally:
            self._state_lock.release()
        return True

    def end_later(self, close: Callable[[], None]) -> None:
        """Register a function that ends an abandoned reply, to be called before the next reply starts.

        This method never waits for a lock, so a finalizer can call it at any time.
        """
        self._abandoned.append(close)

    def _end_abandoned(self) -> None:
        while self._abandoned:
            self._abandoned.popleft()()

    def _start(self, request: object) -> None:
        if self._active_request is not None:
            # Collect abandoned streams, which end their replies when they are garbage-collected.
            gc.collect()
        self._end_abandoned()
        with self._state_lock:
            if self._closing:
                raise ClosedError("the runtime is closed", "load the model again")
            if self._active_request is not None:
                raise BusyError(
                    "another reply is still being generated", "wait for it, cancel it, or use a RequestQueue"
                )
            self._idle_worker.stop()
            self._active_request, self._stopping = request, False

    def _end(self) -> None:
        """End the active request and start idle work. The caller must hold `_state_lock`."""
        if not self._closed:
            self._target_cache.sync_length()
            self._interrupt(False)
        self._active_request, self.ended_at = None, now()
        if not self._closing and (
            self._decoder.idle_drafters
            or self._target_cache.saves_to_disk
            or self.memory_pressure.can_reclaim
        ):
            self._idle_worker.start(self._use_idle_time, self._reclaim_memory)

    def report(self, method: str, *, constrained: bool = False, limited: bool = False) -> MethodReport:
        """Return the report on the current or last reply with this method. See `DrafterSet.choose`."""
        drafter, report = self.drafters.choose(method, constrained=constrained, limited=limited)
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
                gain=None if progress.speed_up is None else progress.speed_up - 1.0,
                gain_uncertainty=progress.uncertainty,
                loss_limits=drafter.loss_tracker.limits,
            )
        return report

    @contextmanager
    def borrowed_target(self) -> Iterator[LanguageModel]:
        """Provide the target model, with an empty KV cache, for work other than a reply.

        Raises:
            BusyError: A reply is running.
            ClosedError: The session was closed.
        """
        borrower = object()
        self._start(borrower)
        try:
            with self._compute_lock:
                self._decoder.idle_drafters = ()
                self._target_cache.set_aside()
                yield self.target
        finally:
            self.end(borrower)

    def embed(
        self, texts: Sequence[Sequence[int]], progress: Progress | None = None
    ) -> list[NDArray[np.float32]]:
        """Return the embedding of each text with the target. See `LanguageModel.embed`.

        Raises:
            BusyError: A reply is running.
            CapabilityError: The target cannot embed texts.
            ClosedError: The session was closed.
            ContextFullError: There is not enough memory for the context of a text.
        """
        with self.borrowed_target() as target:
            longest = max(map(len, texts), default=0) + 1
            self.memory_pressure.drop_prefixes()
            self.context.grow_to(longest)
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
        if not self.prefix_cache or not self._target_cache.saves_to_disk:
            return
        with self._compute_lock:
            if should_continue() and not self._closed and self._active_request is None:
                self._target_cache.save()
        self.prefix_cache.store.write(should_continue)

    def run_idle_work(self, should_continue: Callable[[], bool]) -> None:
        """Run the idle work of the last reply's drafters in this thread; see `Runtime.run_idle_work`.

        A failure raises no exception but appears in the next `report`.
        """
        with self._compute_lock:
            succeeded = self._idle_worker.run_drafters(
                self._decoder.idle_drafters,
                lambda: not self._closing and self._active_request is None and should_continue(),
            )
            if self._closed:
                return
            if succeeded:
                self._target_cache.sync_length()
            else:
                self._target_cache.invalidate()

    def _use_idle_time(self, should_continue: Callable[[], bool]) -> None:
        self.save_prefix_cache(should_continue)
        if self._decoder.idle_drafters:
            self.run_idle_work(should_continue)

    def _reclaim_memory(self, should_continue: Callable[[], bool]) -> bool:
        """Free memory if other programs need it. Return whether more can be freed."""
        if self.prefix_cache and self.memory_pressure.is_low:
            # Save cached prefixes to disk before they are removed from memory.
            self.prefix_cache.store.write(should_continue)
        with self._compute_lock:
            if should_continue() and not self._closing and self._active_request is None:
                self._target_cache.reclaim_idle()
        return self.memory_pressure.can_reclaim

    def cancel(self, request: Request | None = None) -> None:
        """Stop the reply in progress after the current target pass.

        Args:
            request: The request to cancel if it is running. If None, cancel any running request.
        """
        with self._state_lock:
            self._idle_worker.stop()
            active = self._active_request
            if active is not None and (request or active) is active and not self._closed:
                self._stopping = True
                self._interrupt(True)

    def close(self) -> None:
        """Stop the running reply, save the prefix cache and free the models. Further calls have no effect."""
        with self._state_lock:
            self._closing = True
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
        reader = self._reader
        if self._active_request and reader is not threading.current_thread() and reader.is_alive():
            self._closing = True
            self.cancel()
            self._closed_by_reader.wait(_EXIT_SECONDS)
        self.close()

    def _interrupt(self, interrupted: bool) -> None:
        self.target.interrupt(interrupted)
        self.drafters.interrupt(interrupted)


_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close all sessions when Python exits, because unloading a library while a thread uses it can crash."""
    for session in list(_open_sessions):
        session.close_at_exit()
