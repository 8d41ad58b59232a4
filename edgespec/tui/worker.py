"""The model thread, which loads the model, generates all replies and closes the model.

The screen submits jobs through a queue and reads two others, one with the reply's text chunks and one with
events. The thread is a daemon, so that the program can exit even if a native call hangs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from edgespec.chat.message import Message
from edgespec.errors import CancelledError
from edgespec.heap import limit_malloc_arenas

if TYPE_CHECKING:
    from edgespec import MethodReport, Reply, Stats, TextChunk
    from edgespec.tui.model import ChatLike, Load, RuntimeLike, StreamLike

__all__ = [
    "Ask",
    "ChatOpened",
    "Event",
    "LoadFailed",
    "Loaded",
    "LoadingProgress",
    "ModelThread",
    "TurnEnded",
]

_Item = TypeVar("_Item")

Act = Literal["send", "regenerate", "edit"]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for one reply.

    Attributes:
        act: Whether to send a message, edit the last one, or regenerate the last reply.
        text: The message. Empty for `regenerate`.
        system: The system prompt.
        options: Options of `Runtime.stream_tokens`.
    """

    act: Act
    text: str
    system: str | None
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LoadingProgress:
    """Reports the loading progress: a description and the completed fraction."""

    what: str
    fraction: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """The model was loaded."""

    runtime: RuntimeLike


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The model could not be loaded. The error is a CancelledError if loading was cancelled."""

    error: Exception


@dataclass(frozen=True, slots=True)
class ChatOpened:
    """A conversation was opened, or failed to open with `error`."""

    context_used_tokens: int
    dropped_messages: int
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """A reply ended, or failed with `error`. `messages` is the conversation afterwards."""

    messages: tuple[Message, ...]
    context_used_tokens: int
    dropped_messages: int
    reply: Reply | None = None
    error: Exception | None = None


Event: TypeAlias = LoadingProgress | Loaded | LoadFailed | ChatOpened | TurnEnded


class ModelThread:
    """Loads and runs the model in its own thread. Call all methods from the screen's thread."""

    def __init__(self, load: Load) -> None:
        self.chunks: SimpleQueue[TextChunk] = SimpleQueue()
        self.events: SimpleQueue[Event] = SimpleQueue()
        self._load = load
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._stop = threading.Event()
        self._cancelled = threading.Event()
        self.read_fraction = 0.0
        self._stream: StreamLike | None = None
        self._chat: ChatLike | None = None
        self._runtime: RuntimeLike | None = None
        self._thread = threading.Thread(target=self._run, name="edgespec-model", daemon=True)

    def start(self) -> None:
        """Start the thread, which then loads the model."""
        limit_malloc_arenas()
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    @property
    def live_stats(self) -> Stats | None:
        """Stats of the running reply, or None if there is none."""
        stream = self._stream
        return stream.stats if stream is not None else None

    @property
    def live_method(self) -> MethodReport | None:
        """Drafting method of the running reply, or None if there is none."""
        stream = self._stream
        return stream.method if stream is not None else None

    def open_chat(self, system: str | None, messages: Sequence[Message]) -> None:
        """Open another conversation. A ChatOpened event reports the result."""
        history = tuple(messages)
        self._jobs.put(lambda: self._open(system, history))

    def ask(self, ask: Ask) -> None:
        """Start a reply. Its text is put into `chunks`, and a TurnEnded event reports its end."""
        self._cancelled.clear()
        self._jobs.put(lambda: self._turn(ask))

    def cancel(self) -> None:
        """Stop the running reply."""
        self._cancelled.set()
        stream = self._stream
        if stream is not None:
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

    def take_chunks(self) -> list[TextChunk]:
        """Return the text chunks that have arrived since the last call."""
        return _drained(self.chunks)

    def take_events(self) -> list[Event]:
        """Return the events that have arrived since the last call."""
        return _drained(self.events)

    def _progress(self, what: str, fraction: float) -> bool:
        self.events.put(LoadingProgress(what, fraction))
        return not self._stop.is_set()

    def _reading(self, _what: str, fraction: float) -> bool:
        self.read_fraction = fraction
        return not self._cancelled.is_set()

    def _run(self) -> None:
        # Report every error as an event. Otherwise the screen would wait forever for a thread that has died.
        try:
            runtime = self._load(self._progress)
        except Exception as error:
            self.events.put(LoadFailed(error))
            return
        if self._stop.is_set():
            runtime.close()
            self.events.put(LoadFailed(CancelledError("loading was cancelled")))
            return
        self._runtime = runtime
        self.events.put(Loaded(runtime))
        while (job := self._jobs.get()) is not None:
            job()
        runtime.close()

    def _open(self, system: str | None, messages: tuple[Message, ...]) -> None:
        assert self._runtime is not None
        try:
            self._chat = self._runtime.chat(system, messages)
            used, dropped = self._chat.context_used_tokens, self._chat.dropped_messages
        except Exception as error:
            self.events.put(ChatOpened(0, 0, error))
        else:
            self.events.put(ChatOpened(used, dropped))

    def _turn(self, ask: Ask) -> None:
        chat = self._chat
        assert chat is not None
        reply: Reply | None = None
        failure: Exception | None = None
        try:
            chat.system = ask.system
            self.read_fraction = 0.0
            options = {**ask.options, "progress": self._reading}
            if ask.act == "send":
                stream = chat.stream(ask.text, **options)
            elif ask.act == "edit":
                stream = chat.edit_last(ask.text, **options)
            else:
                stream = chat.regenerate(**options)
            self._stream = stream
            # `cancel` may have been called before there was a stream to cancel.
            if self._cancelled.is_set():
                stream.cancel()
            for chunk in stream:
                self.chunks.put(chunk)
            reply = stream.reply
        except Exception as error:
            failure = error
        self._stream = None
        self.events.put(
            TurnEnded(tuple(chat.messages), chat.context_used_tokens, chat.dropped_messages, reply, failure)
        )


def _drained(queue: SimpleQueue[_Item]) -> list[_Item]:
    taken: list[_Item] = []
    while True:
        try:
            taken.append(queue.get_nowait())
        except Empty:
            return taken
