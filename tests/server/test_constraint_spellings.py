"""A constraint on the answer is enforced or rejected in every format and place, and never ignored."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from edgespec.server.anthropic import AnthropicMessageRequest
from edgespec.server.errors import ApiError
from edgespec.server.fields import reply_options
from edgespec.server.leniency.constraints import answer_constraint, constraints_in
from edgespec.server.leniency.values import asks_for_constraint
from edgespec.server.ollama.replies import OllamaChatRequest, options_of
from edgespec.server.openai.chat import ChatRequest
from edgespec.server.openai.completions import CompletionRequest
from edgespec.server.openai.responses import ResponsesRequest
from tests.server.conftest import MESSAGES

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
NAMED = {"name": "answer", "schema": SCHEMA, "strict": True}
BODIES: dict[type[Any], dict[str, Any]] = {
    ChatRequest: {"messages": MESSAGES},
    CompletionRequest: {"prompt": "x"},
    ResponsesRequest: {"input": "x"},
    AnthropicMessageRequest: {"messages": MESSAGES},
    OllamaChatRequest: {"messages": MESSAGES},
}
OTHER_KEYS = ("response_schema", "responseSchema", "jsonSchema", "json", "parameters")
# Requests that ask for JSON that satisfies the schema.
SCHEMAS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": NAMED}},
    {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": json.dumps(SCHEMA)}}},
    {"response_format": {"type": "json_schema", "schema": SCHEMA}},
    {"response_format": {"type": "json_schema", "schema_definition": SCHEMA}},
    {"response_format": {"type": "json_object", "schema": SCHEMA}},
    {"response_format": {"type": "json_object", "value": SCHEMA}},
    {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}},
    {"response_format": {"type": "json", "value": SCHEMA}},
    # Hugging Face's examples have no type.
    {"response_format": {"type": "json", "value": {k: v for k, v in SCHEMA.items() if k != "type"}}},
    {"response_format": {"json_schema": NAMED}},
    *({"response_format": {"type": "json_object", key: SCHEMA}} for key in OTHER_KEYS),
    {"response_format": {"type": "json_schema", "responseSchema": NAMED}},
    {"response_format": {"jsonSchema": SCHEMA}},
    {"response_format": {"type": "json_schema", "json_schema": {}, "schema": SCHEMA}},
    {"response_format": {**SCHEMA, "type": "json_object"}},
    {"response_format": {**SCHEMA, "type": "json_schema"}},
    {"response_format": {"name": "answer", "parameters": SCHEMA}},
    {"response_format": SCHEMA},
    {"json_schema": SCHEMA},
    {"json_schema": json.dumps(SCHEMA)},
    {"json_schema": NAMED},
    {"format": SCHEMA},
    {"format": json.dumps(SCHEMA)},
    {"format": {"type": "json_schema", "json_schema": NAMED}},
    {"text": {"format": {"type": "json_schema", **NAMED}}},
    {"text": {"format": {"type": "json_schema", "json_schema": NAMED}, "verbosity": "low"}},
    {"output_format": {"type": "json_schema", "schema": SCHEMA}},
    {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}},
    {"response_schema": SCHEMA},
    {"output_schema": SCHEMA},
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"structured_outputs": {"json": SCHEMA}},
    {"nvext": {"guided_json": SCHEMA}},
]
VLLM: dict[str, Any] = {"regex": "[ab]{3}", "choice": ["red", "blue"], "grammar": 'start: "yes" | "no"'}
OTHERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"response_format": {"type": "json_object"}}, {"schema": {"type": "object"}}),
    ({"response_format": "json"}, {"schema": {"type": "object"}}),
    ({"response_format": {"type": "json_object", "schema": []}}, {"schema": {"type": "object"}}),
    ({"format": "json"}, {"schema": {"type": "object"}}),
    ({"structured_outputs": {"json_object": True}}, {"schema": {"type": "object"}}),
    *(({"structured_outputs": {name: value}}, {name: value}) for name, value in VLLM.items()),
    *(({f"guided_{name}": value}, {name: value}) for name, value in VLLM.items()),
    ({"response_format": {"type": "regex", "value": "a+"}}, {"regex": "a+"}),
    ({"response_format": {"type": "grammar", "grammar": 'start: "a"'}}, {"grammar": 'start: "a"'}),
    ({"response_format": {"type": "text"}}, {}),
    ({"response_format": []}, {}),
    ({"format": ""}, {}),
    ({"text": {"verbosity": "low"}}, {}),
    ({"response_format": {"const": 0}}, {"schema": {"const": 0}}),
    (
        {"response_format": {"type": "json_object", "json_schema": {"name": ""}}},
        {"schema": {"type": "object"}},
    ),
]
_EMPTY: tuple[Any, ...] = ("", {}, [])
# Values with which programs say that they set no constraint.
UNSET: list[dict[str, Any]] = [
    *({name: value} for name in ("response_format", "format", "output_format") for value in (False, *_EMPTY)),
    *({name: value} for name in ("json_schema", "guided_json", "response_schema") for value in _EMPTY),
    *({name: ""} for name in ("regex", "grammar", "schema", "guided_regex", "guided_grammar")),
    *({name: value} for name in ("choice", "guided_choice") for value in _EMPTY[1:]),
    {"response_format": {"type": None}},
    {"response_format": {"type": "text", "json_schema": {"name": "", "schema": None, "strict": False}}},
    {"response_format": {"type": "", "json_schema": None}},
    {"response_format": {"type": None, "schema": {}, "strict": False}},
    {"structured_outputs": {"json": "", "regex": "", "choice": [], "json_object": False}},
    {"nvext": {"guided_regex": ""}},
]


def constraint(request_type: type[Any], fields: dict[str, Any]) -> dict[str, Any]:
    request = request_type.model_validate_json(json.dumps({**BODIES[request_type], **fields}))
    return answer_constraint(constraints_in(request, {}))


@pytest.mark.parametrize("request_type", BODIES)
def test_schemas(request_type: type[Any]) -> None:
    for fields in SCHEMAS:
        assert constraint(request_type, fields) == {"schema": SCHEMA}, fields


@pytest.mark.parametrize("request_type", BODIES)
def test_other_formats(request_type: type[Any]) -> None:
    for fields, option in OTHERS:
        assert constraint(request_type, fields) == option, fields


@pytest.mark.parametrize("request_type", BODIES)
def test_empty_values_are_no_constraint(request_type: type[Any]) -> None:
    for fields in UNSET:
        request = request_type.model_validate_json(json.dumps({**BODIES[request_type], **fields}))
        assert constraints_in(request, {}) == {}, fields
        assert not reply_options(request).keys() & {"schema", "regex", "grammar", "choice"}, fields


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        *(
            ({"response_format": {"type": kind, other: "x"}}, other)
            for kind, other in (("text", "regex"), ("text", "grammar"), ("json_object", "regex"))
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": NAMED, "regex": "x"}},
            "set regex",
        ),
        ({"response_format": {"type": "text", "choice": ["x"]}}, "choice"),
        ({"response_format": {"type": "text", "properties": {}}}, "properties"),
        ({"response_format": {"type": "text", "parameters": SCHEMA}}, "parameters"),
        ({"json_schema": {"name": "x", "schema": False}}, "not false"),
        ({"format": {"a": "string"}}, '{"a": "string"}'),
        ({"response_format": {"schema": {"foo": "string"}}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": {"foo": "string"}}}, "response_format.schema"),
        ({"json_schema": False}, "not false"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "type text"),
        ({"response_format": {"type": "json_schema"}}, "add response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "add response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "", "schema": None}}},
            "add response_format.json_schema.schema",
        ),
        ({"format": {"type": "json_schema", "json_schema": {}}}, "add format.json_schema.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "add text.format.schema"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "add output_config.format.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "does not contain a schema",
        ),
        ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": "yaml"}, "response_format 'yaml'"),
        ({"response_format": 5}, "JSON schema"),
        ({"json_schema": "{"}, "valid JSON"),
        ({"json_schema": {"type": "object", "properties": [1]}}, "#/properties"),
        (
            {"json_schema": SCHEMA, "guided_json": {"const": 1}},
            "json_schema and guided_json",
        ),
    ],
)
def test_uncertain_constraints_are_refused(fields: dict[str, Any], place: str) -> None:
    with pytest.raises(ApiError) as error:
        constraint(ChatRequest, fields)
    assert place in error.value.message
    assert error.value.param


@pytest.mark.parametrize("request_type", BODIES)
def test_unknown_constraints_are_refused(request_type: type[Any]) -> None:
    for fields in (
        {"guided_decoding": {"json": SCHEMA}},
        {"generationConfig": {"responseSchema": SCHEMA}},
        {"extra_body": {"guided_json": SCHEMA}},
        {"ebnf": "root ::= 'a'"},
        {"structured_output": SCHEMA},
        {"response_formats": [SCHEMA]},
        {"parameters": {"grammar": {"type": "json", "value": SCHEMA}}},
    ):
        with pytest.raises(ValidationError):
            constraint(request_type, fields)


def test_other_unknown_fields_are_no_constraints() -> None:
    assert not asks_for_constraint("provider", {"order": [], "require_parameters": True})
    assert not asks_for_constraint("guided_json", None)


def test_the_strictest_of_equal_schemas_counts() -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}}
    closed = {"schema": {**schema, "additionalProperties": False}}
    for body in (
        {"format": schema, "options": {"schema": schema}},
        {"schema": schema, "guided_json": {"properties": {"a": {"const": 1}}, "type": "object"}},
    ):
        request = OllamaChatRequest.model_validate({"messages": MESSAGES, **body})
        assert {"schema": options_of(request)["schema"]} == closed


def test_constraints_in_ollamas_options_count() -> None:
    body = {"messages": MESSAGES, "options": {"format": SCHEMA}}
    assert options_of(OllamaChatRequest.model_validate(body))["schema"] == SCHEMA


@pytest.mark.long
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/api/chat", "/api/generate"]
)
def test_answers_satisfy_them(http: httpx.Client, path: str) -> None:
    prompt = {"prompt": "x"} if path in ("/v1/completions", "/api/generate") else {"messages": MESSAGES}
    for fields in ({"json_schema": SCHEMA}, {"response_format": {"type": "json_object", "value": SCHEMA}}):
        reply = http.post(path, json={**prompt, **fields, "max_tokens": 40, "stream": False})
        assert reply.status_code == 200, reply.text
        assert '{\\"a\\": ' in reply.text
    error = http.post(path, json={**prompt, "extra_body": {"guided_json": SCHEMA}, "stream": False})
    assert error.status_code == 400
    assert "response_format" in error.text
