"""Run the server: bind the port, serve requests, and stop within a bounded time."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from edgespec.api.sharing.base import Identity
from edgespec.api.sharing.host import HostedModel, ModelHost
from edgespec.errors import CancelledError, EdgespecError
from edgespec.server.app import create_app
from edgespec.server.models import FoundModel, ModelPool
from edgespec.server.responses import SEND_SECONDS
from edgespec.server.service import Service
from edgespec.server.settings import ServerSettings
from edgespec.system.files import error_reason

__all__ = ["HttpServer"]

_T = TypeVar("_T")

# Timeout in seconds for receiving a request's headers.
_HEADER_SECONDS = 20.0
# Keep-alive timeout: idle connections are closed after this many seconds.
_KEEP_ALIVE_SECONDS = 15
_MAX_HEADER_BYTES = 64 * 1024
# Delay in seconds before first checking whether a client that half-closed its connection is still reading.
# The delay doubles after each check, and the second check detects a client that has gone away. The value was
# chosen, not measured.
_READER_CHECK_SECONDS = 0.25
# Maximum number of connections. Further ones are rejected with status 503.
_MAX_CONNECTIONS = 512
# Grace period in seconds for unfinished replies after a stop request.
_GRACE_SECONDS = 5.0
# Timeout in seconds on shutdown for closing connections whose clients neither send nor read.
_CLOSE_SECONDS = 10
# Time in seconds after which a connection is dropped if its client has read nothing of the data left to send.
# Chosen to match the timeout for sending a part of a response.
_STALL_SECONDS = SEND_SECONDS


class HttpServer:
    """Serves models over HTTP. The port is bound as soon as the server is created.

    `run` blocks its thread. `stop` can be called from any thread and from signal handlers.

    Args:
        settings: The server's settings.

    Attributes:
        url: The address of the server.

    Raises:
        EdgespecError: The address or port cannot be used.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._socket = _bind(settings.host, settings.port)
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._stop_requested = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped: asyncio.Event

    def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Load the server's own model and serve requests until `stop` is called.

        Args:
            on_ready: Called when the model is loaded and requests are accepted.

        Raises:
            EdgespecError: The model cannot be loaded.
            CancelledError: `stop` was called before the model was loaded.
        """
        asyncio.run(self._run(on_ready))

    def stop(self) -> None:
        """Stop accepting requests, give replies a few seconds to finish, then cancel them."""
        self._stop_requested = True
        if self._loop:
            # The event loop is closed if the server has already stopped.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stopped.set)

    async def _run(self, on_ready: Callable[[], None]) -> None:
        self._stopped = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if self._stop_requested:
            self._stopped.set()
        service = Service(self._settings)
        server = uvicorn.Server(_configuration(create_app(service)))
        unloading = asyncio.create_task(service.models.unload_idle())
        # Create the host before loading the model, so that chats started in the meantime wait for the
        # server's model instead of loading it too.
        host = ModelHost("edgespec serve", partial(_provide_model, service.models, self._loop))
        try:
            await self._load(service)
            await self._serve(server, service, on_ready)
        finally:
            host.close()
            await service.models.close()
            unloading.cancel()
            self._socket.close()

    async def _serve(self, server: uvicorn.Server, service: Service, on_ready: Callable[[], None]) -> None:
        serving = asyncio.create_task(server.serve(sockets=[self._socket]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        on_ready()
        stopped = asyncio.create_task(self._stopped.wait())
        await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await asyncio.wait({serving}, timeout=_GRACE_SECONDS)
        await service.models.close()
        stopped.cancel()
        await serving

    async def _load(self, service: Service) -> None:
        """Load the server's own model, unless a stop is requested first."""

        async def borrow() -> None:
            async with service.models.borrow(None):
                pass

        loading, stopped = asyncio.create_task(borrow()), asyncio.create_task(self._stopped.wait())
        await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not loading.done():
            await service.models.close()
            await asyncio.wait({loading})
        if self._stopped.is_set():
            loading.exception()
            raise CancelledError("the server was stopped before its model was loaded")
        loading.result()


def _provide_model(
    models: ModelPool, loop: asyncio.AbstractEventLoop, wanted: Identity
) -> AbstractContextManager[HostedModel] | None:
    """Return a context manager in which a chat on this machine uses a model, or None if it cannot be shared.

    Called in the threads of a `ModelHost`.
    """
    found = models.find_shared(wanted)
    return None if found is None else _borrowed(models, loop, found)


@contextmanager
def _borrowed(models: ModelPool, loop: asyncio.AbstractEventLoop, found: FoundModel) -> Iterator[HostedModel]:
    borrowing = AsyncExitStack()

    def run(work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    loaded = run(borrowing.enter_async_context(models.borrow(found)))
    try:
        yield HostedModel(loaded.runtime, loaded.queue)
    except BaseException:
        # Pass the exception to the pool, so that the pool notices if the model has lost a worker.
        run(borrowing.__aexit__(*sys.exc_info()))
        raise
    else:
        run(borrowing.aclose())


class _TimedProtocol(H11Protocol):
    """HTTP/1.1 with time limits for slow clients and support for half-closed connections.

    uvicorn supports neither. Its connections stay open until the client has read everything, which a
    suspended program never does.

    Programs such as `nc -N` and some libraries close their side of the connection after the request
    (`shutdown(SHUT_WR)`) and still read the response. On the wire, this looks the same as a client that has
    gone away, whose reply must be cancelled. The two can only be told apart by sending data, because a client
    that has gone away then resets the connection. The server therefore sends the interim response `100
    Continue`, which clients skip.
    """

    _deadline: asyncio.TimerHandle | None = None
    _stall_check: asyncio.TimerHandle | None = None
    _sends_no_more = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_busy():
            self._stop_timer()

    def on_response_complete(self) -> None:
        # This starts the next request if the client has already sent it.
        super().on_response_complete()
        if self._sends_no_more and self._is_busy():
            self._check_reader_in(_READER_CHECK_SECONDS)
        elif self._sends_no_more:
            self._close()
        elif not self._is_busy():
            self._start_timer()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether to keep the connection open for a client that may still be reading its response.

        Clients that half-close do so right after their request. A client that closes its side during the
        response is treated as gone.
        """
        if not self._is_busy() or self.cycle.more_body or self.cycle.response_started:
            self._check_stall_later()  # The transport is about to be closed.
            return False
        if not self._sends_no_more:
            self._sends_no_more = True
            self._check_reader_in(_READER_CHECK_SECONDS)
        return True

    def _check_reader_in(self, seconds: float) -> None:
        self._stop_timer()
        self._deadline = self.loop.call_later(seconds, self._check_reader, seconds)

    def _check_reader(self, seconds: float) -> None:
        """Send an interim response, which makes the connection fail if the client has gone away."""
        if not self._is_busy() or self.cycle.response_started:
            return
        if self.scope["http_version"] == "1.0":
            # HTTP/1.0 has no interim responses. Proxies that use it cancel a request by closing the
            # connection, so assume that the client has gone away.
            self.transport.close()
            return
        self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._check_reader_in(2 * seconds)

    def _is_busy(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return bool(cycle and not cycle.response_complete)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_stall_check()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._check_stall_later()

    def resume_writing(self) -> None:
        # The rest can stall too, but uvicorn may add to it while the connection is open.
        if not self.transport.is_closing():
            self._stop_stall_check()
        super().resume_writing()

    def _close(self) -> None:
        self.transport.close()
        self._check_stall_later()

    def _check_stall_later(self) -> None:
        self._stop_stall_check()
        left_bytes = self.transport.get_write_buffer_size()
        self._stall_check = self.loop.call_later(_STALL_SECONDS, self._check_stall, left_bytes)

    def _check_stall(self, previous_bytes: int) -> None:
        """Drop the connection if its buffer has not become smaller since the last check."""
        if self.transport.get_write_buffer_size() >= previous_bytes:
            self.transport.abort()
        else:
            self._check_stall_later()

    def _stop_stall_check(self) -> None:
        if self._stall_check:
            self._stall_check.cancel()
            self._stall_check = None

    def _start_timer(self) -> None:
        self._stop_timer()
        self._deadline = self.loop.call_later(_HEADER_SECONDS, self._close)

    def _stop_timer(self) -> None:
        if self._deadline:
            self._deadline.cancel()
            self._deadline = None


def _configuration(app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=_TimedProtocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        log_level=logging.CRITICAL,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
    )


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise EdgespecError(
            f"--host {host} is not an address of this machine: {error_reason(error)}",
            "use 127.0.0.1",
            code="address_unavailable",
        ) from error
    try:
        # Without this option, a restarted server could not bind its port for a minute.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise EdgespecError(
            f"cannot listen on {host} port {port}: {error_reason(error)}",
            "another server may be using this port; choose a different port with --port",
            code="address_unavailable",
        ) from error
    return bound
