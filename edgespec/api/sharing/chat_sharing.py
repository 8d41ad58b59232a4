"""Load a chat's model, or share one that another of the user's programs has loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgespec import RequestQueue, Runtime
    from edgespec.api.sharing.base import ChatModel, Identity
    from edgespec.api.sharing.host import HostedModel, ModelHost
    from edgespec.store.download import Progress

__all__ = ["ChatSharing"]

# Maximum number of times to wait for another chat to load the same model, and seconds per wait.
_MAX_WAITS, _WAIT_SECONDS = 600, 0.2


class ChatSharing:
    """Loads one model at a time, and shares it with other chats while it is loaded."""

    def __init__(self) -> None:
        self._host: ModelHost | None = None
        self._queue: RequestQueue | None = None

    def load(self, arguments: Mapping[str, Any], progress: Progress) -> ChatModel:
        """Load a model, or share another program's. See `edgespec.load` for the arguments and errors."""
        # Imported lazily to avoid delaying the first screen.
        import edgespec
        from edgespec.api.sharing.base import Identity
        from edgespec.api.sharing.client import find_shared

        identity = Identity.of(arguments)
        with _loading_alone(identity, progress):
            if identity is not None and (shared := find_shared(identity, progress)) is not None:
                return shared
            runtime = edgespec.load(**arguments, progress=progress)
            # A model that had to be downloaded could not be identified until now.
            if identity := identity or Identity.of(arguments):
                self._share(runtime, identity)
            return runtime

    def _share(self, runtime: Runtime, identity: Identity) -> None:
        from edgespec import RequestQueue
        from edgespec.api.sharing.host import HostedModel, ModelHost

        queue = self._queue = RequestQueue(runtime)
        draft = runtime.draft.path if runtime.draft else "none"

        def provide(wanted: Identity) -> AbstractContextManager[HostedModel] | None:
            # The model stays loaded after the request.
            return nullcontext(HostedModel(runtime, queue)) if identity.fits(wanted, draft) else None

        self._host = ModelHost("another chat", provide)

    def is_lost(self, model: ChatModel) -> bool:
        """Return whether the program that loaded the model has exited or is not responding."""
        from edgespec.api.sharing.client import SharedModel

        return isinstance(model, SharedModel) and not model.is_there()

    @contextmanager
    def turn(self, cancel: Callable[[], None], wait: Callable[[], bool]) -> Iterator[None]:
        """Return a context manager that waits for other programs' replies to end. See `RequestQueue.turn`."""
        if self._queue is None:
            yield
        else:
            with self._queue.turn(cancel, wait):
                yield

    def withdraw(self) -> None:
        """Stop sharing the model because it is about to be closed. This ends other programs' replies."""
        host, queue, self._host, self._queue = self._host, self._queue, None, None
        if host is not None and queue is not None:
            host.close()
            queue.close()


@contextmanager
def _loading_alone(identity: Identity | None, progress: Progress) -> Iterator[None]:
    """Return a context manager that makes other chats wait instead of loading the same model.

    If a chat is suspended while it loads, the others give up waiting after a timeout.
    """
    from filelock import Timeout

    from edgespec.api.sharing.sockets import loading_lock
    from edgespec.errors import CancelledError

    lock = None if identity is None else loading_lock(identity.files)
    for _ in range(_MAX_WAITS if lock is not None else 0):
        assert lock is not None
        try:
            lock.acquire(timeout=_WAIT_SECONDS)
            break
        except Timeout:
            pass
        except (OSError, NotImplementedError):
            # The disk is full or does not support locks. At worst, two chats load the model.
            break
        if not progress("another chat is loading this model", 0.0):
            raise CancelledError("loading the model was cancelled")
    try:
        yield
    finally:
        if lock is not None:
            lock.release()
