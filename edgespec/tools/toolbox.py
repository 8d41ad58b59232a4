"""The MCP servers of a chat. A separate thread handles them, so that they cannot block the screen."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from edgespec.tools.connection import ServerConnection
from edgespec.tools.result import ToolResult
from edgespec.tools.server_config import ServerConfig
from edgespec.tools.tool import Tool

__all__ = ["Toolbox"]

_CLOSE_SECONDS = 4.0
_T = TypeVar("_T")


class Toolbox:
    """Connections to MCP servers. Thread-safe.

    The first call to `start` or `call` starts a background thread. Nothing runs before that.

    Args:
        configs: The servers.

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
        """Stop all servers and the thread, waiting a few seconds at most."""
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
