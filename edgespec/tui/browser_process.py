"""The process of a chat in a browser tab. It ends when the connection ends, even if the chat is stuck."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress

from aiohttp import web
from textual_serve.app_service import AppService
from textual_serve.download_manager import DownloadManager

__all__ = ["ChatProcess"]

# Maximum size of a chat in columns and rows. Larger sizes would need gigabytes of memory. An 8K display in a
# small font has about 800 x 230 characters.
_MAX_COLUMNS, _MAX_ROWS = 1000, 500
# Seconds that a chat has to save and end after its connection was closed. Then it is killed.
_END_SECONDS = 6.0
_READ_BYTES = 65536


class ChatProcess(AppService):
    """The chat process of one web socket. Used in the server's event loop.

    Args:
        words: The command that starts the process.
        websocket: The connection to the browser.
    """

    def __init__(self, words: Sequence[str], websocket: web.WebSocketResponse) -> None:

        async def close() -> None:
            await websocket.close()

        super().__init__(
            "",
            write_bytes=websocket.send_bytes,
            write_str=websocket.send_str,
            close=close,
            download_manager=DownloadManager(),
        )
        self._words = words
        self._ending: asyncio.Task[None] | None = None

    async def _open_app_process(self, width: int = 80, height: int = 24) -> Process:
        # Start the chat without a shell, so that killing the process ends the chat.
        self._process = process = await asyncio.create_subprocess_exec(
            *self._words,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=self._build_environment(*_limited(width, height)),
        )
        self._stdin = process.stdin
        return process

    async def set_terminal_size(self, width: int, height: int) -> None:
        """Resize the chat to this number of columns and rows, within the limits.

        Raises:
            TypeError, ValueError: A size is not a number.
        """
        await super().set_terminal_size(*_limited(int(width), int(height)))

    async def run(self) -> None:
        """Send the output of the process to the browser. Close the connection when the process ends."""
        try:
            await super().run()
        finally:
            await self.remote_close()

    async def stop(self) -> None:
        """End the process. Kill it if it does not end in time, or if the caller is cancelled."""
        if self._process is None:
            return
        # `stop` may be called twice: when the connection ends and when the server ends.
        self._ending = self._ending or asyncio.create_task(self._end(self._process))
        try:
            # Use `asyncio.wait`, because `asyncio.timeout` has no effect if `run` ignores cancellation.
            await asyncio.wait({self._ending}, timeout=_END_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                self._process.kill()
        await asyncio.shield(self._ending)

    async def _end(self, process: Process) -> None:
        await super().stop()
        # Read the remaining output, because the process cannot end while a full pipe blocks it.
        await asyncio.gather(_drain(process.stdout), _drain(process.stderr))
        await process.wait()


def _limited(width: int, height: int) -> tuple[int, int]:
    return min(max(width, 1), _MAX_COLUMNS), min(max(height, 1), _MAX_ROWS)


async def _drain(stream: asyncio.StreamReader | None) -> None:
    while stream is not None and await stream.read(_READ_BYTES):
        pass
