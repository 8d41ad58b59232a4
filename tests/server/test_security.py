"""Who may use the server."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from edgespec.errors import EdgespecError, OptionError
from edgespec.server.http_server import HttpServer
from edgespec.server.settings import ServerSettings
from tests.raising import raises
from tests.server.conftest import MESSAGES, running

BODY = {"messages": MESSAGES, "max_tokens": 1}
PATHS = ("/v1/models", "/metrics", "/openapi.json", "/nothing")


@contextmanager
def client_of(**settings: Any) -> Iterator[httpx.Client]:
    with running(**settings) as server, httpx.Client(base_url=server.url) as client:
        yield client


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:11435",
        "127.0.0.1.evil.example",
        "0.0.0.0",
        ".",
        "localhost..",
        "localhost.evil.example",
        "",
    ],
)
def test_other_host_names_are_rejected(http: httpx.Client, host: str) -> None:
    reply = http.get("/v1/models", headers={"Host": host})
    assert reply.status_code == 403
    assert reply.json()["error"]["code"] == "host_not_allowed"
    named = host or "an empty Host header"
    assert (
        f"{named}, because without an API key it accepts only local names" in reply.json()["error"]["message"]
    )


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:1", "LOCALHOST:80", "localhost.", "LocalHost.:1", "127.0.0.1:80", "[::1]:11435"],
)
def test_names_of_this_machine_are_accepted(http: httpx.Client, host: str) -> None:
    assert http.get("/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "http://localhost:3000", "null", ""])
def test_web_pages_are_rejected(http: httpx.Client, origin: str) -> None:
    reply = http.post("/v1/chat/completions", json=BODY, headers={"Origin": origin})
    assert reply.status_code == 403
    assert "access-control-allow-origin" not in reply.headers
    assert (origin or "does not send its address") + " may not use" in reply.json()["error"]["message"]
    preflight = http.options(
        "/v1/chat/completions", headers={"Origin": origin, "Access-Control-Request-Method": "POST"}
    )
    assert preflight.status_code == 403


@pytest.mark.long
def test_allowed_origins() -> None:
    with client_of(allowed_origins=("https://good.example",)) as client:
        good = client.post("/v1/chat/completions", json=BODY, headers={"Origin": "https://good.example"})
        assert good.status_code == 200
        assert good.headers["access-control-allow-origin"] == "https://good.example"
        bad = client.post("/v1/chat/completions", json=BODY, headers={"Origin": "https://evil.example"})
        assert bad.status_code == 403
        assert "access-control-allow-origin" not in bad.headers


@pytest.mark.long
def test_api_key() -> None:
    with client_of(api_key="s3cret-ä") as client:
        for path in PATHS:
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": "s3cret"},
                {"x-api-key": ""},
            ):
                assert client.get(path, headers=headers).status_code == 401
        key = "s3cret-ä".encode()
        assert client.get("/v1/models", headers=[(b"Authorization", b"Bearer " + key)]).status_code == 200
        assert client.get("/v1/models", headers=[(b"x-api-key", key)]).status_code == 200
        assert client.get("/health").status_code == 200
        # With a key, the server can have any name.
        named = client.get("/v1/models", headers=[(b"x-api-key", key), (b"Host", b"box.local")])
        assert named.status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.com"])
def test_other_machines_need_a_key(host: str) -> None:
    with raises(OptionError, "no API", code="api_key_missing"):
        ServerSettings(host=host)
    ServerSettings(host=host, api_key="secret")
    with raises(OptionError, "key is", code="api_key_missing"):
        ServerSettings(host=host, api_key=" ")


def test_a_port_in_use_is_reported(server: HttpServer) -> None:
    port = int(server.url.rpartition(":")[2])
    with raises(EdgespecError, "--port", code="address_unavailable"):
        HttpServer(ServerSettings(port=port))


def test_logs_contain_no_prompt(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "xyzzy-plugh"
    messages = [{"role": "user", "content": secret}]
    http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2})
    http.post("/v1/chat/completions", json={"messages": messages, secret: 1})
    http.post("/v1/chat/completions", json={"messages": messages, "model": secret})
    http.post("/v1/completions", json={"prompt": secret * 2000})
    assert "/v1/chat/completions" in caplog.text
    assert secret not in caplog.text


@pytest.mark.parametrize(("host", "status"), [("127.0.0.1", b"200"), ("evil.example", b"403")])
def test_a_whole_url_is_accepted_as_path_but_the_host_is_checked(
    server: HttpServer, host: str, status: bytes
) -> None:
    request = f"GET {server.url}/v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=10) as connection:
        connection.sendall(request.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 " + status)


def test_requests_without_a_host_are_accepted(server: HttpServer) -> None:
    """Health checks of proxies use HTTP/1.0 without a Host header. Browsers always send one."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=10) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")


def test_a_body_with_two_lengths_is_rejected(server: HttpServer) -> None:
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    )
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=10) as connection:
        connection.sendall(request)
        assert connection.recv(4096).startswith(b"HTTP/1.1 400")
