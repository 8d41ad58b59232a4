"""The sessions of a runtime. Each session generates one reply at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LanguageModel, Progress
from edgespec.errors import BusyError, ClosedError
from edgespec.methods import DrafterSet
from edgespec.request import Request
from edgespec.session import Session

__all__ = ["SessionModels", "SessionPool"]


class SessionModels(NamedTuple):
    """The models and drafters of one session. Each concurrent reply has a session of its own."""

    target: LanguageModel
    draft: LanguageModel | None
    drafters: DrafterSet


class SessionPool:
    """Starts each reply in a free session. All methods can be called from any thread.

    Attributes:
        sessions: The sessions. Any of them can generate any reply, because all use the same models and
            drafters, and share cached prefixes.
    """

    def __init__(self, sessions: Sequence[Session]) -> None:
        self.sessions = sessions
        # Reentrant, because starting a reply can end an abandoned reply, whose callback may start another
        # one.
        self._starting = threading.RLock()
        self._closed = False

    @property
    def first(self) -> Session:
        """The first session, which has the same properties as all others."""
        return self.sessions[0]

    def start(self, request: Request) -> Session:
        """Reserve the free session whose KV cache saves the most prefill. See `Session.start`.

        Raises:
            BusyError: All sessions are generating replies.
            ClosedError: The pool was closed.
        """
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
                    return session
        raise self._all_busy(busy)

    def embed(
        self, texts: Sequence[Sequence[int]], progress: Progress | None = None
    ) -> list[NDArray[np.float32]]:
        """Embed texts in a free session. See `Session.embed`."""
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

        Raises:
            ClosedError: The pool was closed.
        """
        if self._closed:
            raise ClosedError("the runtime is closed", "load the model again")
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
        """Provide the targets of all sessions. No session can start a reply until the caller is done.

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
        with self._starting:
            self._closed = True
        self.cancel()
        for session in self.sessions:
            session.close()
