"""The model thread, which loads the model, generates all replies and closes the model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from edgespec.errors import CancelledError, TemplateError, WorkerLostError
from edgespec.system.heap import limit_malloc_arenas
from edgespec.system.waiting import SignalEvent
from edgespec.tui.repetition import RepetitionWatch

if TYPE_CHECKING:
    from edgespec import Message, Preview, Reply, TextChunk
    from edgespec.api.sharing.base import ChatModel, ChatReply
    from edgespec.api.sharing.chat_sharing import ChatSharing
    from edgespec.store.download import Progress

Load = Callable[["Progress"], "ChatModel"]
# Takes a reference to a model. Optional arguments are the load options that the user has changed in the chat
# (None when switching to another model), and those that carry over to another model.
LoadOther = Callable[..., Load]
# Takes a reference to a model and the load options to plan it with.
PlanModel = Callable[[str, "Mapping[str, Any]"], "Preview"]
_T = TypeVar("_T")
_WAITING = "waiting for another chat to finish"


def _ignore(_description: str, _fraction: float) -> None:
    """Ignore a progress report."""


def load_named(
    reference: str, changed: Mapping[str, Any] | None = None, kept: Mapping[str, Any] | None = None
) -> Load:
    """Return a function that loads a model with the default options, except for those in the mappings."""

    def load(progress: Progress) -> ChatModel:
        import edgespec

        return edgespec.load(reference, **{**(kept or {}), **(changed or {})}, progress=progress)

    return load


def plan_named(reference: str, options: Mapping[str, Any]) -> Preview:
    """Plan a model with the default options, except for those in `options`."""
    import edgespec

    return edgespec.plan(reference, **options)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for one reply.

    Attributes:
        system: The system prompt.
        messages: The conversation. It ends with the message to reply to, or with a reply to continue.
        options: Options for `Runtime.stream_messages`.
        written: The text generated so far, in pieces. The model thread appends to this list.
    """

    system: str | None
    messages: tuple[Message, ...]
    options: dict[str, Any]
    written: list[str] = field(default_factory=list)


class ChatState(NamedTuple):
    """The state of a conversation after opening it or after a turn.

    Attributes:
        context_used_tokens: Number of context tokens that the conversation occupies.
        dropped_messages: Number of old messages left out of the prompt because the context was full.
        reply: The reply, or None after opening the conversation.
        message: The reply as a message, with the text that it continues.
        is_repetitive: Whether the reply was stopped because it repeated itself.
    """

    context_used_tokens: int = 0
    dropped_messages: int = 0
    reply: Reply | None = None
    message: Message | None = None
    is_repetitive: bool = False


class Switched(NamedTuple):
    """The model that is loaded after switching, and the error if the requested model could not be loaded."""

    runtime: ChatModel
    failure: Exception | None = None


class ModelThread:
    """Loads and runs the model in its own thread, one job after another. Call all methods from one thread.

    The thread is a daemon, so that the program can exit even if a native call hangs. An exception in a job
    becomes the exception of its future, and the thread continues with the next job.

    Args:
        load: Loads the model.
        sharing: Shares the model with other programs, or None to share nothing.

    Attributes:
        runtime: The loaded model, or None if none is loaded. Changes when the model is reloaded.
        chunks: Text of the running reply.
        stream: The running reply, or None.
        loading: Description of the current loading step, and the completed fraction.
        preparing: Description of the step before the first text of the running reply, such as reading the
            prompt or loading the model again, and the completed fraction.
    """

    def __init__(self, load: Load, sharing: ChatSharing | None = None) -> None:
        self.chunks: SimpleQueue[TextChunk] = SimpleQueue()
        self.stream: ChatReply | None = None
        self.loading = ("Starting", 0.0)
        self.preparing = ("", 0.0)
        self._load, self._sharing = load, sharing
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closing = threading.Event()
        self._load_cancelled = SignalEvent()
        self._cancelled = SignalEvent()
        self.runtime: ChatModel | None = None
        # Whether the model has lost a worker. If so, the next job reloads the model.
        self._is_lost = False
        self._thread = threading.Thread(target=self._run, name="edgespec-model", daemon=True)

    def start(self) -> Future[ChatModel]:
        """Start the model thread and load the model in it."""
        limit_malloc_arenas()
        loaded = self._submit(lambda: self._load_model(self._load))
        self._thread.start()
        return loaded

    def switch(self, load: Load) -> Future[Switched]:
        """Unload the model and load another one. If that fails, load the old model again."""
        self._load_cancelled.clear()
        return self._submit(lambda: self._switch(load))

    def open_chat(self, system: str | None, messages: Sequence[Message]) -> Future[ChatState]:
        """Check that the model can reply to messages, and count the tokens of a conversation."""
        copy = tuple(messages)

        def job() -> ChatState:
            runtime = self._loaded(can_cancel=False)
            runtime.check_template()
            return ChatState(_count_tokens(runtime, system, copy))

        return self._submit(job)

    def ask(self, ask: Ask) -> Future[ChatState]:
        """Generate a reply in the model thread."""
        self._cancelled.clear()
        return self._submit(lambda: self._turn(ask))

    def submit(
        self,
        work: Callable[[ChatModel, Callable[[], bool]], _T],
        report: Callable[[str, float], None] = _ignore,
    ) -> Future[_T]:
        """Run `work(runtime, is_cancelled)` in the model thread.

        After a call to `cancel`, `is_cancelled()` returns True.

        Args:
            work: The function.
            report: Called with a description and the completed fraction while the model is reloaded, or while
                the thread waits for another chat that uses the model.
        """
        self._cancelled.clear()

        def wait() -> bool:
            report(_WAITING, 0.0)
            return not self._cancelled.is_set()

        def job() -> _T:
            runtime = self._loaded(report=report)
            with self._turn_of(wait):
                return work(runtime, self._cancelled.is_set)

        return self._submit(job)

    def cancel(self) -> None:
        self._cancelled.set()
        if (stream := self.stream) is not None:
            stream.cancel()

    def cancel_load(self) -> None:
        """Cancel loading, which stops at the next progress report."""
        self._load_cancelled.set()

    def close(self) -> None:
        """Tell the thread to stop the running reply, close the model and exit, without waiting for it."""
        self._closing.set()
        self.cancel()
        self._jobs.put(None)

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the thread to end. Return False if the timeout expires first."""
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _submit(self, job: Callable[[], _T]) -> Future[_T]:
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(job())
            except Exception as error:
                self._is_lost = self._is_lost or isinstance(error, WorkerLostError)
                future.set_exception(error)
            except BaseException as error:
                # The user interface would treat exceptions such as SystemExit as a request to quit, so wrap
                # them.
                future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))

        self._jobs.put(run)
        return future

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        if self.runtime is not None:
            self._close(self.runtime)

    def _close(self, runtime: ChatModel) -> None:
        if self._sharing is not None:
            self._sharing.withdraw()
        runtime.close()

    def _turn_of(self, wait: Callable[[], bool]) -> AbstractContextManager[None]:
        """Return a context manager that waits until no other program is generating with this chat's model."""
        return nullcontext() if self._sharing is None else self._sharing.turn(self.cancel, wait)

    def _load_model(
        self, load: Load, *, can_cancel: bool = False, report: Callable[[str, float], None] = _ignore
    ) -> ChatModel:
        """Load a model. If `can_cancel` is set, `cancel` also stops loading."""

        def is_cancelled() -> bool:
            was_stopped = can_cancel and self._cancelled.is_set()
            return was_stopped or self._closing.is_set() or self._load_cancelled.is_set()

        def progress(description: str, fraction: float) -> bool:
            self.loading = self.preparing = (description, fraction)
            report(description, fraction)
            return not is_cancelled()

        self.loading = ("Starting", 0.0)
        runtime = load(progress)
        if is_cancelled():
            self._close(runtime)
            raise CancelledError("loading the model was cancelled")
        self.runtime, self._load, self._is_lost = runtime, load, False
        return runtime

    def _switch(self, load: Load) -> Switched:
        # Unload the old model first, because both models together could exceed the memory budget.
        assert self.runtime is not None
        self._close(self.runtime)
        self.runtime = None
        try:
            return Switched(self._load_model(load))
        except Exception as error:
            self._load_cancelled.clear()
            return Switched(self._load_model(self._load), error)

    def _loaded(
        self, *, can_cancel: bool = True, report: Callable[[str, float], None] = _ignore
    ) -> ChatModel:
        assert self.runtime is not None
        if self._is_lost or (self._sharing is not None and self._sharing.is_lost(self.runtime)):
            # Release the remaining workers, so that the model can be reloaded on them.
            self._close(self.runtime)
            self._load_model(self._load, can_cancel=can_cancel, report=report)
        return self.runtime

    def _turn(self, ask: Ask) -> ChatState:
        def progress(description: str, fraction: float) -> bool:
            self.preparing = (description, fraction)
            return not self._cancelled.is_set()

        self.preparing = ("", 0.0)
        runtime = self._loaded()
        self.preparing = ("", 0.0)
        with self._turn_of(lambda: progress(_WAITING, 0.0)):
            try:
                stream = self.stream = start_reply(
                    runtime, ask.system, ask.messages, progress=progress, **ask.options
                )
                # The user may have cancelled the reply before its stream was created.
                if self._cancelled.is_set():
                    stream.cancel()
                # Do not repeat the start of a continued reply, which is already part of the conversation.
                start = "" if ask.messages[-1].role == "assistant" else stream.reply_start
                watch, is_repetitive = RepetitionWatch(), False
                for chunk in stream:
                    ask.written.append(start + chunk.raw_text)
                    start = ""
                    self.chunks.put(chunk)
                    if not is_repetitive and watch.add(chunk.raw_text):
                        is_repetitive = True
                        stream.cancel()
                return _state_after(stream, runtime, ask, is_repetitive=is_repetitive)
            finally:
                self.stream = None


def start_reply(
    model: ChatModel, system: str | None, messages: Sequence[Message], **options: Any
) -> ChatReply:
    """Start the reply to a conversation, or continue the partial reply at its end.

    See `Runtime.stream_messages` for the options and errors.
    """
    from edgespec.chat.message import with_system
    from edgespec.chat.reply_start import messages_to_answer

    answered, reply_start = messages_to_answer(messages)
    return model.stream_messages(with_system(system, answered), reply_start=reply_start, **options)


def _state_after(stream: ChatReply, runtime: ChatModel, ask: Ask, *, is_repetitive: bool) -> ChatState:
    """Return the state of a conversation after a reply."""
    from edgespec.api.conversation import message_of

    reply, dropped_messages = stream.reply, stream.dropped_messages
    used_tokens = stream.prompt_tokens + len(reply.tokens)
    is_cancelled = reply.finish_reason == "cancelled"
    if is_cancelled and not (reply.answer or reply.reasoning):
        # The conversation is as it was before.
        used_tokens, dropped_messages = _count_tokens(runtime, ask.system, ask.messages), 0
    message = message_of(reply, stream.reply_start)
    return ChatState(used_tokens, dropped_messages, reply, message, is_repetitive and is_cancelled)


def _count_tokens(runtime: ChatModel, system: str | None, messages: Sequence[Message]) -> int:
    """Return the number of tokens of a conversation, or 0 if the chat template rejects it."""
    from edgespec.chat.message import with_system

    if messages:
        with suppress(TemplateError):
            return runtime.count_tokens(with_system(system, messages))
    return 0
