"""Batch the forward passes of concurrent replies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter as now
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import BackendError, CancelledError, ClosedError

__all__ = ["PassKind", "PassPart", "PassScheduler"]

PassKind: TypeAlias = Literal["logits", "embeddings", "image", "prefill", "draft", "encode"]
"""What a pass computes.

- logits: a target's or a draft model's logits, and the keys and values of prompts.
- embeddings: the hidden states after the last layer.
- image: the keys and values of an image, whose tokens may attend to each other.
- encode, prefill, draft: see `HeadPass`.
"""


def _no_rows() -> NDArray[np.float32]:
    return np.empty((0, 0), np.float32)


# Guards the state of all schedulers. They share one condition, because a reply that waits for a pass of the
# target must not delay a pass of the draft model.
_CHANGED = threading.Condition()

# Wait for a reply's next request for up to this multiple of its usual pause, plus this many seconds. Both
# values were chosen so that a slightly late reply still joins the pass without delaying it much.
_PAUSES, _EXTRA_SECONDS = 2.0, 0.0005
# Weight of the newest measurement in the moving averages of pauses and pass durations.
_WEIGHT = 0.3
# Seconds for which a reply still counts as active after its last pass. The value was chosen rather than
# measured.
_ACTIVE_SECONDS = 1.0
# Maximum pause included in the averages, as a multiple of the pass duration. Pauses are capped because a
# caller may stop reading its reply for minutes.
_MAX_PAUSE_PASSES = 4.0


@dataclass(eq=False, slots=True)
class PassPart:
    """One reply's tokens in a pass.

    Attributes:
        slot: The index of the reply's slot in the shared context.
        tokens: The tokens to run.
        positions: The position of each token in its sequence.
        sequences: For each token, the ids of the llama.cpp sequences that it belongs to.
        outputs: Number of tokens at the end of `tokens` whose logits the pass computes.
        kind: What the pass computes. Only parts of the same kind share a pass, and embeddings and images
            never share one.
        inputs: The values that replace token embeddings: a head's input states or image embeddings, float32
            [tokens, values]. Empty if the model reads token embeddings.
        components: The positions of an image's tokens, as int32 [components, tokens]. Empty for other parts.
        is_causal: Whether tokens attend only to earlier tokens.
        rows: The resulting logits as float32 [outputs, vocabulary size], or the embeddings.
        states: Hidden states of all tokens: for a target, those that its heads read; for a head, its own.
        error: Why the pass failed, or None.
        pass_tokens: Number of tokens in the pass, across all replies.
        is_done: Whether the pass has finished.
    """

    slot: int
    tokens: Sequence[int]
    positions: Sequence[int]
    sequences: Sequence[Sequence[int]]
    outputs: int
    kind: PassKind = "logits"
    inputs: NDArray[np.float32] = field(default_factory=_no_rows)
    components: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 0), np.int32))
    is_causal: bool = True
    rows: NDArray[np.float32] = field(default_factory=_no_rows)
    states: NDArray[np.float32] = field(default_factory=_no_rows)
    error: Exception | None = None
    pass_tokens: int = 0
    is_done: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Number of leading prompt tokens, whose logits are not computed."""
        return len(self.tokens) - self.outputs


@dataclass(slots=True)
class _Caller:
    """A thread that generates a reply, and the timing of its passes.

    Attributes:
        waiting_in: The scheduler that the thread is waiting in, or None.
        returned_at: When the thread's last pass of any model ended, or 0 if that pass failed.
        pause_seconds: Moving average of the time between the thread's passes of any model. None if unknown.
    """

    waiting_in: PassScheduler | None = None
    returned_at: float = 0.0
    pause_seconds: float | None = None


class _ThisThread(threading.local):
    """Provides the calling thread's `_Caller`."""

    def __init__(self) -> None:
        self.caller = _Caller()


_THIS_THREAD = _ThisThread()


@dataclass(slots=True)
class _Slot:
    """A slot of the shared context, with the timing of its reply's passes.

    Attributes:
        caller: The thread that last requested a pass.
        is_cancelled: Whether the reply was cancelled.
        returned_at: When the reply's last pass ended.
        expected_by: Deadline for the reply's next request.
        pause_seconds: Moving average of the time between the reply's passes, or None if unknown.
    """

    caller: _Caller = field(default_factory=_Caller)
    is_cancelled: bool = False
    returned_at: float = 0.0
    expected_by: float = 0.0
    pause_seconds: float | None = None


class PassScheduler:
    """Runs the passes of one context in its own thread, batching those of concurrent replies.

    A pass starts as soon as every active reply has requested one. Replies draft and sample between their
    passes, so a pass waits for them for as long as they usually take, but never longer than a pass takes. A
    reply whose caller has stopped reading delays the others only once.

    All methods can be called from any thread.

    Args:
        slots: Number of slots, one for each concurrent reply.
        max_tokens: Maximum number of tokens in a pass. Can be changed between passes.
        max_rows: Maximum number of tokens in a pass for which logits are computed.
        run: Runs one pass and sets the logits or the error of each part. Called in the scheduler's thread.
        set_interrupt: Called with True to stop the running pass, and with False before each pass.
    """

    def __init__(
        self,
        slots: int,
        max_tokens: int,
        max_rows: int,
        run: Callable[[Sequence[PassPart]], None],
        set_interrupt: Callable[[bool], None],
    ) -> None:
        self._slots = [_Slot() for _ in range(slots)]
        self.max_tokens, self._max_rows = max_tokens, max_rows
        self._run, self._set_interrupt = run, set_interrupt
        self._pass_seconds = 0.0
        self._waiting: list[PassPart] = []
        self._running: Sequence[PassPart] = ()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="edgespec-passes", daemon=True)
        self._thread.start()

    def run(self, part: PassPart) -> PassPart:
        """Process tokens in the next shared pass, and wait for the pass to finish.

        Raises:
            CancelledError: The reply in this slot was cancelled.
            ClosedError: The scheduler was closed.
            EdgespecError: The pass failed.
        """
        slot, caller = self._slots[part.slot], _THIS_THREAD.caller
        with _CHANGED:
            self._check(slot)
            slot.pause_seconds = self._mean_pause(slot.pause_seconds, slot.returned_at)
            caller.pause_seconds = self._mean_pause(caller.pause_seconds, caller.returned_at)
            slot.caller, caller.waiting_in = caller, self
            self._waiting.append(part)
            _CHANGED.notify_all()
            try:
                _CHANGED.wait_for(lambda: part.is_done)
            except BaseException:
                # After Ctrl-C, withdraw the tokens so that no later pass runs them. If a pass is already
                # running them, wait for it.
                self._withdraw(part)
                _CHANGED.wait_for(lambda: part.is_done)
                raise
            finally:
                caller.waiting_in = None
        if part.error:
            raise part.error
        return part

    def _check(self, slot: _Slot) -> None:
        if self._closed:
            raise ClosedError("the model is closed", "load the model again")
        if slot.is_cancelled:
            raise CancelledError("the model's computation was cancelled")

    def _mean_pause(self, mean_seconds: float | None, returned_at: float) -> float | None:
        """Return the average pause, updated with the pause since `returned_at` unless `returned_at` is 0."""
        if not returned_at:
            return mean_seconds
        pause = min(now() - returned_at, _MAX_PAUSE_PASSES * self._pass_seconds)
        return pause if mean_seconds is None else mean_seconds + _WEIGHT * (pause - mean_seconds)

    def _max_wait_seconds(self, pause_seconds: float | None) -> float:
        """Return how long to wait for a reply after a pass, in seconds, given its usual pause."""
        usual = self._pass_seconds if pause_seconds is None else pause_seconds
        return min(_PAUSES * usual + _EXTRA_SECONDS, self._pass_seconds)

    def is_shared(self, slot: int) -> bool:
        """Return whether replies in other slots are being generated."""
        with _CHANGED:
            active = {part.slot for part in (*self._waiting, *self._running)} | {
                index for index, each in enumerate(self._slots) if now() - each.returned_at < _ACTIVE_SECONDS
            }
            return bool(active - {slot})

    def cancel(self, slot: int, enabled: bool) -> None:
        """Make current and later passes of a slot raise CancelledError, or stop doing so if not `enabled`.

        If other replies share the pass, it continues, and only this reply's results are discarded.
        """
        self._slots[slot].is_cancelled = enabled
        if not enabled:
            return
        with _CHANGED:
            for part in list(self._waiting):
                if part.slot == slot:
                    self._withdraw(part)
            if self._running and all(self._slots[part.slot].is_cancelled for part in self._running):
                self._set_interrupt(True)

    def _withdraw(self, part: PassPart) -> None:
        """Remove a part that is waiting for its pass. The caller must hold the lock."""
        if part in self._waiting:
            self._waiting.remove(part)
            self._finish(part, CancelledError("the model's computation was cancelled"))

    def _finish(self, part: PassPart, error: Exception | None) -> None:
        slot = self._slots[part.slot]
        slot.returned_at = slot.caller.returned_at = 0.0 if error else now()
        slot.expected_by = 0.0 if error else slot.returned_at + self._max_wait_seconds(slot.pause_seconds)
        part.error, part.is_done = error, True
        _CHANGED.notify_all()

    def _serve(self) -> None:
        while parts := self._next_parts():
            started = now()
            try:
                self._run(parts)
            except Exception as error:
                for part in parts:
                    part.error = part.error or BackendError(
                        f"a forward pass failed: {error}", "send the message again, or load the model again"
                    )
            with _CHANGED:
                seconds = now() - started
                before = self._pass_seconds or seconds
                self._pass_seconds = before + _WEIGHT * (seconds - before)
                self._running = ()
                for part in parts:
                    part.pass_tokens = sum(len(each.tokens) for each in parts)
                    self._finish(part, part.error or self._cancellation(part))

    def _cancellation(self, part: PassPart) -> Exception | None:
        if self._slots[part.slot].is_cancelled:
            return CancelledError("the model's computation was cancelled")
        return None

    def _next_parts(self) -> Sequence[PassPart]:
        """Wait until a pass can start, and return its parts. After `close`, return none."""
        with _CHANGED:
            while not self._closed:
                seconds = self._seconds_to_wait() if self._waiting else None
                if seconds is not None and seconds <= 0.0:
                    self._running = self._take()
                    self._set_interrupt(False)
                    return self._running
                _CHANGED.wait(seconds)
            for part in self._waiting:
                self._finish(part, ClosedError("the model is closed", "load the model again"))
            self._waiting.clear()
            return ()

    def _seconds_to_wait(self) -> float:
        """Return how many seconds to wait for further requests, or at most zero to start the pass now."""
        waiting = {part.slot for part in self._waiting}
        others = (slot for index, slot in enumerate(self._slots) if index not in waiting)
        return max(map(self._expected_by, others), default=0.0) - now()

    def _expected_by(self, slot: _Slot) -> float:
        """Return the deadline for the slot's next request."""
        caller = slot.caller
        if caller.waiting_in is None:
            # After a pass of one model, a reply may request a pass of any model next.
            return max(slot.expected_by, caller.returned_at + self._max_wait_seconds(caller.pause_seconds))
        # A target pass waits for replies that are still drafting, but a draft model's pass does not wait for
        # replies that have finished drafting.
        is_away = caller.waiting_in._pass_seconds > self._pass_seconds
        return 0.0 if is_away else slot.expected_by

    def _take(self) -> Sequence[PassPart]:
        """Remove and return the parts of the next pass, in the order of their requests."""
        tokens = rows = 0
        taken: list[PassPart] = []
        for part in list(self._waiting):
            tokens += len(part.tokens)
            rows += part.outputs
            is_full = tokens > self.max_tokens or rows > self._max_rows
            if taken and (is_full or part.kind != taken[0].kind or part.kind in ("embeddings", "image")):
                break
            self._waiting.remove(part)
            taken.append(part)
        return taken

    def close(self) -> None:
        """Make all waiting requests raise ClosedError, and wait for the running pass to finish."""
        with _CHANGED:
            self._closed = True
            _CHANGED.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()
