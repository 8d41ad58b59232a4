"""A running server with the demo model, and clients for it."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import httpx
import openai
import pytest

import edgespec
from edgespec import Runtime
from edgespec.server.http_server import HttpServer
from edgespec.server.settings import ServerSettings

QUESTION = "How do I list files by size?"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]


@contextmanager
def running(*, threads: int | None = 1, **settings: Any) -> Iterator[HttpServer]:
    """Run a server in a thread, on a free port, with one compute thread, because tests share the cores."""
    options = {"threads": threads} if threads else {}
    options |= settings.pop("load_options", {})
    server = HttpServer(ServerSettings(port=0, load_options=options, **settings))
    ready = threading.Event()
    thread = threading.Thread(target=server.run, args=(ready.set,), name="test-server")
    thread.start()
    try:
        assert ready.wait(120)
        yield server
    finally:
        server.stop()
        thread.join(120)
        assert not thread.is_alive()


@pytest.fixture(scope="package")
def server() -> Iterator[HttpServer]:
    """A server with the demo model, which always drafts. The default temperature is 0.

    It is shared by all files, like a server by its clients.
    """
    options = {"method": "model", "context": 1024}
    with running(load_options=options, reply_options={"temperature": 0.0}) as server:
        yield server


@pytest.fixture(scope="session", autouse=True)
def certificates_are_read_once() -> Iterator[None]:
    """Share the TLS contexts of all clients, because each one reads all certificates, which takes 20 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@pytest.fixture
def client(server: HttpServer) -> Iterator[openai.OpenAI]:
    """OpenAI's own client."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def http(server: HttpServer) -> Iterator[httpx.Client]:
    """A plain HTTP client."""
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


@pytest.fixture(scope="package")
def plain() -> Iterator[Runtime]:
    """The demo model without drafting, for the expected replies."""
    with edgespec.load("demo", "none", method="none", context=1024, threads=1) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def endless(plain: Runtime) -> dict[str, Any]:
    """Return the options of a reply that does not end before its 1000 tokens."""
    vocabulary = plain.vocabulary
    ends = [token for token in range(plain.target.vocab_size) if vocabulary.is_end(token)]
    return {"max_tokens": 950, "logit_bias": {str(token): -100.0 for token in ends}, "method": "none"}


def check_disconnect_cancels(
    server: HttpServer, http: httpx.Client, path: str, body: Mapping[str, Any]
) -> None:
    """Check that a reply is cancelled when its client disconnects before the end."""
    before = _cancelled_replies(http)
    with httpx.Client(base_url=server.url, timeout=0.2) as impatient:
        if body["stream"]:
            with impatient.stream("POST", path, json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                impatient.post(path, json=body)
    deadline = time.monotonic() + 60
    while _cancelled_replies(http) == before:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _cancelled_replies(http: httpx.Client) -> int:
    lines = http.get("/metrics").text.splitlines()
    counts = [line for line in lines if line.startswith('edgespec_replies_total{reason="cancelled"}')]
    return int(counts[0].split()[-1]) if counts else 0
