"""Invalid requests and failed replies of OpenAI's Responses API."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from edgespec.server.http_server import HttpServer
from tests.server.conftest import QUESTION, check_disconnect_cancels, running

IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"temperatur": 1}, "temperatur", "unknown field 'temperatur'; did you mean temperature?"),
        ({"n": 2}, "n", "unknown field 'n'"),
        ({"conversation": "c"}, "conversation", "unknown field 'conversation'"),
        ({"input": []}, "input", "input: "),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role", "'robot'"),
        ({"input": [{"role": "user"}]}, "input.0.content", "input.0.content is missing; add this field"),
        (
            {"input": [{"role": "user", "content": [IMAGE]}]},
            "input.0.content.0",
            "edgespec's models read only text",
        ),
        ({"input": [{"type": "item_reference"}]}, "input.0.id", "input.0.id is missing; add this field"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "the server does not store responses"),
        ({"background": True}, "background", "only while the client waits"),
        ({"tools": [{"type": "function"}]}, None, "tool 1 has an invalid name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "tool_choice is invalid"),
        (
            {"text": {"format": {"type": "json_schema"}}},
            "text.format",
            "but no schema; add text.format.schema",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_invalid_requests_are_explained(
    client: openai.OpenAI, change: dict[str, Any], param: str | None, message: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(model="demo", input=QUESTION, stream=stream, extra_body=change)
    assert message in error.value.message
    assert error.value.param == param
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
