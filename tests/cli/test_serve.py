"""`edgespec serve` as a process of its own."""

from __future__ import annotations

import json
import signal
import socket

import httpx
import pytest

from tests.cli.conftest import Run, Start, one_line_error


@pytest.mark.long
def test_serving_and_stopping(start: Start) -> None:
    process = start("serve", "--port", "0", "--json", "--temperature", "0")
    assert process.stdout
    addresses = json.loads(process.stdout.readline())
    url = addresses["openai_url"]
    assert url == f"{addresses['anthropic_url']}/v1" == f"{addresses['ollama_url']}/v1"
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    replies = [httpx.post(f"{url}/chat/completions", json=body, timeout=120).json() for _ in range(2)]
    texts = {reply["choices"][0]["message"]["content"] for reply in replies}
    assert len(texts) == 1
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0


@pytest.mark.long
def test_a_second_signal_ends_the_server_at_once(start: Start) -> None:
    process = start("serve", "--port", "0", "--json")
    assert process.stdout
    port = httpx.URL(json.loads(process.stdout.readline())["url"]).port
    assert port
    with socket.create_connection(("127.0.0.1", port)) as client:
        # The server waits for the rest of this request while it shuts down.
        head = (
            b"POST /v1/completions HTTP/1.1",
            b"Host: localhost",
            b"Content-Length: 9",
            b"Expect: 100-continue",
        )
        client.sendall(b"\r\n".join(head) + b"\r\n\r\n{")
        assert client.recv(100).startswith(b"HTTP/1.1 100")
        process.send_signal(signal.SIGTERM)
        while _accepts_connections(port):
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 130


def _accepts_connections(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.long
def test_the_addresses_are_shown(start: Start) -> None:
    process = start("serve", "--port", "0")
    assert process.stdout
    first, *more = [process.stdout.readline().decode().strip() for _ in range(4)]
    url = first.removeprefix("Serving demo at ")
    assert more == [
        f"For programs that use OpenAI's API: {url}/v1",
        f"For programs that use Anthropic's or Ollama's API: {url}",
        "Press Ctrl-C to stop.",
    ]
    assert httpx.get(f"{url}/health").json()["status"] == "ok"
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0


def test_a_port_in_use(run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        one_line_error(run("serve", "--port", str(port)), 1, "--port", code="address_unavailable")


def test_other_machines_need_a_key(run: Run) -> None:
    one_line_error(run("serve", "--host", "0.0.0.0", "--port", "0"), 2, code="api_key_missing")


def test_an_unknown_model_is_reported_before_serving(run: Run) -> None:
    one_line_error(
        run("serve", "--target", "nosuchmodel", "--port", "0"), 1, "nosuchmodel", code="model_not_found"
    )
