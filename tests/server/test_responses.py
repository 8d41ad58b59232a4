"""OpenAI's own client asks for responses, and raises its exceptions for errors."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

import edgespec
from edgespec import Runtime
from edgespec.server.service import StoredItems
from tests.server.conftest import MESSAGES, QUESTION, running
from tests.server.test_constraints import SCHEMA
from tests.server.test_tools import DRAFTED, QUOTING, check_arguments
from tests.server.test_tools import TOOLS as CHAT_TOOLS

TOOLS: Any = [{"type": "function", **CHAT_TOOLS[0]["function"]}]
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}


def ask(client: openai.OpenAI, **options: Any) -> Any:
    """Return a response, and check that the streamed response is the same."""
    options = {"model": "demo", "input": QUESTION, **options}
    whole = client.responses.create(**options)
    events = list(client.responses.create(stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    first, last = events[0], events[-1]
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert last.type == f"response.{whole.status}"
    assert last.response.id == first.response.id
    assert first.response.output == []
    assert contents(last.response) == contents(whole)
    assert contents(rebuilt(events)) == contents(whole)
    return whole


def rebuilt(events: list[Any]) -> Any:
    """Return the response with the output that its events describe."""
    items = [event.item for event in events if event.type == "response.output_item.done"]
    for at, item in enumerate(items):
        deltas = [each.delta for each in events if each.type.endswith(".delta") and each.output_index == at]
        text = item.arguments if item.type == "function_call" else item.content[0].text
        assert "".join(deltas) == text
    return events[-1].response.model_copy(update={"output": items})


def contents(response: Any) -> list[dict[str, Any]]:
    """Return the output without the ids, which are different in each response."""
    items = [item.to_dict() for item in response.output]
    return [{name: item[name] for name in item if name not in ("id", "call_id")} for item in items]


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_replies_equal_plain_decoding(client: openai.OpenAI, plain: Runtime, temperature: float) -> None:
    expected = plain.reply(MESSAGES, max_tokens=48, temperature=temperature, seed=7)
    options: Any = {"max_output_tokens": 48, "temperature": temperature, "extra_body": {"seed": 7}}
    response = ask(client, **options)
    assert response.output_text == expected.answer
    assert response.usage.output_tokens == len(expected.tokens)
    assert response.usage.total_tokens == expected.stats.prompt_tokens + len(expected.tokens)
    assert response.edgespec["drafters"] == "model"
    assert response.timings["predicted_n"] == len(expected.tokens)


@pytest.mark.long
@pytest.mark.parametrize("target", ["demo", pytest.param("demo-mlx", marks=pytest.mark.long)])
def test_drafted_trees_do_not_change_replies(target: str) -> None:
    with edgespec.load(target, "none", method="none", context=512) as runtime:
        expected = [
            runtime.reply(MESSAGES, max_tokens=32, temperature=each, seed=7).answer for each in (0.0, 0.8)
        ]
    load: dict[str, Any] = {"context": 512, "method": "model", "draft_branches": (2, 2)}
    with (
        running(target=target, load_options=load) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client,
    ):
        for temperature, answer in zip((0.0, 0.8), expected, strict=True):
            settings: Any = {"temperature": temperature, "extra_body": {"seed": 7}}
            response = ask(client, model=target, max_output_tokens=32, **settings)
            assert response.output_text == answer


def test_events_come_in_openais_order(client: openai.OpenAI) -> None:
    stream = client.responses.create(model="demo", input=QUESTION, max_output_tokens=8, stream=True)
    events = list(stream)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert [event.type for event in events if event not in deltas] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details
    assert last.response.incomplete_details.reason == "max_output_tokens"


def test_a_request_as_codex_sends_it(http: httpx.Client) -> None:
    rules, text = ([{"type": "input_text", "text": each}] for each in ("Be brief.", QUESTION))
    body = {
        "model": "demo",
        "instructions": "You are an agent.",
        "input": [
            {"type": "message", "role": "developer", "content": rules},
            {"type": "message", "role": "user", "content": text},
        ],
        "tools": [
            {**TOOLS[0], "strict": False},
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "019a",
        "text": {"verbosity": "low"},
        "client_metadata": {"turn": "1"},
        "stop": ["."],
    }
    reply = http.post("/v1/responses", json=body)
    assert reply.status_code == 200
    last = json.loads(reply.text.rstrip().rpartition("data: ")[2])
    assert (last["type"], last["response"]["status"]) == ("response.completed", "completed")
    assert last["response"]["edgespec"]["ignored_fields"] == [
        "prompt_cache_key", "client_metadata", "text.verbosity", "reasoning",
        "tools.1", "tools.2", "include.0",
    ]  # fmt: skip


@pytest.mark.long
def test_the_clients_stream_helper(client: openai.OpenAI, plain: Runtime) -> None:
    expected = plain.reply(MESSAGES, regex="[a-z]{8}", temperature=0.0).answer
    options: Any = {"model": "demo", "input": QUESTION, "extra_body": {"regex": "[a-z]{8}"}}
    with client.responses.stream(**options) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == expected


def test_instructions_and_items(client: openai.OpenAI, plain: Runtime) -> None:
    conversation: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "The user is on a Mac."},
        {"role": "user", "content": "Hello\nthere"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": QUESTION},
    ]
    expected = plain.reply(conversation, max_tokens=16, temperature=0.0)
    hello = [{"type": "input_text", "text": text} for text in ("Hello", "there")]
    hi = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
    items = [
        {"role": "developer", "content": "The user is on a Mac."},
        {"type": "message", "role": "user", "content": hello},
        {**hi, "content": [{"type": "output_text", "text": "Hi.", "annotations": []}]},
        {"role": "user", "content": QUESTION},
    ]
    response = ask(client, input=items, instructions="Be brief.", max_output_tokens=16)
    assert response.output_text == expected.answer
    assert response.usage.input_tokens == expected.stats.prompt_tokens


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
def test_requests_can_refer_to_items_of_earlier_responses(client: openai.OpenAI, stream: bool) -> None:
    """As the AI SDK sends the second turn of a conversation."""
    options: Any = {"model": "demo", "max_output_tokens": 16}
    if stream:
        *_, last = client.responses.create(input=QUESTION, stream=True, **options)
        assert last.type == "response.incomplete"
        first = last.response
    else:
        first = client.responses.create(input=QUESTION, **options)
    (message,) = first.output
    more = {"role": "user", "content": "And by date?"}
    whole = ask(client, **options | {"input": [*MESSAGES, message.to_dict(), more]})
    reference = {"type": "item_reference", "id": message.id}
    response = ask(client, **options | {"input": [*MESSAGES, reference, more]})
    assert response.output_text == whole.output_text
    assert response.usage.input_tokens == whole.usage.input_tokens


def test_items_of_responses_that_are_not_stored(client: openai.OpenAI) -> None:
    response = client.responses.create(model="demo", input=QUESTION, max_output_tokens=4, store=False)
    reference: Any = {"type": "item_reference", "id": response.output[0].id}
    with pytest.raises(openai.NotFoundError, match="send the items themselves") as error:
        client.responses.create(model="demo", input=[*MESSAGES, reference, *MESSAGES])
    assert error.value.param == "input.1"


def test_stored_items_have_a_limit() -> None:
    stored = StoredItems(max_bytes=1000)
    for number in range(100):
        stored.add({"id": f"msg_{number}", "text": "x" * 300})
    assert [number for number in range(100) if stored.get(f"msg_{number}")] == [97, 98, 99]


def test_reasoning_becomes_an_item(client: openai.OpenAI, plain: Runtime) -> None:
    # The demo model does not reason by itself.
    begun: Any = {"reply_start": "<think>", "max_tokens": 16, "temperature": 0.0}
    expected = plain.stream_messages(MESSAGES, **begun).wait()
    assert expected.reasoning
    messages = [*MESSAGES, {"role": "assistant", "content": "<think>"}]
    response = ask(client, input=messages, max_output_tokens=16, extra_body={"thinking": "on"})
    (item,) = response.output
    assert (item.type, item.content[0].text) == ("reasoning", expected.reasoning)
    assert response.usage.output_tokens_details.reasoning_tokens == 16
    # The item can be sent back.
    again = [*MESSAGES, item.to_dict(), {"role": "assistant", "content": "With ls."}, *MESSAGES]
    assert ask(client, input=again, max_output_tokens=4).usage.output_tokens == 4


@pytest.mark.long
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "list_files"}])
def test_required_tool_calls(client: openai.OpenAI, choice: Any) -> None:
    options: Any = {"max_output_tokens": 120, "tools": [{"type": "web_search"}, *TOOLS]}
    response = ask(client, tool_choice=choice, include=["reasoning.encrypted_content"], **options)
    (call,) = response.output
    assert (call.type, call.name, response.status) == ("function_call", "list_files", "completed")
    check_arguments(call.arguments)
    assert response.edgespec["ignored_fields"] == ["tools.0", "include.0"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "notes.txt"}
    again = [*MESSAGES, call.to_dict(), result]
    final = ask(client, input=again, tool_choice="none", **options)
    assert [item.type for item in final.output] == ["message"]


@pytest.mark.long
def test_tool_results_reach_the_model(client: openai.OpenAI, plain: Runtime) -> None:
    function = {"name": "list_files", "arguments": '{"folder": "home", "hidden": true}'}
    calls = [{"id": call_id, "function": function} for call_id in ("a", "b")]
    results = [{"role": "tool", "tool_call_id": call_id, "content": "notes.txt"} for call_id in ("a", "b")]
    reply = {"role": "assistant", "content": "I look.", "tool_calls": calls}
    expected = plain.reply([*MESSAGES, reply, *results], tools=CHAT_TOOLS, max_tokens=24, temperature=0.0)
    items = [
        *MESSAGES,
        {"role": "assistant", "content": "I look."},
        *({"type": "function_call", "call_id": call_id, **function} for call_id in ("a", "b")),
        {"type": "function_call_output", "call_id": "a", "output": "notes.txt"},
        {
            "type": "function_call_output",
            "call_id": "b",
            "output": [{"type": "input_text", "text": "notes.txt"}],
        },
    ]
    response = ask(client, input=items, tools=TOOLS, max_output_tokens=24)
    assert response.usage.input_tokens == expected.stats.prompt_tokens
    assert response.output_text == expected.answer


def test_a_call_between_texts(client: openai.OpenAI) -> None:
    response = ask(client, input=[QUOTING], tools=TOOLS, max_output_tokens=200, extra_body=DRAFTED)
    before, call, after = response.output
    assert (before.content[0].text, after.content[0].text) == ("I look.", "Then I sort.")
    assert (call.type, json.loads(call.arguments)) == ("function_call", {"folder": "home"})


def test_a_call_that_the_reply_ended_within_is_incomplete(client: openai.OpenAI) -> None:
    response = ask(client, tools=TOOLS, tool_choice="required", max_output_tokens=20)
    (call,) = response.output
    assert (call.type, call.status, response.status) == ("function_call", "incomplete", "incomplete")
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.arguments)


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_json_schemas(client: openai.OpenAI, plain: Runtime, temperature: float) -> None:
    text = {"format": {"type": "json_schema", "name": "command", "schema": SCHEMA, "strict": True}}
    expected = plain.reply(MESSAGES, schema=SCHEMA, max_tokens=100, temperature=temperature, seed=5).answer
    options: Any = {"temperature": temperature, "extra_body": {"seed": 5}, "max_output_tokens": 100}
    assert ask(client, text=text, **options).output_text == expected
    jsonschema.validate(json.loads(expected), SCHEMA)
    started = ask(client, text={"format": {"type": "json_object"}}, max_output_tokens=4).output_text
    assert started.startswith("{")


class Answer(BaseModel):
    """An answer."""

    safe: bool


def test_the_clients_parse_helper(client: openai.OpenAI) -> None:
    response = client.responses.parse(model="demo", input=QUESTION, text_format=Answer, max_output_tokens=200)
    assert isinstance(response.output_parsed, Answer)


def test_logprobs(client: openai.OpenAI) -> None:
    include: Any = ["message.output_text.logprobs"]
    response = client.responses.create(
        model="demo", input=QUESTION, include=include, top_logprobs=3, max_output_tokens=8
    )
    (item,) = response.output
    assert item.type == "message"
    (part,) = item.content
    assert part.type == "output_text"
    assert part.logprobs
    assert "".join(each.token for each in part.logprobs) == part.text
    assert all(len(each.top_logprobs) == 3 for each in part.logprobs)
    streamed: list[str] = []
    for event in client.responses.create(
        model="demo", input=QUESTION, include=include, max_output_tokens=8, stream=True
    ):
        if event.type == "response.output_text.delta":
            streamed += [each.token for each in event.logprobs]
    assert streamed == [each.token for each in part.logprobs]


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
