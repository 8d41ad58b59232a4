"""Clients send fields and model names of other servers."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError

from edgespec.server.fields import RequestFields
from edgespec.server.openai.chat import ChatRequest
from edgespec.server.openai.responses import ResponsesRequest
from tests.server.conftest import MESSAGES

CHAT = {"messages": MESSAGES, "max_tokens": 4}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_fields_of_other_servers_are_ignored_and_listed(http: httpx.Client, path: str) -> None:
    more: dict[str, Any] = {"provider": {"order": []}, "transforms": [], "seed_node": None}
    reply = http.post(path, json={**CHAT, **more, "stream": False})
    assert reply.status_code == 200, reply.text
    assert '"ignored_fields": ["provider", "transforms"]' in reply.text


def test_misspelt_fields_are_errors(http: httpx.Client) -> None:
    for name in ("max_token", "temperatur", "top-p", "MaxTokens", "think", "x" * 65, "repetitionPenalty"):
        reply = http.post("/v1/chat/completions", json={**CHAT, name: 1})
        assert reply.status_code == 400, name
        assert f"unknown field '{name}" in reply.json()["error"]["message"]


def test_many_unknown_fields_are_refused_quickly(http: httpx.Client) -> None:
    many = {f"field_{index}": 1 for index in range(10_000)}
    started = time.monotonic()
    reply = http.post("/v1/chat/completions", json={**CHAT, **many})
    assert reply.status_code == 400
    assert time.monotonic() - started < 5


def test_null_is_the_same_as_a_missing_field(http: httpx.Client) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "x", "max_tokens": 1, "suffix": None}),
        ("/v1/chat/completions", {**CHAT, "functions": None, "response_format": {"type": "text", "x": None}}),
        ("/v1/messages", {**CHAT, "container": None}),
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": None}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1, "conversation": None, "prompt": None}),
    ):
        reply = http.post(path, json=body)
        assert reply.status_code == 200, reply.text


def test_options_can_have_the_names_of_llama_cpp(http: httpx.Client) -> None:
    def answer(**options: Any) -> Any:
        body = {"messages": MESSAGES, "seed": 1, **options}
        choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
        return choice["message"]["content"], choice["edgespec"]["ignored_fields"]

    expected = answer(repetition_penalty=1.7, max_tokens=16)
    assert answer(repeat_penalty=1.7, n_predict=16) == expected != answer(max_tokens=16)


def test_messages_can_have_fields_that_other_programs_add(client: openai.OpenAI) -> None:
    class Command(RequestFields):
        command: str

    limits: Any = {"model": "demo", "max_tokens": 60}
    reply = client.chat.completions.parse(messages=MESSAGES, response_format=Command, **limits)
    # This has the key `parsed`, and keys that are null.
    message: Any = reply.choices[0].message.model_dump(warnings=False)
    assert message["parsed"]
    message |= {"reasoning_details": [], "provider_specific_fields": {"a": 1}}
    conversation: Any = [{**MESSAGES[0], "cache_control": {"type": "ephemeral"}}, message, *MESSAGES]
    expected = client.chat.completions.create(
        messages=[*MESSAGES, {"role": "assistant", "content": message["content"]}, *MESSAGES], **limits
    )
    reply = client.chat.completions.create(messages=conversation, **limits)
    assert reply.choices[0].message.content == expected.choices[0].message.content
    assert reply.choices[0].edgespec["ignored_fields"] == [
        "messages.0.cache_control",
        "messages.1.parsed",
        "messages.1.reasoning_details",
        "messages.1.provider_specific_fields",
    ]


@pytest.mark.parametrize(
    ("fields", "thinking", "ignored"),
    [
        ({"reasoning_effort": "none"}, "off", []),
        ({"reasoning_effort": "low"}, None, ["reasoning_effort"]),
        ({"reasoning": {"effort": "none"}}, "off", []),
        ({"reasoning": {"enabled": True, "effort": "low"}}, "on", []),
        ({"reasoning": {"summary": "auto"}}, None, ["reasoning"]),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "off", []),
        ({"chat_template_kwargs": {"thinking": True}}, "on", []),
        ({"enable_thinking": False}, "off", []),
        ({"enable_thinking": "true"}, "on", []),
        ({"chat_template_kwargs": {"other": 1}}, None, ["chat_template_kwargs"]),
    ],
)
@pytest.mark.parametrize("request_type", [ChatRequest, ResponsesRequest])
def test_reasoning_can_be_turned_off(
    request_type: Any, fields: dict[str, Any], thinking: str | None, ignored: list[str]
) -> None:
    body = {"input": "x"} if request_type is ResponsesRequest else {"messages": MESSAGES}
    request = request_type.model_validate_json(json.dumps({**body, **fields}))
    assert request.reasoning_options().get("thinking") == thinking
    assert request.ignored_fields() == ignored


def test_thinking_can_have_the_form_of_deepseek() -> None:
    request = ChatRequest.model_validate({"messages": MESSAGES, "thinking": {"type": "disabled"}})
    assert request.thinking == "off"  # type: ignore[attr-defined]
    with pytest.raises(ValidationError):
        ChatRequest.model_validate({"messages": MESSAGES, "thinking": {"type": "sometimes"}})


def test_reasoning_is_passed_on(http: httpx.Client) -> None:
    reply = http.post(
        "/v1/chat/completions", json={**CHAT, "reasoning_effort": "none", "thinking": "perhaps"}
    )
    assert "thinking" in reply.json()["error"]["message"]


def test_names_can_have_the_tag_latest(http: httpx.Client) -> None:
    reply = http.post("/api/chat", json={**CHAT, "model": "demo:latest", "stream": False})
    assert reply.json()["model"] == "demo:latest"
    assert http.post("/api/show", json={"model": "demo:latest"}).status_code == 200
    assert http.get("/v1/models/demo:latest").status_code == 200
    assert http.get("/health").json()["loaded"] == ["demo"]
    wrong = http.post("/api/chat", json={**CHAT, "model": "nothing:latest"})
    assert wrong.status_code == 404
    assert "nothing" in wrong.json()["error"]


def test_ollamas_options_can_hold_the_settings_of_a_program(http: httpx.Client) -> None:
    # LangExtract puts keep_alive and max_workers there, and other programs set num_ctx outside options.
    body = {"prompt": "x", "stream": False, "num_ctx": 512, "options": {"keep_alive": 300, "num_predict": 2}}
    reply = http.post("/api/generate", json={**body, "options": {**body["options"], "max_workers": 2}})  # type: ignore[dict-item]
    assert reply.json()["edgespec"]["ignored_fields"] == [
        "num_ctx",
        "options.keep_alive",
        "options.max_workers",
    ]


def test_the_file_format_has_ollamas_name(http: httpx.Client) -> None:
    models = {each["name"]: each["details"]["format"] for each in http.get("/api/tags").json()["models"]}
    assert models["demo"] == "gguf"


def test_anthropics_older_field_makes_the_answer_json(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    body = {**CHAT, "max_tokens": 40, "output_format": {"type": "json_schema", "schema": schema}}
    assert "n" in json.loads(http.post("/v1/messages", json=body).json()["content"][0]["text"])
