"""Use a model that another process has loaded, as if this process had loaded it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Unpack

import edgespec
from edgespec import (
    Exactness,
    Image,
    MemoryUse,
    Message,
    MethodReport,
    Reply,
    ReplyArguments,
    TextChunk,
)
from edgespec.api.sharing.base import ChatModel, Identity
from edgespec.api.sharing.host import Facts, HostRequest
from edgespec.api.sharing.sockets import connect, sockets
from edgespec.api.stream import finished
from edgespec.decode.reply import exactness_for
from edgespec.decode.request import StreamArguments
from edgespec.engine.stats import Stats
from edgespec.errors import CancelledError, ClosedError, WorkerLostError
from edgespec.memory.budget import resident_bytes
from edgespec.model.base import Progress
from edgespec.options.reply_options import REPLY_OPTIONS

__all__ = ["SharedModel", "SharedReply", "find_shared", "host_of"]

# Timeout in seconds for a program to say whether it has a model. A slower program is assumed to be suspended.
_FIND_SECONDS = 2.0
# Timeout in seconds for a call that generates no reply. The server may have to load the model first.
_CALL_SECONDS = 120.0
# Seconds to wait for a cancelled reply to end.
_CANCEL_SECONDS = 10.0
_POLL_SECONDS = 0.1
# Typical length of a token in bytes, for estimates.
_BYTES_PER_TOKEN = 4


def find_shared(identity: Identity, progress: Progress | None = None) -> SharedModel | None:
    """Return a model that another of the user's programs has loaded, or None if there is none.

    Args:
        identity: The files and options of the model.
        progress: Called while the other program loads the model. Returning False cancels the call.

    Raises:
        CancelledError: `progress` returned False.
        EdgespecError: The other program cannot load the model.
    """
    for path in sockets():
        try:
            host, connection = _ask(path, HostRequest(edgespec.__version__, identity, "facts"))
        except (OSError, EOFError):
            continue
        with connection:
            if not host:
                continue
            wait = progress and partial(progress, f"{host} is loading this model", 0.0)
            # The program may exit while it is loading the model.
            with suppress(OSError, EOFError):
                return SharedModel(path, identity, host, _result(connection, wait))
    return None


def _ask(path: Path, request: HostRequest) -> tuple[str, Connection]:
    """Send a request. Return the host's name (empty if it lacks the model) and the connection.

    Raises:
        EOFError, OSError: The program has exited, or does not answer.
    """
    connection = connect(path)
    try:
        connection.send(request)
        if not connection.poll(_FIND_SECONDS):
            raise TimeoutError
        return connection.recv() or "", connection
    except BaseException:
        connection.close()
        raise


def _result(connection: Connection, wait: Callable[[], bool] | None, seconds: float = float("inf")) -> Any:
    """Return the value sent by a host, or raise the error sent in its place."""
    deadline = time.monotonic() + seconds
    while not connection.poll(_POLL_SECONDS):
        if wait is not None and not wait():
            raise CancelledError("cancelled while waiting for the other program")
        if time.monotonic() > deadline:
            raise TimeoutError
    kind, value = connection.recv()
    if kind == "failed":
        raise _raised(value)
    return value


def _raised(error: Exception) -> Exception:
    """Convert an error received from a host to the error to raise. A closing host is treated as lost."""
    return EOFError() if isinstance(error, ClosedError) else error


def host_of(model: ChatModel) -> str:
    """Return the name of the program that loaded the model, or an empty string if it is this one."""
    return model.host if isinstance(model, SharedModel) else ""


class SharedModel:
    """A model that another process has loaded. Provides the parts of `edgespec.Runtime` that a chat needs.

    If the other process has exited, replies raise WorkerLostError. Properties that the UI reads then
    keep their last known values, and checks succeed, because the next message reloads the model and
    repeats the checks.

    Args:
        path: The socket of the process.
        identity: The files and options of the model.
        host: The name of the program that has loaded the model.
        facts: The properties of the model.
    """

    def __init__(self, path: Path, identity: Identity, host: str, facts: Facts) -> None:
        self._path, self._identity, self.host, self._facts = path, identity, host, facts
        self.plan, self.method = facts.plan, facts.method
        self.target, self.draft = facts.target, facts.draft
        self.heads, self.drafters = facts.heads, facts.drafters
        self.context_tokens, self.loss_limits = facts.context_tokens, facts.loss_limits
        self.pass_costs, self.recommended_sampling = facts.pass_costs, facts.recommended_sampling

    @property
    def vocabulary(self) -> SharedModel:
        return self

    def tokenize(self, text: str, *, special: bool, start: bool) -> Sequence[int]:
        estimated = range(len(text.encode("utf-8", "replace")) // _BYTES_PER_TOKEN)
        tokens: Sequence[int] = self._asked(estimated, "tokenize", text, special=special, start=start)
        return tokens

    def min_tokens(self, text: str) -> int:
        return int(self._asked(0, "min_tokens", text))

    def check_template(self) -> None:
        self._asked(None, "check_template")

    def has_thinking_switch(self) -> bool:
        return bool(self._asked(True, "has_thinking_switch"))

    def check_options(self, **options: Unpack[StreamArguments]) -> None:
        self._asked(None, "check_options", **options)

    def method_for(self, method: str) -> MethodReport:
        report: MethodReport = self._asked(self.method, "method_for", method)
        return report

    def exactness_for(
        self, *, acceptance: str | None = None, temperature: float | None = None
    ) -> Exactness | None:
        # Computed locally because the UI reads this very often.
        defaults = self._facts.reply_defaults
        if temperature is None:
            temperature = defaults.get("temperature", REPLY_OPTIONS["temperature"].default)
        return exactness_for(
            self.target.exactness,
            acceptance=acceptance or defaults["acceptance"] or "invariant",
            temperature=temperature,
        )

    def reply_defaults(self, method: str | None = None) -> ReplyArguments:
        defaults: ReplyArguments = self._asked(self._facts.reply_defaults, "reply_defaults", method)
        return defaults

    def count_tokens(self, messages: Sequence[Message]) -> int:
        return int(self._call("count_tokens", messages))

    def image_tokens(self, image: Image) -> int:
        return int(self._asked(0, "image_tokens", image))

    def memory(self) -> MemoryUse:
        use: MemoryUse = self._asked(self._facts.memory, "memory")
        return use

    def memory_bytes(self) -> int:
        """Return the resident memory of this process in bytes, which does not include the model."""
        return resident_bytes()

    def stream_messages(
        self, messages: Sequence[Message], *, progress: Progress | None = None, **options: Any
    ) -> SharedReply:
        """Start a reply. See `Runtime.stream_messages`."""
        return SharedReply(self._ask("stream", (messages,), options), self.lost, progress)

    def is_there(self) -> bool:
        """Return whether the other program still provides the model."""
        try:
            self._ask("here", (), {}).close()
        except WorkerLostError:
            return False
        return True

    def close(self) -> None:
        """Do nothing, because the model belongs to the other program."""

    def lost(self) -> WorkerLostError:
        """Return the error to raise when the other program has exited."""
        # The chat adds how to load the model again.
        return WorkerLostError(f"{self.host}, which had loaded the model, has exited or is not responding")

    def _asked(self, otherwise: Any, call: str, *arguments: Any, **options: Any) -> Any:
        """Return the result of a call, or `otherwise` if the other process has exited."""
        try:
            return self._call(call, *arguments, **options)
        except WorkerLostError:
            return otherwise

    def _call(self, call: str, *arguments: Any, **options: Any) -> Any:
        with self._ask(call, arguments, options) as connection:
            try:
                return _result(connection, None, _CALL_SECONDS)
            except (OSError, EOFError):
                raise self.lost() from None

    def _ask(self, call: str, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Connection:
        try:
            host, connection = _ask(
                self._path, HostRequest(edgespec.__version__, self._identity, call, arguments, options)
            )
        except (OSError, EOFError):
            raise self.lost() from None
        if not host:
            connection.close()
            raise self.lost()
        return connection


class SharedReply:
    """A reply that another process generates. See `edgespec.ReplyStream` for the attributes and methods.

    The constructor blocks until the reply starts, which can mean waiting for other replies. Iterate in one
    thread only.

    Args:
        connection: The connection to the host, which has accepted the request.
        lost: Returns the error to raise if the other process exits.
        progress: Called while the prompt is processed. Returning False cancels the reply.

    Raises:
        CancelledError: `progress` returned False before the reply started.
        EdgespecError: The other process cannot start the reply.
        WorkerLostError: The other process has exited.
    """

    def __init__(
        self,
        connection: Connection,
        lost: Callable[[], WorkerLostError],
        progress: Progress | None,
    ) -> None:
        self._connection, self._lost, self._progress = connection, lost, progress
        self._reply: Reply | None = None
        self._cancelled_at: float | None = None
        # `cancel` can run in any thread, and must not write to a connection that is being closed. The lock is
        # reentrant, because a signal handler can call `cancel` in the thread that holds it.
        self._connection_lock = threading.RLock()
        self._has_started = False
        self._reported = ("waiting for another reply to finish", 0.0)
        self.stats = Stats()
        _, (start, method) = self._receive()
        self.method: MethodReport = method
        self.prompt_tokens, self.dropped_messages, self.reply_start = start
        self._has_started = True

    @property
    def reply(self) -> Reply:
        """The finished reply. Raises EdgespecError if it has not ended."""
        return finished(self._reply)

    def __iter__(self) -> Iterator[TextChunk]:
        while self._reply is None:
            word, value = self._receive()
            if word == "text":
                chunk, stats, self.method = value
                stats.rounds = [*self.stats.rounds, *stats.rounds]
                self.stats = stats
                yield chunk
            else:
                self._reply = value
                self.stats, self.method = value.stats, value.method
                self._close_connection()

    def wait(self) -> Reply:
        """Wait until the reply is complete, and return it."""
        for _ in self:
            pass
        return self.reply

    def cancel(self) -> None:
        """End the reply after the current target pass. Can be called from any thread."""
        if self._cancelled_at is None:
            self._cancelled_at = time.monotonic()
            with self._connection_lock, suppress(OSError):
                self._connection.send_bytes(b"cancel")

    def close(self) -> None:
        """Stop generating."""
        if self._reply is None:
            self._fail(self._lost())

    def _receive(self) -> tuple[str, Any]:
        """Return the next message that is not a progress report."""
        try:
            while True:
                while not self._connection.poll(_POLL_SECONDS):
                    if not self._has_started:
                        # The other program may be suspended and report nothing, so keep calling `progress`.
                        self._report(*self._reported)
                    if self._cancelled_at and not self._has_started:
                        raise CancelledError("the reply was cancelled before it started")
                    if self._cancelled_at and time.monotonic() > self._cancelled_at + _CANCEL_SECONDS:
                        raise self._lost()
                word, value = self._connection.recv()
                if word == "failed":
                    raise _raised(value)
                if word != "progress":
                    return word, value
                self._report(*value)
        except (OSError, EOFError):
            raise self._fail(self._lost()) from None
        except Exception as error:
            raise self._fail(error) from None

    def _report(self, description: str, fraction: float) -> None:
        self._reported = (description, fraction)
        if self._progress is not None and not self._progress(description, fraction):
            self.cancel()

    def _fail(self, error: Exception) -> Exception:
        """End the reply, and return the error to raise."""
        self._close_connection()
        return error

    def _close_connection(self) -> None:
        with self._connection_lock:
            self._connection.close()
