"""Invalid requests and failed replies in OpenAI's Responses API."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from edgespec.server.http_server import HttpServer
from tests.server.conftest import QUESTION, check_disconnect_cancels, running

IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"temperatur": 1}, "temperatur", "unknown_field"),
        ({"n": 2}, "n", "unknown_field"),
        ({"conversation": "c"}, "conversation", "unknown_field"),
        ({"input": []}, "input", "invalid_request"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role", "invalid_request"),
        ({"input": [{"role": "user"}]}, "input.0.content", "missing_field"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input.0.content.0", "attachment_unreadable"),
        ({"input": [{"type": "item_reference"}]}, "input.0.id", "missing_field"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "invalid_request"),
        ({"background": True}, "background", "invalid_request"),
        ({"tools": [{"type": "function"}]}, None, "tools_invalid"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "tools_invalid"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "constraint_invalid"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_request"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_invalid_requests_are_explained(
    client: openai.OpenAI, change: dict[str, Any], param: str | None, code: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(model="demo", input=QUESTION, stream=stream, extra_body=change)
    assert (error.value.code, error.value.param) == (code, param)
    assert error.value.type == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_other_errors(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as long:
        client.responses.create(model="demo", input="word " * 1500, stream=stream)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-77", input=QUESTION, stream=stream)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")


def test_a_too_long_input_fails_within_a_stream(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a model is loading, the stream starts before the error. Codex then reads the code."""
    monkeypatch.setattr("edgespec.server.responses._PING_SECONDS", 0.0)
    *_, last = client.responses.create(model="demo", input="word " * 1500, stream=True)
    assert last.type == "response.failed"
    assert last.response.error
    assert last.response.error.to_dict()["code"] == "context_length_exceeded"


def test_errors_within_a_stream(endless: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.server.http_server._GRACE_SECONDS", 0.1)
    with (
        running(load_options={"context": 1024}) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client,
    ):
        stream = client.responses.create(model="demo", input=QUESTION, stream=True, extra_body=endless)
        next(stream)
        server.stop()
        *_, last = stream
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error
    assert "the server is stopping" in last.response.error.message


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_cancels_the_reply(
    server: HttpServer, http: httpx.Client, endless: dict[str, Any], stream: bool
) -> None:
    body = {"input": QUESTION, "stream": stream, **endless}
    check_disconnect_cancels(server, http, "/v1/responses", body)
