"""A request queue that lets several callers share one runtime."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from edgespec.api.embedding import Embedding
from edgespec.api.requests import Prompt, Replies, ReplyRequest
from edgespec.api.runtime import Runtime
from edgespec.api.stream import ReplyStream
from edgespec.decode.reply import Reply, TextChunk
from edgespec.decode.request import StreamArguments
from edgespec.decode.session import check_process
from edgespec.errors import BusyError, CancelledError, ClosedError, EdgespecError
from edgespec.model.base import Progress
from edgespec.options.option import Integer
from edgespec.system.waiting import SignalEvent

__all__ = ["QueuedEmbeddings", "QueuedReply", "RequestQueue"]


_Queued = TypeVar("_Queued", "QueuedReply", "QueuedEmbeddings", "_Turn")
# Seconds between calls to a waiting caller's `wait` function.
_WAIT_SECONDS = 0.1


class RequestQueue(Replies["QueuedReply"]):
    """Runs requests on one runtime in the order they arrive, up to `Runtime.parallel` at a time.

    Replies are generated in the queue's own threads, so a caller that reads its reply slowly does not
    delay the others. All methods can be called from any thread. Closing the queue does not close the
    runtime. Call `cancel` on a reply that nobody will read. Invalid options, messages and tools raise
    OptionError immediately. Other errors are raised by the queued reply. A reply's `on_end` callback
    runs in one of the queue's threads and must not wait for another queued reply.

    Args:
        runtime: The runtime. Queued requests fail with BusyError if it is also used outside the queue.
        max_waiting: Maximum number of waiting requests.
    """

    def __init__(self, runtime: Runtime, *, max_waiting: int = 16) -> None:
        self._process_id = os.getpid()
        self._runtime = runtime
        self._max_waiting = Integer(0).check("max_waiting", max_waiting)
        self._waiting: deque[QueuedReply | QueuedEmbeddings | _Turn] = deque()
        self._running: set[QueuedReply | QueuedEmbeddings | _Turn] = set()
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._serve, name="edgespec-requests", daemon=True)
            for _ in range(runtime.parallel)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Number of requests that have not started yet."""
        return len(self._waiting)

    def checked_request(
        self, prompt: Prompt, options: StreamArguments, on_end: Callable[[Reply | None], None] | None = None
    ) -> ReplyRequest:
        """Return a validated request. Compile its constraint now, so that errors surface before it waits."""
        request = self._runtime.checked_request(prompt, options, on_end)
        self._runtime.check_constraint(request)
        return request

    def submit(self, request: ReplyRequest) -> QueuedReply:
        return self._enqueue(QueuedReply(partial(self._runtime.submit, request), self._remove))

    def embed(self, texts: Sequence[str | Sequence[int]], *, truncate: bool = False) -> QueuedEmbeddings:
        """Queue a request to embed texts. See `Runtime.embed` for the arguments.

        Raises:
            BusyError: Too many requests are waiting.
            ClosedError: The queue was closed.
        """

        def work(progress: Progress) -> list[Embedding]:
            return self._runtime.embed(texts, truncate=truncate, progress=progress)

        return self._enqueue(QueuedEmbeddings(work, self._remove))

    @contextmanager
    def turn(self, cancel: Callable[[], None], wait: Callable[[], bool]) -> Iterator[None]:
        """Return a context manager that waits for the caller's turn to use the runtime directly.

        Args:
            cancel: Called if the queue is closed during the turn. It must make the turn end soon.
            wait: Called repeatedly while other requests run. Returning False stops waiting.

        Raises:
            BusyError: Too many requests are waiting.
            CancelledError: `wait` returned False.
            ClosedError: The queue was closed.
        """
        turn = self._enqueue(_Turn(cancel))
        try:
            while not turn.begun.wait(_WAIT_SECONDS):
                if not wait():
                    raise CancelledError("the request was cancelled before it started")
            if turn.error:
                raise turn.error
            yield
        finally:
            self._remove(turn)
            turn.over.set()

    def _enqueue(self, queued: _Queued) -> _Queued:
        # A forked child process has a copy of the queue, but not its threads.
        check_process(self._process_id)
        with self._changed:
            if self._closed:
                raise ClosedError(
                    "the request queue is closed, so it accepts no more requests",
                    "load the model again, or in Python, create a new RequestQueue",
                )
            if len(self._waiting) + len(self._running) >= self._max_waiting + len(self._threads):
                raise BusyError(
                    f"{self._max_waiting} requests are already waiting", "try again later", code="queue_full"
                )
            self._waiting.append(queued)
            self._changed.notify_all()
            return queued

    def _remove(self, queued: QueuedReply | QueuedEmbeddings | _Turn) -> bool:
        """Remove a waiting request from the queue. Return False if it has already started."""
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
                running = self._waiting.popleft()
                self._running.add(running)
            error = running._run()
            # Mark the request as finished before its caller can submit another one.
            with self._changed:
                self._running.remove(running)
            running._end(error)

    def close(self) -> None:
        """Cancel the running replies, fail waiting requests with ClosedError, and stop the threads."""
        if os.getpid() != self._process_id:
            return
        with self._changed:
            self._closed = True
            waiting, running = list(self._waiting), list(self._running)
            self._waiting.clear()
            self._changed.notify_all()
        for queued in waiting:
            queued._end(
                ClosedError(
                    "the request queue was closed before the request started",
                    "send the request again, or in Python, use another RequestQueue",
                )
            )
        for queued in running:
            queued.cancel()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def __enter__(self) -> RequestQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Turn:
    """A turn in the queue, during which the caller uses the runtime directly."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        self.cancel = cancel
        self.begun, self.over = threading.Event(), threading.Event()
        self.error: Exception | None = None

    def _run(self) -> None:
        self.begun.set()
        self.over.wait()

    def _end(self, error: Exception | None) -> None:
        self.error = error
        self.begun.set()


class QueuedReply:
    """Iterator over the text chunks of a queued reply. Created by `RequestQueue`.

    Iteration waits for the request to start and then for each chunk, and raises the same errors as
    `ReplyStream`. If the request is cancelled or the queue is closed before the request starts, iteration
    raises CancelledError or ClosedError.
    """

    def __init__(self, start: Callable[[], ReplyStream], remove: Callable[[QueuedReply], bool]) -> None:
        self._start = start
        self._remove = remove
        self._stream: ReplyStream | None = None
        self._cancelled = SignalEvent()
        # Text chunks of the reply, followed by None or the error that ended the reply.
        self._chunks: SimpleQueue[TextChunk | Exception | None] = SimpleQueue()
        self._ended: Exception | None = None
        self._process_id = os.getpid()

    @property
    def stream(self) -> ReplyStream | None:
        """The reply's stream, which provides its statistics, or None until the request starts."""
        return self._stream

    @property
    def reply(self) -> Reply:
        """The finished reply. Raises EdgespecError if the reply has not ended."""
        if self._stream is None:
            raise EdgespecError("the reply has not started", "iterate over it first", code="reply_unfinished")
        return self._stream.reply

    def __iter__(self) -> Iterator[TextChunk]:
        return self

    def __next__(self) -> TextChunk:
        if self._ended:
            raise self._ended
        check_process(self._process_id)
        chunk = self._chunks.get()
        if isinstance(chunk, TextChunk):
            return chunk
        self._ended = chunk or StopIteration()
        # Put the end marker back for other threads that iterate over this reply.
        self._chunks.put(chunk)
        raise self._ended

    def wait(self) -> Reply:
        """Wait until the reply is complete, and return it."""
        for _ in self:
            pass
        return self.reply

    def cancel(self) -> None:
        """Remove the request if it is still waiting. Otherwise, end the reply, keeping its text so far."""
        self._cancelled.set()
        if self._remove(self):
            self._end(CancelledError("the request was cancelled before it started"))
        elif self._stream:
            self._stream.cancel()

    def _run(self) -> Exception | None:
        """Generate the reply. Return the error that ended it, if any."""
        try:
            self._stream = stream = self._start()
            # The caller may have cancelled the request before the stream was created.
            if self._cancelled.is_set():
                stream.cancel()
            for chunk in stream:
                self._chunks.put(chunk)
        except BaseException as error:
            return _as_exception(error)
        return None

    def _end(self, error: Exception | None) -> None:
        self._chunks.put(error)


class QueuedEmbeddings:
    """The embeddings of queued texts. Created by `RequestQueue`.

    Attributes:
        future: Future for the embeddings, for use with asyncio. It cannot be cancelled directly, so use
            `cancel` instead.
    """

    def __init__(
        self, work: Callable[[Progress], list[Embedding]], remove: Callable[[QueuedEmbeddings], bool]
    ) -> None:
        self._work = work
        self._remove = remove
        self._cancelled = SignalEvent()
        self._result: list[Embedding] = []
        self.future: Future[list[Embedding]] = Future()
        self._process_id = os.getpid()
        # Mark the future as running, so that `Future.cancel` has no effect.
        self.future.set_running_or_notify_cancel()

    def wait(self) -> list[Embedding]:
        """Wait until all texts are embedded. Raises the same errors as `Runtime.embed`.

        If the request is cancelled or the queue is closed first, this raises CancelledError or ClosedError.
        """
        check_process(self._process_id)
        return self.future.result()

    def cancel(self) -> None:
        """Remove the request if it is still waiting. Otherwise, stop it after the current forward pass."""
        self._cancelled.set()
        if self._remove(self):
            self._end(CancelledError("the request was cancelled before it started"))

    def _run(self) -> Exception | None:
        """Embed the texts. Return the error, if any."""
        try:
            self._result = self._work(lambda *_: not self._cancelled.is_set())
        except BaseException as error:
            return _as_exception(error)
        return None

    def _end(self, error: Exception | None) -> None:
        if error:
            self.future.set_exception(error)
        else:
            self.future.set_result(self._result)


def _as_exception(error: BaseException) -> Exception:
    """Wrap errors such as SystemExit, which callbacks can raise, so that they cannot stop a queue thread."""
    if isinstance(error, Exception):
        return error
    failure = EdgespecError(f"the request failed with {type(error).__name__}", "submit it again")
    failure.__cause__ = error
    return failure
