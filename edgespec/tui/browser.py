"""Serve the terminal chat's screen to browsers on this machine, using textual-serve.

Each tab has its own process, which is terminated when the tab's connection closes, even if the chat is stuck.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import socket
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import aiohttp_jinja2
import jinja2
from aiohttp import WSCloseCode, web
from textual_serve.app_service import AppService
from textual_serve.download_manager import DownloadManager
from textual_serve.server import Server, to_int

from edgespec.errors import EdgespecError
from edgespec.system.files import error_reason

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# Maximum size of a chat in columns and rows. Larger sizes would need gigabytes of memory. An 8K display in a
# small font fits about 800 x 230 characters.
_MAX_COLUMNS, _MAX_ROWS = 1000, 500
# Maximum time in seconds for the chats to save and exit when the server stops.
_STOP_SECONDS = 8.0
# Close-handshake timeout and ping interval of a WebSocket, in seconds.
_CLOSE_SECONDS, _HEARTBEAT_SECONDS = 2.0, 15.0
# Grace period in seconds for a chat to save and exit after its connection closes, before it is killed.
_END_SECONDS = 6.0
_READ_BYTES = 65536
# Exceptions that textual-serve raises if a browser sends an invalid message.
_INVALID_MESSAGE = (
    AssertionError,
    AttributeError,
    LookupError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)
# Content security policy that blocks requests to other servers, which the page does not need.
_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline';"
    " img-src 'self' data:; font-src 'self'; connect-src 'self' ws:; frame-ancestors 'none'; base-uri 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class BrowserChat(Server):
    """Serves the chat on 127.0.0.1. Each browser tab gets a chat process, which ends with the tab.

    textual-serve does not check who sends a request, so a guard checks every request first:

    - The Host header must be this server's address. Otherwise, a web page could reach the server by pointing
      its own host name at 127.0.0.1 (DNS rebinding).
    - The Origin header, which browsers send with WebSocket requests, must be this server's address.
    - Requests for the page and its WebSocket must contain the key. Only textual-serve's scripts and styles
      are served without it.

    Args:
        words: The command that starts a chat process.
        port: The port. 0 chooses a free one.
        key: The key, or None to generate a random one.

    Attributes:
        address: The address of the chat. Contains the key only if it was generated.

    Raises:
        EdgespecError: The port cannot be used.
    """

    def __init__(self, words: Sequence[str], port: int, key: str | None = None) -> None:
        self._socket = _bind(port)
        port = self._socket.getsockname()[1]
        super().__init__("", host="127.0.0.1", port=port, public_url=f"http://127.0.0.1:{port}")
        self._words = words
        self._key = key or secrets.token_urlsafe(24)
        self.address = f"{self.public_url}/?key={'YOUR_KEY' if key else self._key}"
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}
        self._chats: set[_ChatProcess] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = asyncio.Event()
        self._stop_requested = False

    def run(self, on_ready: Callable[[], None]) -> None:
        """Serve the chat. Blocks until `stop` is called."""
        asyncio.run(self._run(on_ready))

    def stop(self) -> None:
        """End all chats and stop the server. Can be called from any thread and from signal handlers."""
        self._stop_requested = True
        if self._loop is not None:
            # The event loop is closed if the server has already stopped.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stopped.set)

    async def _run(self, on_ready: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        if self._stop_requested:
            return
        # textual-serve logs a traceback for every closed connection, and aiohttp one for every invalid
        # request.
        for name in ("textual-serve", "aiohttp.server"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        runner = web.AppRunner(
            await self._make_app(),
            access_log=None,
            shutdown_timeout=_STOP_SECONDS,
            # Cancel a handler when its browser disconnects, even while it waits for its chat.
            handler_cancellation=True,
        )
        await runner.setup()
        try:
            await web.SockSite(runner, self._socket).start()
            on_ready()
            await self._stopped.wait()
        finally:
            await runner.cleanup()

    async def _make_app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        aiohttp_jinja2.setup(app, loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
        app.add_routes(
            [
                web.get("/", self.handle_index, name="index"),
                # The page appends the terminal's size to this address as a query string, so the key is in the
                # path.
                web.get("/ws/{key}", self.handle_websocket, name="websocket"),
                web.static("/static", self.statics_path, name="static"),
            ]
        )
        app.on_shutdown.append(self.on_shutdown)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Handle the request if its Host, Origin and key are valid. Reject it otherwise."""
        host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
        if host not in self._hosts:
            raise web.HTTPForbidden(
                text=f"This chat cannot be opened at the address {host[:100]!r}. Open the address shown in"
                " the terminal.\n"
            )
        if origin is not None and origin != f"http://{host}":
            raise web.HTTPForbidden(text=f"The web page {origin[:100]!r} may not use this chat.\n")
        is_static = request.path.startswith("/static/")
        if not is_static and not self._is_key(request.match_info.get("key") or request.query.get("key", "")):
            raise web.HTTPUnauthorized(text="The key is wrong. Open the address shown in the terminal.\n")
        response = await handler(request)
        if not response.prepared:
            response.headers.update(_HEADERS)
        return response

    def _is_key(self, given: str) -> bool:
        return hmac.compare_digest(_digest(given), _digest(self._key))

    # Replaces textual-serve's own page, which loads fonts from Google and ignores key presses until it is
    # clicked.
    @aiohttp_jinja2.template("browser.html")
    async def handle_index(self, request: web.Request) -> dict[str, object]:
        """Return the template's values: the font size and the WebSocket URL."""
        font_size = request.query.get("fontsize", "16")
        key = quote(request.query["key"], safe="")
        return {
            "font_size": font_size if font_size.isdecimal() else "16",
            "websocket_url": f"ws://{request.headers['Host']}/ws/{key}",
        }

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        """Start a chat process and connect it to the browser. When either side closes, close the other."""
        websocket = web.WebSocketResponse(timeout=_CLOSE_SECONDS, heartbeat=_HEARTBEAT_SECONDS)
        await websocket.prepare(request)
        chat = _ChatProcess(self._words, websocket)
        self._chats.add(chat)
        query = request.query
        try:
            await chat.start(to_int(query.get("width", ""), 80), to_int(query.get("height", ""), 24))
            await self._process_messages(websocket, chat)
        except _INVALID_MESSAGE:
            await websocket.close(code=WSCloseCode.PROTOCOL_ERROR)
        except ConnectionError:
            # The browser has closed the connection.
            pass
        finally:
            await chat.stop()
            self._chats.remove(chat)
        return websocket

    async def on_shutdown(self, app: web.Application) -> None:  # noqa: ARG002
        """End all chats. Called when the server stops."""
        await asyncio.gather(*(chat.stop() for chat in self._chats))


def _digest(key: str) -> bytes:
    """Hash a key, so that the time to compare keys does not depend on their length."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _bind(port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", port))
    except OSError as error:
        bound.close()
        raise EdgespecError(
            f"cannot listen on 127.0.0.1 port {port}: {error_reason(error)}",
            "another server may be using this port; choose a different port with --port",
            code="address_unavailable",
        ) from error
    return bound


class _ChatProcess(AppService):
    """The chat process behind one WebSocket. Used only in the server's event loop.

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
        """Resize the chat to `width` columns and `height` rows, clamped to the limits.

        Raises:
            TypeError, ValueError: A size is not a number.
        """
        await super().set_terminal_size(*_limited(int(width), int(height)))

    async def run(self) -> None:
        """Forward the process's output to the browser. Close the connection when the process ends."""
        try:
            await super().run()
        finally:
            await self.remote_close()

    async def stop(self) -> None:
        """End the process. Kill it if it does not end in time, or if the caller is cancelled."""
        if self._process is None:
            return
        # `stop` may be called twice: when the connection closes and when the server stops.
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
        # The process cannot end while it is blocked on a full pipe, so drain the remaining output.
        await asyncio.gather(_drain(process.stdout), _drain(process.stderr))
        await process.wait()


def _limited(width: int, height: int) -> tuple[int, int]:
    return min(max(width, 1), _MAX_COLUMNS), min(max(height, 1), _MAX_ROWS)


async def _drain(stream: asyncio.StreamReader | None) -> None:
    while stream is not None and await stream.read(_READ_BYTES):
        pass
