"""The connected workers of a target, and the calls that run on them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

from edgespec.cluster.guarded_calls import ConnectProgress, GuardedCalls, wait_for
from edgespec.cluster.link import Link, LinkSpeed, measure_link
from edgespec.cluster.machines import Machines
from edgespec.cluster.ssh import reach_workers
from edgespec.cluster.status import Library

__all__ = ["ConnectedWorkers"]

_Result = TypeVar("_Result")
# When llama.cpp loses a connection, the worker's link usually breaks too. Wait this long for the link's
# error, which names the worker.
_REASON_SECONDS = 2.0


class ConnectedWorkers:
    """Reserves all workers of a target until `close`. Starts those that are reached by SSH.

    Calls that reach the workers go through `call`.

    Args:
        machines: The machines named in `--workers`.
        library: The library that runs the target, with its version on this machine.
        progress: Called while edgespec connects. Returning False cancels the connection.

    Attributes:
        links: The reserved workers.
        local_bytes: Memory of this machine for layers of the target.

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
        self._calls = GuardedCalls()
        for link in self.links:
            link.watch(self._calls.fail)
        self._speeds: dict[Link, LinkSpeed] = {}

    def speed_of(self, link: Link) -> LinkSpeed:
        """Return the speed of the connection to a worker, measured on the first call. Raises WorkerError."""
        if link not in self._speeds:
            self._speeds[link] = measure_link(link.address)
        return self._speeds[link]

    @property
    def is_lost(self) -> bool:
        """Whether a worker was lost. After that, no llama.cpp object may be used or freed."""
        return self._calls.is_lost

    def call(self, work: Callable[[], _Result], *, can_abandon: bool = False) -> _Result:
        """Run `work` and return its result. Raises WorkerLostError as soon as a worker is lost.

        If `can_abandon` is set, raises CancelledError soon after an interrupt. See `GuardedCalls.call`.
        """
        return self._calls.call(work, can_abandon=can_abandon)

    def interrupt(self, enabled: bool) -> None:
        """Abandon the current pass and all later ones until called with False."""
        self._calls.interrupt(enabled)

    def run_later(self, work: Callable[[], None]) -> None:
        """Queue `work` to run after all earlier calls, without waiting for it."""
        self._calls.run_later(work)

    def lose(self, what: str, next_step: str) -> None:
        """Make all calls fail because a worker was lost. See `GuardedCalls.fail`."""
        self._calls.fail(what, next_step)

    def report_abort(self) -> None:
        """Make all calls fail because llama.cpp lost the connection to a worker."""
        self._calls.wait_for_failure(_REASON_SECONDS)
        names = ", ".join(str(link.address) for link in self.links)
        self._calls.fail(f"the connection to a worker broke ({names})", self.links[0].address.restart_advice)

    def close(self, last: Callable[[], None] | None = None) -> None:
        """Run `last` if possible, then release the workers. See `GuardedCalls.close`."""
        try:
            self._calls.close(last)
        finally:
            self._undo.close()
