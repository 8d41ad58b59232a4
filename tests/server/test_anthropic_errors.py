"""Anthropic's own client raises its exceptions for the server's errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from edgespec.server.http_server import HttpServer
from tests.server.conftest import MESSAGES, running
from tests.server.test_anthropic_client import TOOLS, WEB_SEARCH

if TYPE_CHECKING:  # Tests import it when they run, because that takes three seconds in each test process.
    import anthropic

PNG: Any = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
}


@pytest.fixture
def client(server: HttpServer) -> Iterator[anthropic.Anthropic]:
    """Anthropic's own client."""
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0, timeout=60) as client:
        yield client


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperatur": 1}, "temperature?"),
        ({"temperature": "hot"}, "'hot'"),
        ({"mcp_servers": [{"name": "x"}]}, "'mcp_servers'"),
        ({"messages": []}, "messages is"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "'robot'"),
        ({"messages": [{"role": "user", "content": [PNG]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"system": [PNG]}, "system.0"),
        ({"tools": [{"input_schema": {}}]}, "tool 1"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice is invalid"),
        ({"tools": [WEB_SEARCH], "tool_choice": {"type": "any"}}, "tools.0"),
        ({"thinking": {"type": "often"}}, "thinking.type"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_invalid_requests_are_explained(
    client: anthropic.Anthropic, change: dict[str, Any], message: str, stream: bool
) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError) as error:
        client.messages.create(
            model="demo", max_tokens=4, messages=MESSAGES, stream=stream, extra_body=change
        )
    body: Any = error.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert message in body["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_too_long_prompts(client: anthropic.Anthropic, stream: bool) -> None:
    import anthropic

    messages: Any = [{"role": "user", "content": "word " * 1500}]
    with pytest.raises(anthropic.BadRequestError) as error:
        client.messages.create(model="demo", max_tokens=4, messages=messages, stream=stream)
    body: Any = error.value.body
    tokens = body["error"]["n_prompt_tokens"]
    assert body["error"]["message"].startswith(f"prompt is too long: {tokens} tokens > 1024 maximum; ")
    assert body["error"]["n_ctx"] == 1024


def test_a_prompt_without_room_for_the_reply_is_too_long(client: anthropic.Anthropic) -> None:
    import anthropic

    messages: Any = [{"role": "user", "content": "word " * 850}]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: the prompt has 8"):
        client.messages.create(model="demo", max_tokens=4, messages=messages)


def test_other_errors(client: anthropic.Anthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="gpt-77", max_tokens=4, messages=MESSAGES)
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError, match="there is nothing at /v1/messages/batches"):
        client.messages.batches.list()


def test_errors_within_a_stream(endless: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import anthropic

    monkeypatch.setattr("edgespec.server.http_server._GRACE_SECONDS", 0.1)
    options: Any = {"model": "demo", "max_tokens": 900, "messages": MESSAGES}
    options["extra_body"] = {"logit_bias": endless["logit_bias"], "method": "none"}
    with (
        running(load_options={"context": 1024}) as server,
        anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client,
    ):
        stream = client.messages.create(stream=True, **options)
        next(stream)
        server.stop()
        with pytest.raises(anthropic.APIStatusError) as error:
            list(stream)
    body: Any = error.value.body
    assert body["error"]["type"] == "overloaded_error"
    assert "the server is stopping" in body["error"]["message"]
