"""The model thread, which loads the model, generates all replies and closes the model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from edgespec.errors import CancelledError
from edgespec.heap import limit_malloc_arenas

if TYPE_CHECKING:
    from edgespec import Chat, Message, Reply, ReplyStream, Runtime, TextChunk
    from edgespec.catalog import Progress

__all__ = ["Act", "Ask", "ChatState", "Load", "ModelThread"]

Load = Callable[["Progress"], "Runtime"]
Act = Literal["send", "regenerate", "edit"]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for one reply.

    Attributes:
        act: Whether to send a message, edit the last one, or regenerate the last reply.
        text: The message. Empty for `regenerate`.
        system: The system prompt.
        options: Options for `Chat.stream`.
    """

    act: Act
    text: str
    system: str | None
    options: dict[str, Any]


class ChatState(NamedTuple):
    """The state of a conversation after opening it or after a turn, and the error if that failed."""

    messages: tuple[Message, ...] = ()
    context_used_tokens: int = 0
    dropped_messages: int = 0
    reply: Reply | None = None
    error: Exception | None = None


class ModelThread:
    """Loads and runs the model in its own thread, one job after another. Call all methods from one thread.

    The thread is a daemon, so that the program can exit even if a native call hangs.

    Attributes:
        chunks: Text of the running reply.
        stream: The running reply, or None.
        loading: Description of the current loading step, and the completed fraction.
        read_fraction: Fraction of the prompt that has been processed.
    """

    def __init__(self, load: Load) -> None:
        self.chunks: SimpleQueue[TextChunk] = SimpleQueue()
        self.stream: ReplyStream | None = None
        self.loading = ("Starting", 0.0)
        self.read_fraction = 0.0
        self._load = load
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._stop = threading.Event()
        self._cancelled = threading.Event()
        self._chat: Chat | None = None
        self._runtime: Runtime | None = None
        self._thread = threading.Thread(target=self._run, name="edgespec-model", daemon=True)

    def start(self) -> Future[Runtime]:
        """Start the thread and load the model."""
        limit_malloc_arenas()
        loaded: Future[Runtime] = Future()
        self._jobs.put(lambda: self._load_model(loaded))
        self._thread.start()
        return loaded

    def open_chat(self, system: str | None, messages: Sequence[Message]) -> Future[ChatState]:
        """Open another conversation."""
        opened: Future[ChatState] = Future()
        self._jobs.put(lambda: opened.set_result(self._open(system, tuple(messages))))
        return opened

    def ask(self, ask: Ask) -> Future[ChatState]:
        """Generate a reply and put its text into `chunks`."""
        self._cancelled.clear()
        ended: Future[ChatState] = Future()
        self._jobs.put(lambda: ended.set_result(self._turn(ask)))
        return ended

    def cancel(self) -> None:
        """Stop the running reply."""
        self._cancelled.set()
        if (stream := self.stream) is not None:
            stream.cancel()

    def cancel_load(self) -> None:
        """Cancel loading. It stops at the next progress report."""
        self._stop.set()

    def close(self) -> None:
        """Tell the thread to stop the running reply, close the model and exit. Does not wait for it."""
        self._stop.set()
        self.cancel()
        self._jobs.put(None)

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the thread to end. Return False if the timeout expires first."""
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        if self._runtime is not None:
            self._runtime.close()

    def _load_model(self, loaded: Future[Runtime]) -> None:
        def progress(description: str, fraction: float) -> bool:
            self.loading = (description, fraction)
            return not self._stop.is_set()

        try:
            self._runtime = self._load(progress)
        except Exception as error:
            loaded.set_exception(error)
            return
        if self._stop.is_set():
            loaded.set_exception(CancelledError("loading was cancelled"))
        else:
            loaded.set_result(self._runtime)

    def _open(self, system: str | None, messages: tuple[Message, ...]) -> ChatState:
        assert self._runtime is not None
        try:
            self._chat = self._runtime.chat(system, messages)
            return self._state()
        except Exception as error:
            return ChatState(error=error)

    def _turn(self, ask: Ask) -> ChatState:
        def progress(_description: str, fraction: float) -> bool:
            self.read_fraction = fraction
            return not self._cancelled.is_set()

        chat = self._chat
        assert chat is not None
        self.read_fraction = 0.0
        try:
            chat.system = ask.system
            if ask.act == "send":
                stream = chat.stream(ask.text, progress=progress, **ask.options)
            elif ask.act == "edit":
                stream = chat.edit_last(ask.text, progress=progress, **ask.options)
            else:
                stream = chat.regenerate(progress=progress, **ask.options)
            self.stream = stream
            # `cancel` may have been called before there was a stream to cancel.
            if self._cancelled.is_set():
                stream.cancel()
            for chunk in stream:
                self.chunks.put(chunk)
            return self._state(reply=stream.reply)
        except Exception as error:
            return self._state(error=error)
        finally:
            self.stream = None

    def _state(self, reply: Reply | None = None, error: Exception | None = None) -> ChatState:
        chat = self._chat
        assert chat is not None
        return ChatState(tuple(chat.messages), chat.context_used_tokens, chat.dropped_messages, reply, error)
