"""JSON answers and log-probabilities, with OpenAI's own client."""

from __future__ import annotations

import json
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

import edgespec
from edgespec.constraints.compiler import ConstraintCompiler
from edgespec.constraints.matcher import Constraint
from edgespec.options.schemas.other_properties import closed_objects
from edgespec.server.http_server import HttpServer
from tests.server.conftest import MESSAGES, QUESTION

SCHEMA: Any = {
    "type": "object",
    "properties": {"command": {"type": "string", "maxLength": 12}, "safe": {"type": "boolean"}},
    "required": ["command", "safe"],
    "additionalProperties": False,
}


class Command(BaseModel):
    """A command and whether it is safe."""

    command: str
    safe: bool


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_json_schemas(client: openai.OpenAI, temperature: float) -> None:
    wanted: Any = {
        "type": "json_schema",
        "json_schema": {"name": "command", "schema": SCHEMA, "strict": True},
    }
    options: Any = {"temperature": temperature, "seed": 5, "max_tokens": 60}
    reply = client.chat.completions.create(
        model="demo", messages=MESSAGES, response_format=wanted, **options
    ).choices[0]
    with edgespec.load("demo", "none", method="none", context=1024, threads=1) as plain:
        expected = plain.reply(MESSAGES, schema=SCHEMA, **options)
    assert reply.message.content == expected.answer
    assert reply.finish_reason == expected.finish_reason
    if reply.finish_reason == "stop":
        jsonschema.validate(json.loads(expected.answer), SCHEMA)
    chunks = client.chat.completions.create(
        model="demo", messages=MESSAGES, response_format=wanted, stream=True, **options
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.answer


def test_the_clients_parse_helper(client: openai.OpenAI) -> None:
    schema = Command.model_json_schema()
    assert schema
    parsed = client.chat.completions.parse(
        model="demo", messages=MESSAGES, response_format=Command, max_tokens=200, temperature=0.8, seed=3
    )
    assert isinstance(parsed.choices[0].message.parsed, Command)


@pytest.mark.long
def test_any_json_object(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="demo", messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=300
    ).choices[0]
    if reply.finish_reason == "stop":
        assert isinstance(json.loads(reply.message.content or ""), dict)
    assert (reply.message.content or "").startswith("{")


def test_edgespecs_own_constraints(client: openai.OpenAI) -> None:
    def ask(**constraint: Any) -> str:
        reply = client.chat.completions.create(model="demo", messages=MESSAGES, extra_body=constraint)
        return reply.choices[0].message.content or ""

    assert ask(choice=["ls -S", "du -a"]) in ("ls -S", "du -a")
    assert ask(regex="[0-9]{3}").isdigit()
    assert ask(grammar='start: "yes" | "no"') in ("yes", "no")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"regex": "("}, "regex"),
        ({"schema": {"type": 5}}, ""),
        ({"schema": {"$ref": "http://example.com/x.json"}}, ""),
        ({"schema": {}, "regex": "a"}, ""),
        ({"top_logprobs": 3}, "top_logprobs requires logprobs"),
    ],
)
def test_invalid_constraints(client: openai.OpenAI, change: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="demo", messages=MESSAGES, extra_body=change)
    assert message in error.value.message


def test_logprobs(client: openai.OpenAI) -> None:
    options: Any = {"logprobs": True, "top_logprobs": 3, "max_tokens": 12}
    choice = client.chat.completions.create(model="demo", messages=MESSAGES, **options).choices[0]
    assert choice.logprobs
    tokens = choice.logprobs.content or []
    assert "".join(token.token for token in tokens) == choice.message.content
    for token in tokens:
        assert token.logprob <= 0.0
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob >= token.logprob
    streamed = [
        token
        for chunk in client.chat.completions.create(model="demo", messages=MESSAGES, stream=True, **options)
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content or []
    ]
    assert [token.token for token in streamed] == [token.token for token in tokens]
    assert [token.logprob for token in streamed] == pytest.approx(
        [token.logprob for token in tokens], abs=0.05
    )


def test_logprobs_of_completions(client: openai.OpenAI) -> None:
    options: Any = {"model": "demo", "prompt": "One", "max_tokens": 6, "logprobs": 2}
    choice = client.completions.create(**options).choices[0]
    logprobs = choice.logprobs
    assert logprobs
    assert logprobs.tokens
    assert logprobs.text_offset
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text[offset:].startswith(token)


@pytest.mark.long
def test_hostile_schemas_do_not_stop_the_server(http: httpx.Client) -> None:
    nested: Any = {"type": "string"}
    for _ in range(200):
        nested = {"type": "object", "properties": {"a": nested, "b": nested}}
        if len(json.dumps(nested)) > 1_000_000:
            break
    reply = http.post("/v1/chat/completions", json={"messages": MESSAGES, "schema": nested, "max_tokens": 2})
    assert reply.status_code in (200, 400)
    assert http.get("/health").status_code == 200


@pytest.mark.long
def test_constraints_that_crash_llguidance_do_not_stop_the_server(http: httpx.Client) -> None:
    definitions = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(3000)}
    schema = {"$defs": {**definitions, "d3000": {"type": "null"}}, "$ref": "#/$defs/d0"}
    reply = http.post("/v1/chat/completions", json={"messages": MESSAGES, "schema": schema})
    assert reply.status_code == 400
    assert "nested too deeply" in reply.json()["error"]["message"]
    assert http.get("/health").status_code == 200


def test_a_constraint_that_becomes_too_complex_is_an_error_of_the_request(http: httpx.Client) -> None:
    endless = 'start: "(" start'
    reply = http.post("/v1/chat/completions", json={"messages": MESSAGES, "grammar": endless})
    assert reply.status_code == 400
    assert "too complex" in reply.json()["error"]["message"]


class Size(BaseModel):
    """A file, without a fixed set of properties."""

    unit: Literal["kB", "MB"]
    parts: list[Command] | None
    marks: dict[str, int]


NUMBER = {"type": "integer"}


def test_objects_have_only_the_named_properties() -> None:
    schema = closed_objects(Size.model_json_schema())
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Command"]["additionalProperties"] is False
    assert schema["properties"]["marks"]["additionalProperties"] == NUMBER
    assert list(schema["properties"]) == ["unit", "parts", "marks"]
    within = {"type": "array", "items": {"properties": {"properties": NUMBER}}}
    assert closed_objects(within)["items"] == {
        "type": "object",
        "properties": {"properties": NUMBER},
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {"a": NUMBER}, "additionalProperties": NUMBER},
        {"type": "object", "properties": {"a": NUMBER}, "patternProperties": {"^b": NUMBER}},
        {"type": "object", "properties": {"a": NUMBER}, "required": ["b"]},
        {"type": "object", "properties": {"a": NUMBER}, "minProperties": 2},
        {"allOf": [{"properties": {"a": NUMBER}}, {"properties": {"b": NUMBER}}]},
        {"properties": {"a": NUMBER}, "anyOf": [{"required": ["b"]}, {"required": ["a"]}]},
        {"$ref": "#/$defs/A", "properties": {"b": NUMBER}, "$defs": {"A": {"properties": {"a": NUMBER}}}},
        {"type": "array", "items": {"not": {"properties": {"a": NUMBER}}}},
    ],
)
def test_schemas_that_allow_other_properties_stay_as_they_are(schema: dict[str, Any]) -> None:
    assert closed_objects(schema) == schema


def test_replies_end_with_schemas_that_do_not_forbid_properties(http: httpx.Client) -> None:
    """Instructor, LlamaIndex, guidance and Ollama's users send such schemas."""
    schema = {
        "type": "object",
        "title": "Item",
        "properties": {"n": {"type": "integer"}, "kind": {"type": "string", "enum": ["a", "b"]}},
        "required": ["n", "kind"],
    }
    messages = {"messages": MESSAGES, "stream": False}
    formats: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {
            **messages,
            "response_format": {"type": "json_schema", "json_schema": {"name": "Item", "schema": schema}},
        },
        "/v1/responses": {
            "input": QUESTION,
            "text": {"format": {"type": "json_schema", "name": "Item", "schema": schema}},
        },
        "/v1/messages": {
            **messages,
            "max_tokens": 200,
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
        },
        "/api/chat": {**messages, "format": schema},
    }
    for path, body in formats.items():
        reply = http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        assert re.search(r'\{\\?"n\\?": -?\d+, \\?"kind\\?": \\?"[ab]\\?"\}', reply.text), (path, reply.text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "choice"),
        ({"guided_regex": "a", "guided_json": SCHEMA}, "guided_json and guided_regex"),
        ({"guided_regex": "a", "regex": "b"}, "regex and guided_regex"),
        ({"guided_json": SCHEMA, "response_format": {"type": "json_object"}}, "guided_json"),
        ({"guided_regex": "a", "schema": {}}, "schema and guided_regex"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
            "unknown field 'structured_outputs.whitespace_pattern'",
        ),
    ],
)
def test_invalid_vllm_constraints(client: openai.OpenAI, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(model="demo", messages=MESSAGES, extra_body=fields)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": QUESTION, "text": {"format": {"type": "json_object"}}}),
        (
            "/v1/messages",
            {
                "messages": MESSAGES,
                "max_tokens": 2,
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
            },
        ),
        ("/api/chat", {"messages": MESSAGES, "format": "json"}),
        ("/api/generate", {"prompt": QUESTION, "format": {"type": "object"}}),
    ],
)
def test_two_schemas_are_refused(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    reply = http.post(path, json={**body, "schema": {"type": "integer"}})
    assert reply.status_code == 400
    assert "schema and " in reply.text
    assert "cannot be used together, because they ask for different formats" in reply.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "json_schema": SCHEMA, "schema": SCHEMA}),
        ("/v1/completions", {"prompt": QUESTION, "choice": ["a"], "guided_choice": ["a"]}),
        ("/v1/messages", {"messages": MESSAGES, "regex": "a", "structured_outputs": {"regex": "a"}}),
        ("/api/chat", {"messages": MESSAGES, "format": SCHEMA, "options": {"schema": SCHEMA}}),
        ("/api/generate", {"prompt": QUESTION, "regex": "a", "options": {"regex": "a"}}),
    ],
)
def test_the_same_constraint_in_two_fields_is_accepted(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    assert http.post(path, json={"max_tokens": 2, "stream": False, **body}).status_code == 200


def test_ollamas_options_must_not_contradict_the_request(http: httpx.Client) -> None:
    for outer, inner in (({"regex": "a"}, {"regex": "b"}), ({"format": SCHEMA}, {"format": "json"})):
        reply = http.post("/api/chat", json={"messages": MESSAGES, **outer, "options": inner})
        assert reply.status_code == 400
        (name,) = inner
        assert f"{name} and options.{name} cannot be used together" in reply.text


def test_slow_constraints_do_not_delay_other_requests(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More than asyncio's default number of threads.
    count = min(32, (os.cpu_count() or 1) + 4) + 2
    started, released = threading.Semaphore(0), threading.Event()
    check = ConstraintCompiler.check

    def slow(self: ConstraintCompiler, constraint: Constraint) -> None:
        started.release()
        assert released.wait(60)
        check(self, constraint)

    monkeypatch.setattr(ConstraintCompiler, "check", slow)
    body = {"prompt": "x", "max_tokens": 1, "regex": "a"}
    with ThreadPoolExecutor(count) as clients:
        try:
            for _ in range(count):
                clients.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=60)
            assert all(started.acquire(timeout=20) for _ in range(count))
            assert httpx.get(f"{server.url}/v1/models", timeout=20).status_code == 200
        finally:
            released.set()
