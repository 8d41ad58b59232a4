"""Connect to MCP servers, and limit how much data a server may send.

The MCP SDK's transports buffer messages of any length, so a broken or malicious server could exhaust memory.
This transport accepts at most 8 MiB from a server between two of edgespec's requests.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import anyio
import httpx2
from mcp import MCPError, types
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage

from edgespec.tools.server_config import ServerConfig

if TYPE_CHECKING:
    from anyio.abc import ByteReceiveStream, Process

__all__ = ["MAX_RECEIVED_BYTES", "FloodError", "Problems", "is_connection_lost", "transport"]

MAX_RECEIVED_BYTES = 8 << 20
# Seconds to wait for a server to exit after closing its stdin, and again after sending SIGTERM.
_END_SECONDS = 1.0
_MAX_STDERR_BYTES = 2_000
_CONNECT_SECONDS = 10.0

# The SDK logs a traceback for every invalid message from a server, which would overwrite the chat screen.
logging.getLogger("mcp").addHandler(logging.NullHandler())
logging.getLogger("mcp").propagate = False


class FloodError(Exception):
    """Raised when a server exceeds the limit on received data."""


class Problems:
    """Records why a connection ended, for the error message.

    Attributes:
        flooded: Whether the server exceeded the data limit.
        exit_status: Exit status of the server's program. None if it is running or was not started.
        stderr: The last lines of the program's stderr.
        ended: Set when the server's program has closed the connection, or edgespec has disconnected it.
    """

    def __init__(self) -> None:
        self.ended = anyio.Event()
        self.flooded = False
        self.exit_status: int | None = None
        self.stderr = b""

    def describe(self) -> str:
        """Return why the connection ended, or an empty string if the reason is unknown."""
        if self.flooded:
            return f"the server sent more than {MAX_RECEIVED_BYTES >> 20} MiB at once"
        lines = self.stderr.decode("utf-8", "replace").strip().splitlines()
        wrote = f": {lines[-1]}" if lines else ""
        if self.exit_status is not None:
            return f"the program ended with status {self.exit_status}{wrote}"
        return f"the program wrote{wrote}" if wrote else ""


class _Allowance:
    """Limits the number of bytes that a server may send between two of our requests."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._received = 0

    def reset(self) -> None:
        self._received = 0

    def count(self, received: int) -> None:
        """Count received bytes. Raises FloodError if the limit is exceeded."""
        self._received += received
        if self._received > MAX_RECEIVED_BYTES:
            self._problems.flooded = True
            self._problems.ended.set()
            raise FloodError


def transport(config: ServerConfig, problems: Problems) -> Any:
    """Return a transport to a server for `mcp.Client`."""
    return _http(config, problems) if config.url else _stdio(config, problems)


def is_connection_lost(error: Exception) -> bool:
    """Return whether an exception from the SDK means that the connection has ended."""
    return isinstance(error, MCPError) and error.code == types.CONNECTION_CLOSED


@asynccontextmanager
async def _http(config: ServerConfig, problems: Problems) -> AsyncGenerator[Any]:
    timeout = httpx2.Timeout(_CONNECT_SECONDS, read=config.timeout)
    limited = _LimitedHTTP(httpx2.AsyncHTTPTransport(), _Allowance(problems))
    async with (
        httpx2.AsyncClient(headers=dict(config.headers), timeout=timeout, transport=limited) as client,
        streamable_http_client(config.url, http_client=client) as streams,
    ):
        yield streams


class _LimitedHTTP(httpx2.AsyncBaseTransport):
    def __init__(self, inner: httpx2.AsyncBaseTransport, allowance: _Allowance) -> None:
        self._inner = inner
        self._allowance = allowance

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        # Only our own requests contain a method, whereas answers to the server's requests do not. See
        # `_stdio`.
        if b'"method"' in request.content:
            self._allowance.reset()
        response = await self._inner.handle_async_request(request)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _LimitedStream(response.stream, self._allowance)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _LimitedStream(httpx2.AsyncByteStream):
    def __init__(self, inner: httpx2.AsyncByteStream, allowance: _Allowance) -> None:
        self._inner = inner
        self._allowance = allowance

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._inner:
            try:
                self._allowance.count(len(chunk))
            except FloodError:
                raise httpx2.ReadError(
                    f"the server sent more than {MAX_RECEIVED_BYTES >> 20} MiB at once"
                ) from None
            yield chunk

    async def aclose(self) -> None:
        await self._inner.aclose()


@asynccontextmanager
async def _stdio(config: ServerConfig, problems: Problems) -> AsyncGenerator[Any]:
    """Start a server and exchange JSON lines with it. On exit, stop it and the processes it started."""
    command = os.path.expanduser(config.command)
    process = await anyio.open_process(
        [shutil.which(command) or command, *map(os.path.expanduser, config.args)],
        env={**get_default_environment(), **config.env},
        start_new_session=True,
    )
    received_writer, received = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    sent, sent_reader = anyio.create_memory_object_stream[SessionMessage](0)
    allowance, ending = _Allowance(problems), anyio.Event()

    async def read() -> None:
        assert process.stdout is not None
        async with received_writer:
            with suppress(FloodError, anyio.ClosedResourceError, anyio.BrokenResourceError):
                async for line in _lines(process.stdout, allowance):
                    await received_writer.send(_message(line))
        if not (problems.flooded or ending.is_set()):
            with anyio.move_on_after(_END_SECONDS):
                problems.exit_status = await process.wait()
        problems.ended.set()

    async def write() -> None:
        assert process.stdin is not None
        async with sent_reader:
            async for each in sent_reader:
                # Do not reset the limit when answering the server's requests. Otherwise, the server could
                # send any number of them.
                if isinstance(each.message, types.JSONRPCRequest):
                    allowance.reset()
                text = each.message.model_dump_json(by_alias=True, exclude_unset=True)
                try:
                    await process.stdin.send(text.encode("utf-8", "replace") + b"\n")
                except (anyio.ClosedResourceError, anyio.BrokenResourceError, OSError):
                    await received_writer.aclose()
                    return

    async def read_stderr() -> None:
        assert process.stderr is not None
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
            async for chunk in process.stderr:
                problems.stderr = (problems.stderr + chunk)[-_MAX_STDERR_BYTES:]

    async with anyio.create_task_group() as tasks:
        for task in (read, write, read_stderr):
            tasks.start_soon(task)
        try:
            yield received, sent
        finally:
            with anyio.CancelScope(shield=True):
                ending.set()
                received.close()
                sent.close()
                await _end(process)
            tasks.cancel_scope.cancel()


async def _lines(stream: ByteReceiveStream, allowance: _Allowance) -> AsyncIterator[bytes]:
    """Yield the lines of a stream. Raises FloodError if the server sends too much."""
    parts: list[bytes] = []
    async for chunk in stream:
        allowance.count(len(chunk))
        first, *rest = chunk.split(b"\n")
        parts.append(first)
        for part in rest:
            yield b"".join(parts)
            parts = [part]


def _message(line: bytes) -> SessionMessage | Exception:
    try:
        return SessionMessage(types.jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        return error


async def _end(process: Process) -> None:
    """Stop a server as specified by MCP: close its stdin, then send SIGTERM, then SIGKILL."""
    if process.stdin is not None:
        with suppress(OSError, anyio.ClosedResourceError, anyio.BrokenResourceError):
            await process.stdin.aclose()
    for number in ("SIGTERM", "SIGKILL"):
        if await _has_ended(process):
            break
        _signal(process, number)
    await _has_ended(process)
    # Also kill processes started by the server, which can outlive it.
    _signal(process, "SIGKILL")
    with anyio.move_on_after(_END_SECONDS), suppress(OSError, anyio.BrokenResourceError):
        await process.aclose()


async def _has_ended(process: Process) -> bool:
    with anyio.move_on_after(_END_SECONDS):
        while process.returncode is None:
            await anyio.sleep(0.01)
    return process.returncode is not None


def _signal(process: Process, name: str) -> None:
    """Send a signal to a server and the processes it started. On Windows, kill only the server."""
    with suppress(OSError):
        if os.name == "posix":
            os.killpg(process.pid, getattr(signal, name))
        else:
            process.kill()
