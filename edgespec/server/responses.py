"""HTTP responses: JSON and event streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgespec.server.errors import ApiError, api_error

__all__ = ["EventStream", "json_line", "json_response", "open_stream", "server_sent_event"]

# Ping interval in seconds. A silent stream sends a comment this often, so that clients and proxies keep the
# connection open.
_PING_SECONDS = 10.0
# Timeout in seconds for sending each part of a response.
SEND_SECONDS = 60.0
_PING = b": the reply is being prepared\n\n"
# Many clients split a stream with `str.splitlines`, which also splits at these characters. JSON already
# escapes the others, such as form feeds.
_LINE_SEPARATORS = {ord(each): f"\\u{ord(each):04x}" for each in "\x85\u2028\u2029"}


def json_response(
    value: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a response with a JSON object."""
    body = json_line(value).encode("utf-8", "replace")
    return Response(body, status, headers, media_type="application/json")


def json_line(value: Any) -> str:
    """Encode a value as JSON without any character that a client might treat as a line break."""
    return json.dumps(value, ensure_ascii=False).translate(_LINE_SEPARATORS)


def server_sent_event(value: Mapping[str, Any] | str, event: str | None = None) -> bytes:
    """Encode a server-sent event, with `value` as JSON unless it is a string."""
    data = value if isinstance(value, str) else json_line(value)
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {data}\n\n".encode("utf-8", "replace")


class EventStream(Response):
    """A streaming response. Created by `open_stream`."""

    def __init__(
        self,
        parts: AsyncGenerator[bytes, None],
        first: asyncio.Future[bytes],
        error_event: Callable[[ApiError], bytes],
        media_type: str,
    ) -> None:
        super().__init__(media_type=media_type, headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._parts, self._next, self._error_event = parts, first, error_event
        self._pings = media_type == "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send the stream. If an error occurs after the start, report it in the last event."""
        try:
            await _send_within_limit(
                send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            )
            while True:
                done, _ = await asyncio.wait({self._next}, timeout=_PING_SECONDS)
                if done:
                    part = self._take()
                    if part is None:
                        break
                elif self._pings:
                    part = _PING
                else:
                    continue
                await _send_within_limit(
                    send, {"type": "http.response.body", "body": part, "more_body": True}
                )
            await _send_within_limit(send, {"type": "http.response.body", "body": b""})
        finally:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)
            await self._parts.aclose()

    def _take(self) -> bytes | None:
        """Return the next part, or None at the end, and start generating the following one."""
        try:
            part = self._next.result()
        except StopAsyncIteration:
            return None
        except Exception as error:
            # The generator has ended with the exception, so its next result is StopAsyncIteration.
            part = self._error_event(api_error(error))
        self._next = asyncio.ensure_future(anext(self._parts))
        return part


async def open_stream(
    parts: AsyncGenerator[bytes, None],
    error_event: Callable[[ApiError], bytes],
    media_type: str = "text/event-stream",
) -> EventStream:
    """Create a response that streams `parts`.

    Waits briefly for the first part, so that most errors can still be sent as ordinary error responses.

    Args:
        parts: Generates the encoded events.
        error_event: Returns the event that reports an error after the stream has started.
        media_type: The media type of the stream.
    """
    first: asyncio.Future[bytes] = asyncio.ensure_future(anext(parts))
    try:
        await asyncio.wait({first}, timeout=_PING_SECONDS)
        if first.done() and (error := first.exception()):
            raise error
        return EventStream(parts, first, error_event, media_type)
    except BaseException:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await parts.aclose()
        raise


async def _send_within_limit(send: Send, message: dict[str, Any]) -> None:
    async with asyncio.timeout(SEND_SECONDS):
        await send(message)
