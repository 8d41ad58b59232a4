"""Hostile clients: damaged requests, slow clients, floods and disconnects must not harm the server.

`scripts/attack` sends more requests, of more kinds, to a server in a separate process.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from edgespec.server.http_server import HttpServer
from tests.server.conftest import MESSAGES, running

REQUESTS = 300
BODY = json.dumps({"messages": MESSAGES, "max_tokens": 8, "stream": True}).encode()
# Additional memory that the server may use after the first third of the requests.
MAX_GROWTH_BYTES = 48 * 2**20


@pytest.fixture(scope="module")
def victim() -> Iterator[HttpServer]:
    """A server whose time limits for slow clients are short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgespec.server.http_server._HEADER_SECONDS", 0.5)
        patch.setattr("edgespec.server.endpoint.BODY_SECONDS", 0.5)
        with running(reply_options={"temperature": 0.0}, load_options={"context": 512}) as server:
            yield server


def connect(server: HttpServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=60)


def request(body: bytes, length: int | None = None, path: bytes = b"/v1/chat/completions") -> bytes:
    size = len(body) if length is None else length
    return b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (path, size, body)


def received(client: socket.socket) -> bytes:
    """Return everything that the server sends until it closes the connection."""
    parts = []
    while part := client.recv(65536):
        parts.append(part)
    return b"".join(parts)


def test_a_client_can_send_a_body_that_is_too_large_before_it_reads_the_error(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that the server closes earlier fails, so that the client never sees the error."""
    monkeypatch.setattr("edgespec.server.endpoint.MAX_BODY_BYTES", 1 << 20)
    connection = http.client.HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2]), timeout=60)
    bodies: list[bytes | Iterator[bytes]] = [bytes(32 << 20), (bytes(1 << 20) for _ in range(32))]
    for body in bodies:  # The second one has no Content-Length.
        connection.request("POST", "/v1/chat/completions", body)
        response = connection.getresponse()
        assert response.status == 413
        assert json.loads(response.read())["error"]["code"] == "request_too_large"
    connection.close()


@pytest.mark.long
def test_slow_headers_are_cut_off(victim: HttpServer) -> None:
    for start in (b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"):
        with connect(victim) as client:
            client.sendall(start)
            assert received(client) == b""


def test_slow_headers_of_a_second_request_are_cut_off(victim: HttpServer) -> None:
    with connect(victim) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        client.sendall(b"GET /health HTTP/1.1\r\n")
        assert received(client) in (b"", b'{"status": "ok", "loaded": ["demo"]}')


@pytest.mark.parametrize("is_paused", [True, False])
def test_a_client_that_never_reads_is_dropped(
    victim: HttpServer, monkeypatch: pytest.MonkeyPatch, is_paused: bool
) -> None:
    monkeypatch.setattr("edgespec.server.http_server._STALL_SECONDS", 0.3)
    if not is_paused:
        # Act as if the rest were small enough for the server to keep writing.
        monkeypatch.setattr("edgespec.server.http_server._TimedProtocol.pause_writing", lambda _: None)
    with connect(victim) as lazy:
        port = lazy.getsockname()[1]
        lazy.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
        wait_until(lambda: port in client_ports())
        wait_until(lambda: port not in client_ports())


def client_ports() -> list[int]:
    """Return the ports of the clients whose connections this process holds open."""
    connections = psutil.Process().net_connections()
    return [each.raddr.port for each in connections if each.status == psutil.CONN_ESTABLISHED]


@pytest.mark.long
def test_a_request_sent_before_the_last_reply_is_not_cut_off(victim: HttpServer) -> None:
    body = {"prompt": "To list files", "max_tokens": 400, "method": "none", "logit_bias": {"0": -100}}
    with connect(victim) as client:
        long = request(json.dumps({**body, "n": 4, "regex": "[a-z]{390}"}).encode(), path=b"/v1/completions")
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + long)
        assert received(client).count(b"HTTP/1.1 200") == 2


LONG = {"prompt": "To list files", "method": "none", "regex": "[a-z]{390}", "max_tokens": 400}


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_side_after_the_request_gets_its_reply(
    victim: HttpServer, stream: bool
) -> None:
    body = json.dumps({**LONG, "n": 8, "stream": stream}).encode()
    with connect(victim) as client:
        client.sendall(request(body, path=b"/v1/completions"))
        client.shutdown(socket.SHUT_WR)
        response = http.client.HTTPResponse(client, method="POST")
        response.begin()
        assert response.status == 200
        text = response.read().decode()
        assert text.endswith("data: [DONE]\n\n") if stream else len(json.loads(text)["choices"]) == 8
        assert client.recv(1) == b""


@pytest.mark.long
def test_all_requests_before_the_client_closes_its_side_are_answered(victim: HttpServer) -> None:
    with connect(victim) as client:
        health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        client.sendall(health + request(json.dumps(LONG).encode(), path=b"/v1/completions") + health)
        client.shutdown(socket.SHUT_WR)
        assert received(client).count(b"HTTP/1.1 200") == 3


@pytest.mark.long
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_the_reply_to_a_client_that_has_gone_ends(victim: HttpServer, version: bytes) -> None:
    data = request(json.dumps({**LONG, "n": 16}).encode(), path=b"/v1/completions")
    with connect(victim) as client:
        client.sendall(data.replace(b"HTTP/1.1", b"HTTP/" + version))
        wait_until(lambda: bool(running_threads()))
    before = time.monotonic()
    wait_until(lambda: not running_threads())
    assert time.monotonic() - before < 5


def test_a_client_that_closes_its_side_within_a_request_gets_no_reply(victim: HttpServer) -> None:
    for part in (request(BODY[:20], len(BODY)), b"GET /health HTTP/1.1\r\n", b""):
        with connect(victim) as client:
            client.sendall(part)
            client.shutdown(socket.SHUT_WR)
            assert received(client) == b""


def test_slow_bodies_are_refused(victim: HttpServer) -> None:
    with connect(victim) as client:
        client.sendall(request(BODY[:20], len(BODY)))
        assert received(client).startswith(b"HTTP/1.1 408")


def test_large_bodies_are_refused(victim: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine, sending 80 MiB takes longer than the victim's half second.
    monkeypatch.setattr("edgespec.server.endpoint.BODY_SECONDS", 60.0)
    with connect(victim) as client:
        client.sendall(request(b"", 1 << 40))
        assert received(client).startswith(b"HTTP/1.1 413")
    with connect(victim) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        reply = b""
        try:
            for _ in range(80):
                client.sendall(b"100000\r\n" + b" " * 0x100000 + b"\r\n")
        except OSError:
            pass  # The server has already closed the connection.
        try:
            reply = received(client)
        except ConnectionResetError:
            return
        assert not reply or reply.startswith(b"HTTP/1.1 413")


def test_large_headers_are_refused(victim: HttpServer) -> None:
    with connect(victim) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 66_000)
        assert received(client).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b"\xff\xfe",
        b'{"messages": ' + b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"messages": [{"role": "user", "content": "\\ud8"}], "max_tokens": 1}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1e400}',
        b'{"messages": [{"role": "user", "content": "x"}], "seed": 123456789012345678901234567890}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "x"}], "stop": [5]}',
        b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"99999999": 1}}',
        b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"x": 1}}',
        b'{"messages": [{"role": "user", "content": "x"}], "model": "\\u0000/../.."}',
        b'{"messages": [{"role": "user", "content": "x"}], "model": "' + b"a" * 100_000 + b'"}',
    ],
)
def test_damaged_bodies_are_refused(victim: HttpServer, body: bytes) -> None:
    reply = httpx.post(f"{victim.url}/v1/chat/completions", content=body, timeout=60)
    assert reply.status_code in (400, 404)
    assert reply.json()["error"]["message"]
    assert len(reply.content) < 2000


@pytest.mark.long
def test_a_client_that_does_not_read_does_not_stop_others(
    victim: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.server.responses.SEND_SECONDS", 0.5)
    with connect(victim) as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        body = json.dumps({"messages": MESSAGES, "max_tokens": 400, "stream": True, "n": 16}).encode()
        lazy.sendall(request(body))
        time.sleep(0.2)
        assert ask(victim, "Say one word.")


def ask(server: HttpServer, text: str) -> str:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8}
    for _ in range(200):
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        if reply.status_code == 200:
            return str(reply.json()["choices"][0]["message"]["content"])
        assert reply.status_code in (429, 503), reply.text
        time.sleep(0.1)
    raise AssertionError("the server stayed busy")


def test_hostile_clients(victim: HttpServer) -> None:
    questions = [f"How do I list {what}?" for what in ("files", "users", "processes", "ports")]
    expected = {question: ask(victim, question) for question in questions}
    process, third = psutil.Process(), REQUESTS // 3
    stopped, wrong = threading.Event(), list[str]()

    def ordinary_client() -> None:
        while not stopped.is_set():
            for question in questions:
                if ask(victim, question) != expected[question]:
                    wrong.append(question)

    ordinary = threading.Thread(target=ordinary_client)
    ordinary.start()
    try:
        asyncio.run(flood(victim, third, seed=1))
        before = process.memory_info().rss
        asyncio.run(flood(victim, REQUESTS - third, seed=2))
    finally:
        stopped.set()
        ordinary.join(120)
    assert not wrong
    assert process.memory_info().rss - before < MAX_GROWTH_BYTES
    deadline = time.monotonic() + 60
    while running_threads():
        assert time.monotonic() < deadline, running_threads()
        time.sleep(0.1)
    assert {question: ask(victim, question) for question in questions} == expected


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def running_threads() -> list[str]:
    """Return the threads that read replies, which must end with their requests."""
    return [thread.name for thread in threading.enumerate() if thread.name == "edgespec-server-reply"]


async def flood(server: HttpServer, count: int, seed: int) -> None:
    """Send many requests, 30 at a time."""
    draw, free = random.Random(seed), asyncio.Semaphore(30)

    async def one(kind: str, data: bytes, pause_seconds: float) -> None:
        async with free:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
            try:
                async with asyncio.timeout(60):
                    writer.write(data)
                    await writer.drain()
                    if kind == "leave":
                        await asyncio.sleep(pause_seconds)
                    elif kind == "slow":
                        await asyncio.sleep(pause_seconds)
                        writer.write(b"x")
                        await reader.read(100)
                    else:
                        await reader.read(4000)
            except (ConnectionError, asyncio.IncompleteReadError):
                pass
            finally:
                writer.close()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(count):
            kind = draw.choice(("fuzz", "leave", "leave", "slow", "whole", "whole"))
            body = fuzzed(draw) if kind == "fuzz" else BODY
            data = request(body)
            if kind == "slow":
                data = data[: draw.randrange(len(data))]
            tasks.create_task(one(kind, data, draw.choice((0.0, 0.01, 0.1))))


def fuzzed(draw: random.Random) -> bytes:
    """Return a damaged body."""
    if draw.random() < 0.5:
        damaged = bytearray(BODY)
        for _ in range(draw.randrange(1, 6)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        return bytes(damaged)
    odd: Any = draw.choice((None, -1, 1e308, "x" * 1000, [], {}, [[]], True, {"a": [None]}))
    body = {"messages": MESSAGES, "max_tokens": 4}
    name = draw.choice(
        ("messages", "max_tokens", "stop", "n", "model", "logit_bias", "stream_options", "odd")
    )
    return json.dumps({**body, name: odd}).encode()
