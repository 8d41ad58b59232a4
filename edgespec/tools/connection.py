"""Start a chat's MCP servers, list their tools, and call the tools within time limits.

This runs in a separate thread, so that a slow server cannot block the UI.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from edgespec.tools.server_config import ServerConfig
from edgespec.tools.tool import MAX_TOOLS, Tool, ToolResult, accepted_tools, visible

if TYPE_CHECKING:
    from mcp import Client

    from edgespec.tools.transport import Problems

__all__ = ["ServerConnection", "Toolbox"]

# Timeout in seconds for starting a server and listing its tools. It is long because `npx` and similar
# programs may download the server first.
_START_SECONDS = 60.0
# Timeout in seconds for stopping a server. The transport itself stops waiting earlier, unless the machine is
# very busy.
_STOP_SECONDS = 10.0
# Seconds to wait for the transport to report why a connection was lost.
_REASON_SECONDS = 2.0
_MAX_PROBLEM_CHARACTERS = 300
_CLOSE_SECONDS = 4.0
_T = TypeVar("_T")


class ServerConnection:
    """A connection to an MCP server.

    Call its methods from a single event loop. Its attributes can be read from any thread.

    Attributes:
        config: The server's configuration.
        tools: The server's tools. Kept if the server exits on its own, because the next call restarts it.
            Empty before the first start and after `stop`.
        left_out: Number of tools left out because they are invalid or exceed the limit.
        problem: Why the server failed to start or exited on its own. Empty otherwise.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.tools: tuple[Tool, ...] = ()
        self.left_out = 0
        self.problem = ""
        self._client: Client | None = None
        self._task: asyncio.Task[None] | None = None
        self._started = asyncio.Event()
        self._stop = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def running(self) -> bool:
        """Whether the server has been started and is still connected."""
        return self._client is not None

    @property
    def starting(self) -> bool:
        """Whether the server is being started."""
        return self._task is not None and not self._task.done() and not self._started.is_set()

    async def start(self) -> None:
        """Start the server unless it is running. If it cannot be started, `problem` says why."""
        if self._task is not None and self._ended.is_set():
            await asyncio.wait([self._task], timeout=_STOP_SECONDS)
        if self._task is None or self._task.done():
            self._started, self._stop, self._ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
            self._task = asyncio.create_task(self._serve(self._started, self._stop))
        await self._started.wait()

    async def stop(self) -> None:
        """Stop the server if it is running, and clear `tools`."""
        self._stop.set()
        self.tools = ()
        if self._task is not None:
            self._client = None
            if not self._started.is_set():
                self._task.cancel()
            await asyncio.wait([self._task], timeout=_STOP_SECONDS)
        self.problem = ""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool, restarting the server if it has exited. Failures are returned as results."""
        from edgespec.tools.transport import is_connection_lost

        began = monotonic()
        await self.start()
        client = self._client
        if client is None:
            return ToolResult.failure(f"the server {self.config.name} is not running: {self.problem}")
        try:
            async with asyncio.timeout(self.config.timeout):
                result = await client.call_tool(name, dict(arguments))
            return ToolResult.of(result, monotonic() - began)
        except TimeoutError:
            problem = f"{name} did not answer within {self.config.timeout:g} seconds"
        except Exception as error:
            # The SDK can raise any exception, for example if the server returns a result of the wrong type.
            problem = _reason(error)
            if is_connection_lost(error):
                # Give the transport a moment to find out why the connection was lost.
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), _REASON_SECONDS)
            if self.problem:
                problem = f"the server {self.config.name} has exited: {self.problem}"
        return ToolResult.failure(problem, monotonic() - began)

    async def _serve(self, started: asyncio.Event, stop: asyncio.Event) -> None:
        """Connect to the server, and keep the connection open until `stop` is set or the server exits."""
        from mcp import Client

        from edgespec.tools.transport import Problems, transport

        problems, self.problem = Problems(), ""
        try:
            async with asyncio.timeout(_START_SECONDS) as limit:
                async with Client(
                    transport(self.config, problems), read_timeout_seconds=self.config.timeout, cache=None
                ) as client:
                    self.tools, self.left_out = await self._list_tools(client)
                    limit.reschedule(None)
                    self._client = client
                    started.set()
                    await _first(stop.wait(), problems.ended.wait())
                    if not stop.is_set():
                        self.problem = problems.describe() or "it closed the connection"
                    self._client = None
                    self._ended.set()
        except TimeoutError:
            self.problem = _problem(problems, f"it did not start within {_START_SECONDS:g} seconds")
        except Exception as error:
            self.problem = self.problem or _problem(problems, _reason(error))
        finally:
            self._client = None
            started.set()

    async def _list_tools(self, client: Client) -> tuple[tuple[Tool, ...], int]:
        """Return the server's tools and the number of tools left out. See `accepted_tools`.

        A server can paginate its list of tools.
        """
        listed, cursor = [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            listed += page.tools
            cursor = page.next_cursor
            # Ignore further pages, because a faulty server could send pages forever.
            if not cursor or len(listed) > MAX_TOOLS:
                return accepted_tools(self.config.name, listed)


async def _first(*waiting: Any) -> None:
    tasks = [asyncio.ensure_future(each) for each in waiting]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _problem(problems: Problems, reason: str) -> str:
    known = problems.describe()
    return (
        known
        if problems.flooded or problems.exit_status is not None
        else f"{reason} ({known})"
        if known
        else reason
    )


def _reason(error: BaseException) -> str:
    """Describe an error in one line. For an exception group, describe its first exception."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    # Import httpx2 here, as the SDK does, because importing it at startup would delay the chat's first
    # screen.
    import httpx2

    if isinstance(error, FileNotFoundError):
        return f"there is no program named {error.filename!r}"
    if isinstance(error, httpx2.ConnectError):
        return f"nothing answers at {error.request.url.copy_with(query=None)}"
    text = " ".join(visible(str(error)).split()) or type(error).__name__
    return text if len(text) <= _MAX_PROBLEM_CHARACTERS else text[:_MAX_PROBLEM_CHARACTERS] + "…"


class Toolbox:
    """Connections to MCP servers. Thread-safe.

    The first call to `start` or `call` starts a background thread. Nothing runs before that.

    Args:
        configs: The configurations of the servers.

    Attributes:
        servers: The connections, keyed by server name.
    """

    def __init__(self, configs: Iterable[ServerConfig]) -> None:
        self.servers = {config.name: ServerConnection(config) for config in configs}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def tools(self) -> Sequence[Tool]:
        """The tools of all running servers."""
        return [tool for server in self.servers.values() for tool in server.tools]

    def start(self, name: str) -> Future[None]:
        """Start a server. If it cannot be started, its `problem` says why."""
        return self._submit(self.servers[name].start())

    def stop(self, name: str) -> Future[None]:
        """Stop a server."""
        return self._submit(self.servers[name].stop())

    def call(self, tool: Tool, arguments: Mapping[str, Any]) -> Future[ToolResult]:
        """Call a tool. Failures are returned as results. Cancel the future to stop waiting for the server."""
        return self._submit(self.servers[tool.server].call(tool.name, arguments))

    def close(self) -> None:
        """Stop all servers and the background thread, waiting at most a few seconds."""
        if self._closed or self._loop is None or self._thread is None:
            return
        self._closed = True
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._stop_all(), self._loop).result(_CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_SECONDS)

    async def _stop_all(self) -> None:
        await asyncio.gather(*(server.stop() for server in self.servers.values()))

    def _submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        if self._loop is None:
            self._loop = loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_run, args=(loop,), name="edgespec-tools", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()
