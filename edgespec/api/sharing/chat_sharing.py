"""Load the model of a chat, or share one that another program of this user has loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgespec import RequestQueue, Runtime
    from edgespec.api.sharing.base import ChatModel, Identity
    from edgespec.api.sharing.host import Lent, ModelHost
    from edgespec.store.download import Progress

__all__ = ["ChatSharing"]

# How often, and how many seconds each time, to wait for another chat that loads the same model.
_MAX_WAITS, _WAIT_SECONDS = 600, 0.2


class ChatSharing:
    """Loads one model at a time, and lets other chats use it as long as it is loaded."""

    def __init__(self) -> None:
        self._host: ModelHost | None = None
        self._queue: RequestQueue | None = None

    def load(self, arguments: Mapping[str, Any], progress: Progress) -> ChatModel:
        """Load a model unless another program has it. Takes the arguments and raises the errors of `load`."""
        # Not imported before the first screen is drawn.
        import edgespec
        from edgespec.api.sharing.base import Identity
        from edgespec.api.sharing.client import find_shared

        identity = Identity.of(arguments)
        with _loading_alone(identity, progress):
            if identity is not None and (shared := find_shared(identity, progress)) is not None:
                return shared
            runtime = edgespec.load(**arguments, progress=progress)
            # A model that was downloaded just now has an identity only from here on.
            if identity := identity or Identity.of(arguments):
                self._share(runtime, identity)
            return runtime

    def _share(self, runtime: Runtime, identity: Identity) -> None:
        from edgespec import RequestQueue
        from edgespec.api.sharing.host import ModelHost, lending

        queue = self._queue = RequestQueue(runtime)
        draft = runtime.draft.path if runtime.draft else "none"

        def lend(wanted: Identity) -> AbstractContextManager[Lent] | None:
            return lending(runtime, queue) if identity.fits(wanted, draft) else None

        self._host = ModelHost("another chat", lend)

    def is_lost(self, model: ChatModel) -> bool:
        """Return whether the model belonged to a program that has ended or does not answer."""
        from edgespec.api.sharing.client import SharedModel

        return isinstance(model, SharedModel) and not model.is_there()

    @contextmanager
    def turn(self, cancel: Callable[[], None], wait: Callable[[], bool]) -> Iterator[None]:
        """Return a context manager that waits until no other program generates. See `RequestQueue.turn`."""
        if self._queue is None:
            yield
        else:
            with self._queue.turn(cancel, wait):
                yield

    def withdraw(self) -> None:
        """Stop sharing the model, which is about to be closed. Replies of other programs end."""
        host, queue, self._host, self._queue = self._host, self._queue, None, None
        if host is not None and queue is not None:
            host.close()
            queue.close()


@contextmanager
def _loading_alone(identity: Identity | None, progress: Progress) -> Iterator[None]:
    """Return a context manager in which no other chat loads the same model, so that one can wait for it.

    A chat that is suspended while it loads keeps others waiting only for a while.
    """
    from filelock import Timeout

    from edgespec.api.sharing.sockets import loading_lock
    from edgespec.errors import CancelledError

    lock = None if identity is None else loading_lock(identity.files)
    for _ in range(_MAX_WAITS if lock is not None else 0):
        assert lock is not None
        with suppress(Timeout):
            lock.acquire(timeout=_WAIT_SECONDS)
            break
        if not progress("another chat is loading this model", 0.0):
            raise CancelledError("loading the model was cancelled")
    try:
        yield
    finally:
        if lock is not None:
            lock.release()
