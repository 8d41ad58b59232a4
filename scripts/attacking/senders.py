"""Hostile ways to send requests and to receive replies."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from scripts.attacking.bodies import GET_PATHS, POST_PATHS, damaged, long_prompt, mutated, plausible

# A reply that takes longer than this many seconds counts as a hang. The limit is high, because a busy machine
# loads models slowly.
HANG_SECONDS = 300
_METHODS = ("GET", "GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "FOO")
# Parts of error messages that a stream with status 200 contains only if the server has a bug.
_BUGS = (b"because of a bug", b"llama.cpp failed", b"a forward pass failed")
_CANARY = re.compile(rb"canary[0-9a-f]{12}")


def new_canary(draw: random.Random) -> str:
    """Return a word that no other prompt contains."""
    return f"canary{draw.getrandbits(48):012x}"


def request(
    path: str, body: bytes, method: str = "POST", headers: bytes = b"", host: bytes = b"localhost"
) -> bytes:
    """Return the bytes of an HTTP request."""
    head = b"%s %s HTTP/1.1\r\nHost: %s\r\nContent-Length: %d\r\n" % (
        *(method.encode(), path.encode(), host),
        len(body),
    )
    return head + headers + b"\r\n" + body


# Matches the interim responses before a response, such as 100 Continue.
_INTERIM = re.compile(rb"\A(HTTP/1\.1 1\d\d[^\r]*\r\n\r\n)+")


def problem(reply: bytes, canary: str) -> str | None:
    """Return a description of the problem with the reply to a hostile request, or None if there is none."""
    foreign = set(_CANARY.findall(reply)) - {canary.encode()}
    if foreign:
        return f"the reply to {canary} contains {foreign}"
    status = re.match(rb"HTTP/1.1 (5\d\d)", reply)
    # Status 503 is not a problem: the server is busy or stopping.
    if status and status[1] != b"503":
        return f"status {status[1].decode()}: {reply[-300:]!r}"
    return f"bug: {reply[-300:]!r}" if any(each in reply for each in _BUGS) else None


@dataclass
class Connection:
    """A connection to the server. Use it in a `with` block, which closes it.

    Attributes:
        port: The server's port.
        draw: The random number generator.
        canary: The unique word in this client's prompts.
        received: The bytes received from the server.
    """

    port: int
    draw: random.Random
    canary: str
    received: bytes = b""
    _streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @property
    def writer(self) -> asyncio.StreamWriter:
        """The sending half of the open connection."""
        assert self._streams
        return self._streams[1]

    async def open(self, buffer_bytes: int | None = None) -> None:
        """Connect. If `buffer_bytes` is given, use a receive buffer of that size."""
        client = socket.socket()
        client.setblocking(False)
        if buffer_bytes:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", self.port))
        self._streams = await asyncio.open_connection(sock=client)

    async def send(self, data: bytes) -> None:
        """Send bytes."""
        self.writer.write(data)
        await self.writer.drain()

    async def receive(self, limit_bytes: int = 1 << 24, seconds: float = HANG_SECONDS) -> None:
        """Receive until the server closes the connection or has sent `limit_bytes`.

        Raises:
            TimeoutError: Neither happened within `seconds`.
        """
        assert self._streams
        async with asyncio.timeout(seconds):
            while len(self.received) < limit_bytes and (part := await self._streams[0].read(1 << 16)):
                self.received = _INTERIM.sub(b"", self.received + part)

    async def pause(self) -> None:
        """Wait for a random time, so that the next action can happen in any phase of the request."""
        await asyncio.sleep(self.draw.choice((0, 0, 0.01, 0.05, 0.2, 1)))

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        if self._streams:
            self.writer.close()


Attack: TypeAlias = Callable[[Connection], Awaitable[None]]
_CLOSE = b"Connection: close\r\n"


def _valid(client: Connection) -> bytes:
    path, body = plausible(client.draw, client.canary)
    return request(path, json.dumps(body).encode(), headers=_CLOSE)


async def fuzz(client: Connection) -> None:
    """Send a mutated or damaged body."""
    path, body = plausible(client.draw, client.canary)
    body = mutated(client.draw, body, client.canary)
    await client.open()
    await client.send(request(path, damaged(client.draw, body), headers=_CLOSE))
    await client.receive()


async def ask(client: Connection) -> None:
    """Send a valid request and read the whole reply. Many concurrent requests overflow the server's queue."""
    await client.open()
    await client.send(_valid(client))
    await client.receive()


async def leave(client: Connection) -> None:
    """Disconnect while the server generates the reply."""
    await client.open()
    await client.send(_valid(client))
    await client.pause()


async def leave_during_prefill(client: Connection) -> None:
    """Disconnect while the server reads a long prompt."""
    path = client.draw.choice(POST_PATHS[:6])
    body = long_prompt(path, client.canary)
    await client.open()
    await client.send(request(path, json.dumps(body).encode()))
    await client.pause()


async def reset(client: Connection) -> None:
    """Reset the connection after receiving a part of the reply."""
    await client.open()
    await client.send(_valid(client))
    await client.receive(client.draw.randrange(1, 4000))
    client.writer.transport.abort()


async def half_open(client: Connection) -> None:
    """Close the sending half of the connection, and wait for the reply."""
    await client.open()
    await client.send(_valid(client))
    client.writer.write_eof()
    await client.receive()


async def stall(client: Connection) -> None:
    """Send only part of a request. The server must close the connection after a timeout."""
    data = _valid(client)
    await client.open()
    await client.send(data[: client.draw.randrange(len(data))])
    if client.draw.random() < 0.1:
        await client.receive()
    else:
        await client.pause()


async def trickle(client: Connection) -> None:
    """Send a request in small pieces."""
    data = _valid(client)
    await client.open()
    step = client.draw.choice((1, 7, 50))
    for start in range(0, min(len(data), 60 * step), step):
        await client.send(data[start : start + step])
        await asyncio.sleep(0.02)
    await client.send(data[60 * step :])
    await client.receive()


async def read_slowly(client: Connection) -> None:
    """Request a long streamed reply, and pause before reading it."""
    body = {
        "messages": [{"role": "user", "content": client.canary}],
        "max_tokens": 300,
        "stream": True,
        "n": 4,
    }
    await client.open(buffer_bytes=1024)
    await client.send(request("/v1/chat/completions", json.dumps(body).encode(), headers=_CLOSE))
    await asyncio.sleep(2)
    await client.receive(20_000)


async def chunked(client: Connection) -> None:
    """Send a body in chunks, often with wrong lengths."""
    path, body = plausible(client.draw, client.canary)
    data = json.dumps(body).encode()
    cut = client.draw.randrange(1, len(data))
    endings = (b"zz\r\n", b"-1\r\n", b"ffffffffffffffff\r\nx", b"5;ext=\r\nab", b"%x\r\n" % len(data))
    rest = b"%x\r\n%s\r\n0\r\n\r\n" % (len(data) - cut, data[cut:])
    end = client.draw.choice((rest, rest, *endings))
    await client.open()
    await client.send(
        b"POST %s HTTP/1.1\r\nHost: localhost\r\n%sTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n%s"
        % (path.encode(), _CLOSE, cut, data[:cut], end)
    )
    if end != rest and client.draw.random() < 0.9:
        client.writer.write_eof()
    await client.receive()


async def pipeline(client: Connection) -> None:
    """Send several requests before the first reply."""
    path, body = plausible(client.draw, client.canary)
    data = request(path, json.dumps(body).encode())
    count = client.draw.choice((2, 5))
    await client.open()
    await client.send(data * count)
    # The server answers the requests one after the other.
    await client.receive(5000, seconds=count * HANG_SECONDS)


async def odd_method(client: Connection) -> None:
    """Use any method with any path."""
    method = client.draw.choice(_METHODS)
    await client.open()
    await client.send(request(client.draw.choice((*GET_PATHS, *POST_PATHS)), b"", method, _CLOSE))
    await client.receive()


async def odd_headers(client: Connection) -> None:
    """Send headers that are forged, too long, or not allowed."""
    headers = (
        *(b"Origin: null", b"Origin: http://evil", b"Host: evil", b"X-Forwarded-For: 1", b"x-api-key: \xff"),
        *(b"Upgrade: websocket\r\nConnection: Upgrade", b"Authorization: Bearer " + b"k" * 50_000),
        *(
            b"Expect: 100-continue",
            b"Content-Encoding: gzip",
            b"Transfer-Encoding: gzip",
            b"Content-Length: -1",
        ),
        *(b"Transfer-Encoding: chunked", b"\r\n".join(b"X%d: y" % index for index in range(3000))),
    )
    hosts = (
        b"localhost",
        b"localhost",
        b"evil",
        b"",
        b"[::1]",
        b"localhost:99999999",
        b"127.0.0.1@evil",
        b"\xff",
    )
    path, body = plausible(client.draw, client.canary)
    extra, host = client.draw.choice(headers) + b"\r\n" + _CLOSE, client.draw.choice(hosts)
    await client.open()
    await client.send(request(path, json.dumps(body).encode(), headers=extra, host=host))
    await client.receive()


async def junk(client: Connection) -> None:
    """Send bytes that are not HTTP."""
    await client.open()
    await client.send(
        client.draw.choice(
            (
                *(
                    client.draw.randbytes(300),
                    b"\x16\x03\x01\x02\0\1\0\1\xfc\3\3" + client.draw.randbytes(99),
                ),
                *(
                    b"\r\n" * 5000,
                    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                    b"GET",
                    b"GET / HTTP/9.9\r\n\r\n",
                    b"\0" * 999,
                ),
                *(b"GET http://evil/ HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n"),
            )
        )
    )
    client.writer.write_eof()
    await client.receive()


async def flood(client: Connection) -> None:
    """Open more connections than the server accepts, and leave them idle for a moment."""
    crowd = [Connection(client.port, client.draw, client.canary) for _ in range(600)]
    try:
        for each in crowd:
            await each.open()
        await asyncio.sleep(0.5)
    finally:
        for each in crowd:
            each.__exit__()


ATTACKS: dict[Attack, float] = {
    fuzz: 40,
    ask: 12,
    leave: 12,
    leave_during_prefill: 5,
    reset: 6,
    half_open: 3,
    stall: 4,
    trickle: 2,
    read_slowly: 1,
    chunked: 4,
    pipeline: 2,
    odd_method: 4,
    odd_headers: 4,
    junk: 3,
    flood: 0.1,
}
"""The attacks, and the relative frequency of each."""
