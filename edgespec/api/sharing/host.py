"""Let the user's other programs generate replies with a model loaded in this process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import edgespec
from edgespec import (
    MemoryPlan,
    MemoryUse,
    MethodReport,
    ModelFacts,
    Reply,
    ReplyArguments,
    RequestQueue,
    Runtime,
)
from edgespec.api.sharing.base import Identity, NamedHead
from edgespec.api.sharing.sockets import connect, limit_sends, listen, stop_receiving
from edgespec.api.stream import ReplyStream
from edgespec.errors import ClosedError, EdgespecError
from edgespec.store.installed import RecommendedSetting

__all__ = ["Facts", "HostRequest", "HostedModel", "ModelHost", "ModelProvider"]

# Methods of a runtime that other programs may call.
_CALLS = (
    "check_options",
    "check_template",
    "count_tokens",
    "has_thinking_switch",
    "image_tokens",
    "memory",
    "method_for",
    "reply_defaults",
)
_TOKENIZER_CALLS = ("min_tokens", "tokenize")
_PAUSE_SECONDS = 0.1


@dataclass(frozen=True)
class HostRequest:
    """A request from another program to a host.

    Attributes:
        version: The program's edgespec version. Other versions may define these objects differently.
        identity: The model that the program wants to use.
        call: `here` (which only asks whether the host has the model), `facts`, `stream`, or a method name.
        arguments: The arguments of the call.
        options: The keyword arguments of the call.
    """

    version: str
    identity: Identity
    call: str
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    """The properties of a loaded model at the time a chat begins to use it. See `Runtime`."""

    target: ModelFacts
    draft: ModelFacts | None
    heads: tuple[NamedHead, ...]
    drafters: tuple[str, ...]
    method: MethodReport
    plan: MemoryPlan | None
    context_tokens: int
    loss_limits: tuple[float, float] | None
    pass_costs: Mapping[int, float]
    recommended_sampling: Mapping[str, RecommendedSetting]
    reply_defaults: ReplyArguments
    memory: MemoryUse

    @classmethod
    def of(cls, runtime: Runtime) -> Facts:
        """Return the properties of a loaded model."""
        return cls(
            runtime.target,
            runtime.draft,
            tuple(NamedHead(head.name, head.path) for head in runtime.heads),
            runtime.drafters,
            runtime.method,
            runtime.plan,
            runtime.context_tokens,
            runtime.loss_limits,
            runtime.pass_costs,
            dict(runtime.recommended_sampling),
            runtime.reply_defaults(),
            runtime.memory(),
        )


@dataclass(frozen=True)
class HostedModel:
    """A loaded model that other programs can use, and its request queue."""

    runtime: Runtime
    queue: RequestQueue


ModelProvider = Callable[[Identity], "AbstractContextManager[HostedModel] | None"]
"""Returns a context manager for using the model with this identity, or None if there is no such model."""


class ModelHost:
    """Answers requests from other programs in its own threads until it is closed.

    A program makes one connection for each call. It sends a `HostRequest`, and receives the name of the host,
    or None if the host does not have the model. It then receives (word, value) pairs: `progress`,
    `started` and `text` for a reply, and finally `value` or `failed`. Sending anything during a reply,
    or closing the connection, cancels the reply.

    Args:
        name: User-facing name of the host, such as `edgespec serve`.
        provide: Returns the context manager in which a request uses a model.
    """

    def __init__(self, name: str, provide: ModelProvider) -> None:
        self._name, self._provide = f"{name} (process {os.getpid()})", provide
        self._closed = False
        self._listener = listen()
        if self._listener is not None:
            self._path = Path(str(self._listener.address))
            threading.Thread(target=self._accept, name="edgespec-sharing", daemon=True).start()

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._closed:
            try:
                connection = self._listener.accept()
            except (OSError, EOFError):
                # `accept` failed because the listener was closed, the other program disconnected immediately,
                # or too many files are open.
                time.sleep(_PAUSE_SECONDS)
                continue
            threading.Thread(
                target=self._answer, args=(connection,), name="edgespec-sharing-call", daemon=True
            ).start()

    def _answer(self, connection: Connection) -> None:
        # The other program may disconnect at any time.
        with connection, suppress(_LeftError):
            limit_sends(connection)
            try:
                request = connection.recv()
                hosted = self._provide(request.identity) if request.version == edgespec.__version__ else None
            except Exception:
                # The request may be invalid, because another version of edgespec sent it, or the model's file
                # may be gone. In either case, the other program loads the model itself and reports any error.
                return
            _send(connection, None if hosted is None else self._name)
            if hosted is None or request.call == "here":
                return
            try:
                with hosted as model:
                    value = self._value(request, model, connection)
            except _LeftError:
                raise
            except Exception as error:
                _send(connection, ("failed", _picklable(error)))
            else:
                _send(connection, ("value", value))

    def _value(self, request: HostRequest, model: HostedModel, connection: Connection) -> Any:
        options = dict(request.options)
        if request.call == "stream":
            return _reply(model, connection, request.arguments[0], options)
        if request.call == "facts":
            return Facts.of(model.runtime)
        owner = model.runtime.vocabulary if request.call in _TOKENIZER_CALLS else model.runtime
        if request.call not in (*_CALLS, *_TOKENIZER_CALLS):
            raise EdgespecError(
                f"the program that loaded the model does not let other programs call {request.call!r}",
                "close that program, and send the message again",
            )
        return getattr(owner, request.call)(*request.arguments, **options)

    def close(self) -> None:
        """Stop accepting calls. Running replies end when their queue is closed."""
        if self._closed or self._listener is None:
            return
        self._closed = True
        # Closing a socket does not end another thread's `accept`, so connect to wake the thread.
        with suppress(OSError):
            connect(self._path).close()
        with suppress(OSError):  # Something may have deleted the file.
            self._listener.close()


class _LeftError(Exception):
    """Raised when the other program has closed its connection."""


def _send(connection: Connection, value: Any) -> None:
    try:
        connection.send(value)
    except OSError:
        raise _LeftError from None


def _reply(model: HostedModel, connection: Connection, messages: Any, options: dict[str, Any]) -> Reply:
    """Generate a reply, streaming its text to the other program, and return the finished reply."""
    leaving, closing = threading.Event(), threading.Event()
    streams: list[ReplyStream] = []

    def cancel(why: threading.Event) -> None:
        why.set()
        for each in streams:
            each.cancel()

    def progress(description: str, fraction: float) -> bool:
        _send(connection, ("progress", (description, fraction)))
        return not (leaving.is_set() or closing.is_set())

    with (
        _watching(connection, partial(cancel, leaving)),
        model.queue.turn(
            partial(cancel, closing), lambda: progress("waiting for another reply to finish", 0.0)
        ),
    ):
        stream = model.runtime.stream_messages(messages, progress=progress, **options)
        streams.append(stream)
        if leaving.is_set() or closing.is_set():
            stream.cancel()
        try:
            start = stream.prompt_tokens, stream.dropped_messages, stream.reply_start
            _send(connection, ("started", (start, stream.method)))
            for piece in _pieces(stream):
                _send(connection, ("text", piece))
            if closing.is_set():
                raise ClosedError("the model is being closed", "send the message again")
            return stream.reply
        finally:
            stream.close()


@contextmanager
def _watching(connection: Connection, on_leave: Callable[[], None]) -> Iterator[None]:
    """Call `on_leave` in another thread when the other program sends anything or closes its connection."""

    def watch() -> None:
        with suppress(OSError, EOFError):
            connection.recv_bytes()
        on_leave()

    thread = threading.Thread(target=watch, name="edgespec-sharing-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        # End the thread before the connection is closed. Otherwise, it would read from the closed file
        # descriptor, which the next opened file may reuse.
        stop_receiving(connection)
        thread.join()


def _pieces(stream: ReplyStream) -> Iterator[tuple[Any, ...]]:
    """Yield each piece of a reply's text with the statistics and the method report so far.

    The statistics contain only the new rounds, because a reply can have thousands of them.
    """
    sent = 0
    for chunk in stream:
        rounds = stream.stats.rounds[sent:]
        sent += len(rounds)
        yield chunk, replace(stream.stats, rounds=rounds), stream.method


def _picklable(error: Exception) -> Exception:
    """Return an error that can be pickled, so that another process can raise it."""
    if isinstance(error, EdgespecError):
        error.__cause__ = error.__context__ = error.__traceback__ = None
        return error
    return EdgespecError(
        f"the program that loaded the model failed: {type(error).__name__}: {error}",
        "send the message again",
    )
