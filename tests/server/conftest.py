"""A running server with the demo model, and clients for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from edgespec.server.http_server import HttpServer
from edgespec.server.settings import ServerSettings

QUESTION = "How do I list files by size?"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]


@contextmanager
def running(**settings: Any) -> Iterator[HttpServer]:
    """Run a server in a thread, on a free port."""
    server = HttpServer(ServerSettings(port=0, **settings))
    ready = threading.Event()
    thread = threading.Thread(target=server.run, args=(ready.set,), name="test-server")
    thread.start()
    try:
        assert ready.wait(60)
        yield server
    finally:
        server.stop()
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    """A server with the demo model, which always drafts, at temperature 0 unless a request changes it."""
    options = {"method": "model", "context": 1024}
    with running(load_options=options, reply_options={"temperature": 0.0}) as server:
        yield server


@pytest.fixture
def client(server: HttpServer) -> Iterator[openai.OpenAI]:
    """OpenAI's own client."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def http(server: HttpServer) -> Iterator[httpx.Client]:
    """A plain HTTP client."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
