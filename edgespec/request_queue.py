"""A queue of requests in front of a runtime, for programs that serve several callers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from edgespec.chat.message import Message, as_messages
from edgespec.checks import check_integer
from edgespec.errors import BusyError, CancelledError, ClosedError, EdgespecError
from edgespec.reply import Reply, TextChunk
from edgespec.runtime import Runtime
from edgespec.stream import ReplyStream

__all__ = ["QueuedReply", "RequestQueue"]


class RequestQueue:
    """Runs requests on one runtime, first come, first served.

    Replies are generated in a thread of the queue, so a caller that reads its reply slowly does not hold up
    the others. All methods may be called from any thread. Closing the queue does not close the runtime.
    Call `cancel` on a reply that nobody will read. The callback `on_end` runs in the thread of the queue and
    must not wait for another queued reply.

    Args:
        runtime: The runtime. Other replies on it make queued requests fail with BusyError.
        max_waiting: How many requests may wait while one runs.
    """

    def __init__(self, runtime: Runtime, *, max_waiting: int = 16) -> None:
        self._runtime = runtime
        self._max_waiting = check_integer("max_waiting", max_waiting, 0, (1 << 31) - 1)
        self._waiting: deque[QueuedReply] = deque()
        self._running: QueuedReply | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._serve, name="edgespec-requests", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """The number of requests that have not started yet."""
        return len(self._waiting)

    def stream(self, prompt: str, **options: Any) -> QueuedReply:
        """Queue a request for the reply to one prompt. Takes the arguments of `Runtime.stream`.

        Raises:
            BusyError: Too many requests are waiting.
            ClosedError: The queue was closed.
        """
        return self._submit(lambda: self._runtime.stream(prompt, **options))

    def stream_messages(self, messages: Sequence[Message | Mapping[str, Any]], **options: Any) -> QueuedReply:
        """Queue a request for the reply to a list of messages, as `Runtime.stream_messages` takes them.

        Raises:
            BusyError: Too many requests are waiting.
            ClosedError: The queue was closed.
            OptionError: A message is invalid.
        """
        # A copy: the caller may change its list before the request's turn.
        checked = as_messages(messages)
        return self._submit(lambda: self._runtime.stream_messages(checked, **options))

    def _submit(self, start: Callable[[], ReplyStream]) -> QueuedReply:
        with self._changed:
            if self._closed:
                raise ClosedError("the request queue is closed", "create another one")
            if len(self._waiting) + (self._running is not None) > self._max_waiting:
                raise BusyError(f"{self._max_waiting} requests are waiting already", "try again later")
            queued = QueuedReply(start, self._remove)
            self._waiting.append(queued)
            self._changed.notify_all()
            return queued

    def _remove(self, queued: QueuedReply) -> bool:
        """Remove a request that has not started. Returns False if it has."""
        with self._changed:
            if queued not in self._waiting:
                return False
            self._waiting.remove(queued)
            return True

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                self._running = running = self._waiting.popleft()
            error = running._run()
            # First, so that a caller that has seen the end of its reply can submit the next request.
            with self._changed:
                self._running = None
            running._end(error)

    def close(self) -> None:
        """Cancel the running reply, end the waiting requests with ClosedError, and stop the thread."""
        with self._changed:
            self._closed = True
            waiting, running = list(self._waiting), self._running
            self._waiting.clear()
            self._changed.notify_all()
        for queued in waiting:
            queued._end(
                ClosedError("the request queue was closed before the request started", "submit it to another")
            )
        if running:
            running.cancel()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> RequestQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class QueuedReply:
    """Iterator over the text chunks of a queued reply. `RequestQueue` creates it.

    Iterating waits for the request's turn and then for each chunk. It raises what `ReplyStream` raises, and
    CancelledError or ClosedError if the request was cancelled, or the queue closed, before its turn.
    """

    def __init__(self, start: Callable[[], ReplyStream], remove: Callable[[QueuedReply], bool]) -> None:
        self._start = start
        self._remove = remove
        self._stream: ReplyStream | None = None
        self._cancelled = threading.Event()
        # None marks the end of the reply.
        self._chunks: SimpleQueue[TextChunk | Exception | None] = SimpleQueue()
        self._ended: Exception | None = None

    @property
    def stream(self) -> ReplyStream | None:
        """The running or finished stream, with its stats and method. None before the request's turn."""
        return self._stream

    @property
    def reply(self) -> Reply:
        """The finished reply. Raises EdgespecError before the end."""
        if self._stream is None:
            raise EdgespecError("the reply has not started", "iterate over it first")
        return self._stream.reply

    def __iter__(self) -> Iterator[TextChunk]:
        return self

    def __next__(self) -> TextChunk:
        if self._ended:
            raise self._ended
        chunk = self._chunks.get()
        if isinstance(chunk, TextChunk):
            return chunk
        self._ended = chunk or StopIteration()
        # Other threads may be waiting for the end of the same reply.
        self._chunks.put(chunk)
        raise self._ended

    def wait(self) -> Reply:
        """Wait for the end of the reply and return it."""
        for _ in self:
            pass
        return self.reply

    def cancel(self) -> None:
        """Cancel the request: remove it from the queue, or end the running reply and keep its text."""
        self._cancelled.set()
        if self._remove(self):
            self._end(CancelledError("the request was cancelled before it started"))
        elif self._stream:
            self._stream.cancel()

    def _run(self) -> Exception | None:
        """Generate the reply. Returns the error that ended it, if any."""
        try:
            self._stream = stream = self._start()
            # `cancel` may have been called when there was no stream to cancel yet.
            if self._cancelled.is_set():
                stream.cancel()
            for chunk in stream:
                self._chunks.put(chunk)
        except Exception as error:
            return error
        except BaseException as error:
            # A callback of the caller may raise SystemExit. It must not end the thread of the queue.
            failure = EdgespecError(f"the reply was ended by {type(error).__name__}", "submit it again")
            failure.__cause__ = error
            return failure
        return None

    def _end(self, error: Exception | None) -> None:
        self._chunks.put(error)
