"""Connect to a target's workers, and run the calls that depend on them.

Calls that may hang run in a separate thread, so that the caller can continue if a worker is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from edgespec.cluster.link import ConnectProgress, Link, LinkSpeed, measure_link, wait_for
from edgespec.cluster.machines import Machines
from edgespec.cluster.ssh import reach_workers
from edgespec.cluster.status import Library
from edgespec.errors import CancelledError, WorkerLostError

__all__ = ["ConnectedWorkers"]

_Result = TypeVar("_Result")
# When llama.cpp loses a connection, the worker's link usually breaks too. Wait this many seconds for the
# link's error, which says which worker was lost.
_REASON_SECONDS = 2.0
# Seconds to wait for the current pass to finish after an interrupt before abandoning it. The next reply has
# to wait until an abandoned pass ends.
_INTERRUPT_SECONDS = 0.2
# Seconds that `close` waits for an abandoned pass to finish, so that the final call can still run.
_CLOSE_SECONDS = 2.0


class _Call:
    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.is_done = self.is_abandoned = False
        self.result: Any = None
        self.error: BaseException | None = None


class ConnectedWorkers:
    """Reserves a target's workers until `close`, and starts those that are reached over SSH.

    Calls that depend on the workers go through `call`, which runs them one after another in a thread of their
    own. llama.cpp aborts the process if it loses a worker, and waits forever for a worker that hangs. In both
    cases, the thread is abandoned and stays blocked until the process exits.

    A pass on workers can take seconds, so after `interrupt`, the caller soon returns without waiting for the
    pass. The thread still finishes the pass before it runs later calls.

    Args:
        machines: The machines named in `--workers`.
        library: The library that runs the target, with its version on this machine.
        progress: Called while edgespec connects. Returning False cancels the connection.

    Attributes:
        links: The reserved workers.
        local_bytes: Memory on this machine for the target's layers, in bytes.

    Raises:
        WorkerError, MemoryBudgetError, CancelledError: See `Link` and `reach_workers`. No worker stays
            reserved.
    """

    def __init__(self, machines: Machines, library: Library, progress: ConnectProgress | None = None) -> None:
        self.local_bytes = machines.local_bytes
        with ExitStack() as undo:
            links = []
            for address in undo.enter_context(reach_workers(machines.workers, progress)):
                description = f"connecting to {address}"
                links.append(wait_for(partial(Link, address, library), description, progress, Link.close))
                undo.callback(links[-1].close)
            self.links: tuple[Link, ...] = tuple(links)
            self._undo = undo.pop_all()
        self._speeds: dict[Link, LinkSpeed] = {}
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._changed = threading.Condition()
        # Which worker was lost and why, and what the user can do about it. Empty while all are connected.
        self._lost = self._next_step = ""
        self._is_interrupted = False
        self._abandoned: _Call | None = None
        threading.Thread(target=self._run, name="edgespec-workers", daemon=True).start()
        for link in self.links:
            link.watch(self.lose)

    def speed_of(self, link: Link) -> LinkSpeed:
        """Return the speed of the connection to a worker, measured on the first call. Raises WorkerError."""
        if link not in self._speeds:
            self._speeds[link] = measure_link(link.address)
        return self._speeds[link]

    @property
    def is_lost(self) -> bool:
        """Whether a worker was lost. After that, no llama.cpp object may be used or freed."""
        return bool(self._lost)

    @property
    def _is_stuck(self) -> bool:
        """Whether an abandoned call is still running."""
        return self._abandoned is not None and not self._abandoned.is_done

    def call(self, work: Callable[[], _Result], *, can_abandon: bool = False) -> _Result:
        """Run `work` in the thread and return its result, or re-raise its exception.

        Args:
            work: The call.
            can_abandon: Whether an interrupt can abandon the call while it runs. A call that is still waiting
                for an abandoned one can always be abandoned.

        Raises:
            WorkerLostError: A worker was lost, before this call or during it.
            CancelledError: The call was abandoned.
        """
        call = _Call(work)
        self._calls.put(call)
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    call.is_done or self._lost or (self._is_interrupted and (can_abandon or self._is_stuck))
                )
            )
            if not self._changed.wait_for(lambda: call.is_done or self._lost, _INTERRUPT_SECONDS):
                call.is_abandoned, self._abandoned = True, call
                raise CancelledError("the model's computation was cancelled")
        if not call.is_done:
            raise WorkerLostError(self._lost, self._next_step)
        if call.error is not None:
            raise call.error
        result: _Result = call.result
        return result

    def interrupt(self, enabled: bool) -> None:
        """Abandon the current pass and all later ones until called with False."""
        with self._changed:
            self._is_interrupted = enabled
            self._changed.notify_all()

    def run_later(self, work: Callable[[], None]) -> None:
        """Queue `work` to run in the thread after all earlier calls, without waiting for it."""
        self._calls.put(_Call(work))

    def lose(self, what: str, next_step: str) -> None:
        """Make the current call and all later ones fail. Can be called from any thread.

        Only the first call sets the message.

        Args:
            what: Which worker was lost, and why.
            next_step: What the user can do about it.
        """
        with self._changed:
            if not self._lost:
                self._lost, self._next_step = what, next_step
            self._changed.notify_all()

    def report_abort(self) -> None:
        """Make all calls fail because llama.cpp has lost the connection to a worker."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost, _REASON_SECONDS)
        names = ", ".join(str(link.address) for link in self.links)
        self.lose(f"lost the connection to a worker ({names})", self.links[0].address.restart_advice)

    def close(self, last: Callable[[], None] | None = None) -> None:
        """Stop the thread after all earlier calls, and release the workers.

        Args:
            last: A final call to run. Skipped if a worker was lost or an abandoned call does not return.
        """
        try:
            if last is not None:
                with self._changed:
                    self._changed.wait_for(lambda: self._lost or not self._is_stuck, _CLOSE_SECONDS)
                if not self._is_stuck:
                    with suppress(WorkerLostError):
                        self.call(last)
            self._calls.put(None)
        finally:
            self._undo.close()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            if self._lost:
                continue
            if not call.is_abandoned:
                try:
                    call.result = call.work()
                except BaseException as error:
                    call.error = error
            with self._changed:
                call.is_done = True
                self._changed.notify_all()
            # Drop the reference, so that the call's result is freed while waiting for the next call.
            del call
