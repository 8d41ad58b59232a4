"""With tools and a constraint, the reply is either tool calls or an answer that satisfies the constraint."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from edgespec import Runtime
from tests.server.conftest import MESSAGES
from tests.server.test_constraints import SCHEMA
from tests.server.test_tools import TOOLS, check_arguments

STRICT: Any = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "command", "schema": SCHEMA, "strict": True}}
OPTIONS: Any = {"model": "demo", "max_tokens": 120, "temperature": 0, "messages": MESSAGES}
ENDPOINTS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "anthropic": "/v1/messages",
    "ollama": "/api/chat",
}
FIELDS: dict[str, dict[str, Any]] = {
    "chat": {"response_format": FORMAT},
    "responses": {"text": {"format": {"type": "json_schema", "name": "command", "schema": SCHEMA}}},
    "anthropic": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "ollama": {"format": SCHEMA},
}


@pytest.fixture(scope="module")
def biases(plain: Runtime) -> dict[str, dict[str, int]]:
    """Return biases that make the reply a call or an answer, and that end it after one call.

    They have no effect where the grammar allows only one token.
    """

    def beginning(*texts: str) -> list[str]:
        pieces = ((token, plain.vocabulary.piece(token)) for token in range(plain.vocabulary.size))
        return [str(token) for token, piece in pieces if piece.startswith(tuple(map(str.encode, texts)))]

    braces, others = dict.fromkeys(beginning("{"), -100), dict.fromkeys(beginning("<", "\n"), -50)
    return {"call": {**braces, **others}, "answer": others}


def parts_of(chunks: openai.Stream[Any]) -> tuple[str, str, str, str]:
    """Return the content, name, arguments and finish reason of a streamed reply."""
    content = name = arguments = reason = ""
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for delta in choice.delta.tool_calls or ():
                assert delta.index == 0
                name += delta.function.name or ""
                arguments += delta.function.arguments or ""
    return content, name, arguments, reason


@pytest.mark.long
@pytest.mark.parametrize("kind", ["call", "answer"])
@pytest.mark.parametrize("tools", [TOOLS, STRICT], ids=["lenient", "strict"])
def test_a_call_or_an_answer(
    client: openai.OpenAI, plain: Runtime, biases: dict[str, dict[str, int]], tools: Any, kind: str
) -> None:
    options: Any = {**OPTIONS, "tools": tools, "logit_bias": biases[kind], "response_format": FORMAT}
    choice = client.chat.completions.create(**options).choices[0]
    streamed = parts_of(client.chat.completions.create(**{**options, "stream": True}))
    expected = plain.reply(
        MESSAGES,
        tools=tools,
        schema=SCHEMA,
        max_tokens=120,
        temperature=0.0,
        logit_bias={int(token): float(bias) for token, bias in biases[kind].items()},
    )
    if kind == "call":
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        assert choice.message.tool_calls
        (call,) = choice.message.tool_calls
        assert call.type == "function"
        check_arguments(call.function.arguments)
        assert [(each.name, each.arguments) for each in expected.tool_calls] == [
            (call.function.name, call.function.arguments)
        ]
        assert streamed == ("", "list_files", call.function.arguments, "tool_calls")
    else:
        assert choice.finish_reason == "stop"
        assert not choice.message.tool_calls
        assert choice.message.content == expected.answer
        jsonschema.validate(json.loads(expected.answer), SCHEMA)
        assert streamed == (expected.answer, "", "", "stop")


def test_the_choice_of_tools(client: openai.OpenAI, plain: Runtime) -> None:
    """Without a choice between a call and an answer, only one of the two is enforced."""
    options: Any = {**OPTIONS, "tools": TOOLS, "response_format": FORMAT}
    alone = plain.reply(MESSAGES, schema=SCHEMA, max_tokens=120, temperature=0.0).answer
    reply = client.chat.completions.create(tool_choice="none", **options).choices[0]
    assert reply.message.content == alone
    choices: Any = ("required", {"type": "function", "function": {"name": "list_files"}})
    for choice in choices:
        called = client.chat.completions.create(tool_choice=choice, **options).choices[0]
        assert called.finish_reason == "tool_calls"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["call", "answer"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ENDPOINTS)
def test_every_api(
    http: httpx.Client, biases: dict[str, dict[str, int]], api: str, stream: bool, kind: str
) -> None:
    body: dict[str, Any] = {"model": "demo", "temperature": 0, "tools": TOOLS, **FIELDS[api]}
    body |= {"logit_bias": biases[kind], "stream": stream}
    body |= {"input": MESSAGES, "max_output_tokens": 120} if api == "responses" else {"messages": MESSAGES}
    if api != "responses":
        body["max_tokens"] = 120
    response = http.post(ENDPOINTS[api], json=body)
    assert response.status_code == 200, response.text
    lines = response.text.splitlines()
    parts = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith(("data: {", "{"))]
    content, arguments = "", ""
    for part in parts:
        if api == "chat":
            (choice,) = part["choices"]
            message = choice.get("message") or choice.get("delta") or {}
            content += message.get("content") or ""
            arguments += "".join(call["function"]["arguments"] for call in message.get("tool_calls") or ())
        elif api == "ollama":
            content += part["message"]["content"]
            for call in part["message"].get("tool_calls") or ():
                arguments += json.dumps(call["function"]["arguments"])
        elif api == "anthropic":
            for block in part.get("content") or [part.get("delta") or {}]:
                content += block.get("text", "")
                arguments += block.get("partial_json", "") or json.dumps(block.get("input") or "").strip('"')
        else:
            content += part["delta"] if part.get("type") == "response.output_text.delta" else ""
            arguments += part["delta"] if part.get("type") == "response.function_call_arguments.delta" else ""
            for item in part.get("output") or ():
                content += item["content"][0]["text"] if item["type"] == "message" else ""
                arguments += item["arguments"] if item["type"] == "function_call" else ""
    if kind == "call":
        assert content == ""
        check_arguments(arguments)
    else:
        assert arguments == ""
        jsonschema.validate(json.loads(content), SCHEMA)


@pytest.mark.long
@pytest.mark.parametrize(
    ("constraint", "answers"),
    [
        ({"regex": "[0-9]/[0-9]"}, None),
        ({"choice": ["yes", "no"]}, ("yes", "no")),
        ({"grammar": 'start: "about " NUMBER\nNUMBER: /[0-9]/'}, None),
    ],
)
def test_other_constraints(
    client: openai.OpenAI,
    biases: dict[str, dict[str, int]],
    constraint: dict[str, Any],
    answers: tuple[str, ...] | None,
) -> None:
    options: Any = {**OPTIONS, "tools": TOOLS, "extra_body": constraint}
    reply = client.chat.completions.create(logit_bias=biases["answer"], **options).choices[0]
    assert reply.finish_reason == "stop"
    assert not answers or reply.message.content in answers
    call_bias = {token: -bias for token, bias in biases["answer"].items()}
    called = client.chat.completions.create(logit_bias=call_bias, **options).choices[0]
    assert called.message.tool_calls
    for call in called.message.tool_calls:
        assert call.type == "function"
        assert call.function.name == "list_files"


def test_errors_have_the_code_of_the_reason(http: httpx.Client) -> None:
    def error(tools: Any, **constraint: Any) -> str:
        body = {"messages": MESSAGES, "tools": tools, "max_tokens": 2, **constraint}
        response = http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400, response.text
        return str(response.json()["error"]["code"])

    unique = {"type": "array", "uniqueItems": True}
    assert error(TOOLS, schema=unique) == "constraint_not_supported"
    parameters = {"type": "object", "properties": {"a": unique}}
    function = {"name": "f", "parameters": parameters, "strict": True}
    strict = [{"type": "function", "function": function}]
    assert error(strict, schema=SCHEMA) == "constraint_not_supported"
    broken = [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "x"}}}]
    assert error(broken, schema=SCHEMA) == "constraint_not_supported"
    assert error(TOOLS, regex="a", tool_choice="required") == "option_conflict"
    lenient = [{"type": "function", "function": {**function, "strict": False}}]
    body = {"messages": MESSAGES, "tools": lenient, "max_tokens": 2, "schema": SCHEMA}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
