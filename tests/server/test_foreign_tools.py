"""Tools, tool choices, parts and items in the format of a different API than the one called."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from edgespec.chat.message import as_messages
from edgespec.server.errors import ApiError
from edgespec.server.leniency.tools import offered_tools, skipped_tools
from edgespec.server.openai.chat import ChatRequest
from edgespec.server.openai.chat import chat_prompt as chat_messages
from edgespec.server.openai.responses import ResponsesRequest, chat_prompt
from edgespec.server.service import StoredItems
from tests.server.conftest import MESSAGES, QUESTION

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"b": {"enum": [1]}}, "required": ["b"]}
NESTED = {"type": "function", "function": {"name": "f", "description": "Do f", "parameters": SCHEMA}}
FLAT = {"type": "function", "name": "f", "description": "Do f", "parameters": SCHEMA}
ANTHROPIC = {"name": "f", "description": "Do f", "input_schema": SCHEMA}
HOSTED: list[dict[str, Any]] = [
    {"type": "web_search"},
    {"type": "web_search_20250305", "name": "web_search"},
    {"type": "custom", "name": "patch", "format": {"type": "grammar", "definition": "start: 'a'"}},
]
# For each API, its path, the messages, and the fields that request a whole reply.
APIS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 60}),
    "responses": ("/v1/responses", {"input": QUESTION, "max_output_tokens": 60}),
    "anthropic": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 60}),
    "ollama": ("/api/chat", {"messages": MESSAGES, "max_tokens": 60, "stream": False}),
}


@pytest.mark.long
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("tool", [NESTED, FLAT, ANTHROPIC])
def test_tools_of_other_apis(http: httpx.Client, api: str, tool: dict[str, Any]) -> None:
    path, body = APIS[api]
    hosted = HOSTED[:2] if api == "anthropic" else HOSTED
    for choice in ("any", {"type": "tool", "name": "f"}):
        reply = http.post(path, json={**body, "tools": [*hosted, tool], "tool_choice": choice})
        assert reply.status_code == 200, reply.text
        assert '"f"' in reply.text
        assert '"b' in reply.text.replace("\\", "")
        for at in range(len(hosted)):
            assert f'"tools.{at}"' in reply.text
        assert f'"tools.{len(hosted)}"' not in reply.text


@pytest.mark.parametrize(
    "agent", ["speakeasy-sdk/python 3.7.0 2.935.1 1.0.0 mistralai", "ai-sdk/mistral/3.0.47"]
)
def test_mistrals_clients_get_whole_calls(http: httpx.Client, agent: str) -> None:
    """Their streams fail at parts of calls, which have no name."""
    # What mistralai 3.7.0 sends with `tool_choice="any"`.
    body = {"model": "demo", "max_tokens": 60, "stream": True, "messages": MESSAGES, "tools": [NESTED]}
    body |= {"safe_prompt": False, "tool_choice": "any"}
    reply = http.post("/v1/chat/completions", json=body, headers={"User-Agent": agent})
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    choices = [json.loads(event)["choices"][0] for event in events]
    (calls,) = [each["delta"]["tool_calls"] for each in choices if "tool_calls" in each["delta"]]
    (call,) = calls
    assert (call["index"], call["function"]["name"]) == (0, "f")
    assert json.loads(call["function"]["arguments"]) == {"b": 1}
    assert choices[-1]["finish_reason"] == "tool_calls"


@pytest.mark.long
@pytest.mark.parametrize("api", APIS)
def test_a_schema_for_the_answer_does_not_prevent_a_required_call(http: httpx.Client, api: str) -> None:
    """Instructor's mode RESPONSES_TOOLS sends both."""
    path, body = APIS[api]
    other = {"type": "object", "properties": {"a": {"enum": [2]}}, "required": ["a"]}
    answer = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": other}}}
    for choice in ({"type": "function", "name": "f"}, "required", "f"):
        reply = http.post(path, json={**body, **answer, "tools": [FLAT], "tool_choice": choice})
        assert reply.status_code == 200, reply.text
        assert '"f"' in reply.text
        assert '"b' in reply.text.replace("\\", "")


@pytest.mark.parametrize("api", APIS)
def test_a_required_call_without_functions_is_explained(http: httpx.Client, api: str) -> None:
    path, body = APIS[api]
    reply = http.post(path, json={**body, "tools": HOSTED[:1], "tool_choice": "required"})
    assert reply.status_code == 400
    assert "tools.0" in reply.text
    reply = http.post(path, json={**body, "tools": [FLAT], "tool_choice": "sometimes"})
    assert reply.status_code == 400
    assert "'sometimes'" in reply.text


def test_functions_in_namespaces() -> None:
    tools = [
        {
            "type": "namespace",
            "name": "git",
            "tools": [FLAT, {"type": "web_search"}, {**FLAT, "name": "log"}],
        },
        FLAT,
    ]
    offered = offered_tools(tools)
    names = [each["function"]["name"] for each in offered.definitions]
    assert names == ["git__f", "log", "f"]
    assert offered.namespaces == {"git__f": ("git", "f"), "log": ("git", "log")}
    assert offered.offered_name("git", "f") == "git__f"
    assert offered.offered_name(None, "f") == "f"
    assert skipped_tools(tools) == ["tools.0.tools.1"]


def test_a_call_to_a_function_in_a_namespace(http: httpx.Client) -> None:
    tools = [{"type": "namespace", "name": "git", "tools": [FLAT]}]
    body = {"input": QUESTION, "tools": tools, "tool_choice": "required", "max_output_tokens": 60}
    (call,) = http.post("/v1/responses", json=body).json()["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "git", "f")


def prompt(items: list[dict[str, Any]], **more: Any) -> tuple[Any, list[str]]:
    """Return the messages and the ignored fields of a response request."""
    body = ResponsesRequest.model_validate_json(
        json.dumps({"input": [*items, {"role": "user", "content": "Go"}], **more})
    )
    offered = offered_tools(body.tools or (), body.added_tools)
    made = chat_prompt(body, offered, StoredItems())
    return made, [
        name for name in body.ignored_fields() if name.startswith("input") and name.count(".") in (1, 3)
    ]


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("items", "name", "arguments", "result"),
    [
        (
            [{**CALL, "arguments": None}, {"type": "function_call_output", "call_id": "c", "output": None}],
            "f",
            None,
            "",
        ),
        (
            [
                {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** Begin"},
                {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
            ],
            "patch",
            {"input": "*** Begin"},
            "done",
        ),
        (
            [
                {
                    "type": "local_shell_call",
                    "call_id": "c",
                    "action": {"command": ["ls"]},
                    "status": "completed",
                },
                {
                    "type": "local_shell_call_output",
                    "call_id": "c",
                    "output": [{"type": "output_text", "text": "a"}],
                },
            ],
            "local_shell",
            {"command": ["ls"]},
            "a",
        ),
        (
            [
                {
                    "type": "tool_search_call",
                    "call_id": "c",
                    "execution": "client",
                    "arguments": {"query": "x"},
                },
                {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [FLAT]},
            ],
            "tool_search",
            {"query": "x"},
            "f",
        ),
        (
            [
                {
                    "type": "mcp_call",
                    "id": "c",
                    "name": "m",
                    "arguments": "{}",
                    "output": "out",
                    "server_label": "s",
                }
            ],
            "m",
            "{}",
            "out",
        ),
    ],
)
def test_calls_of_agents(items: list[dict[str, Any]], name: str, arguments: Any, result: str) -> None:
    made, ignored = prompt(items)
    call, tool, _ = made.messages
    assert call["tool_calls"] == [
        {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    ]
    assert (tool["role"], tool["tool_call_id"], tool["content"]) == ("tool", "c", result)
    assert ignored == []


@pytest.mark.parametrize(
    "item",
    [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
        {"type": "image_generation_call", "id": "ig_1", "result": "aGk="},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "mcp_list_tools", "server_label": "s", "tools": []},
        {"type": "something_new"},
    ],
)
def test_other_items_are_skipped_and_listed(item: dict[str, Any]) -> None:
    made, ignored = prompt([{"role": "user", "content": "Hi"}, item])
    assert [message["content"] for message in made.messages] == ["Hi", "Go"]
    assert "input.1" in ignored


def test_items_can_add_tools() -> None:
    added = {"type": "additional_tools", "role": "developer", "tools": [FLAT, {"type": "web_search"}]}
    made, ignored = prompt([added, added], tools=[{**FLAT, "name": "g"}])
    assert [tool["function"]["name"] for tool in made.tools] == ["g", "f"]
    assert [message["content"] for message in made.messages] == ["Go"]
    assert ignored == []


def test_images_in_results_become_notes_and_are_listed(http: httpx.Client) -> None:
    image = {"type": "input_image", "image_url": "data:,"}
    output = {
        "type": "function_call_output",
        "call_id": "c",
        "output": [{"type": "input_text", "text": "a"}, image],
    }
    made, ignored = prompt([CALL, output])
    assert made.messages[1]["content"] == "a\n[input_image omitted: text only]"
    assert ignored == ["input.1.output.1"]
    call = {"type": "tool_use", "id": "c", "name": "f", "input": None}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image", "source": {}}]}
    conversation = [
        *MESSAGES,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    body = {"messages": conversation, "max_tokens": 4}
    for path in ("/v1/messages", "/v1/chat/completions"):
        reply = http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        (choice,) = reply.json().get("choices", [reply.json()])
        ignored = choice["edgespec"]["ignored_fields"]
        assert set(ignored) - {"messages.2.content.0.content.0.source"} == {"messages.2.content.0.content.0"}
    reply = http.post("/api/chat", json=body)
    assert reply.status_code == 400
    assert "messages.1.content.0 has type 'tool_use'" in reply.text


def test_an_image_that_is_the_whole_result_becomes_a_note_and_is_listed(http: httpx.Client) -> None:
    image = {"type": "computer_screenshot", "image_url": "data:image/png;base64," + "A" * 10_000}
    items: list[dict[str, Any]] = [CALL, {"type": "computer_call_output", "call_id": "c", "output": image}]
    made, _ = prompt(items)
    assert made.messages[1]["content"] == "[computer_screenshot omitted: text only]"
    assert ResponsesRequest.model_validate({"input": items}).ignored_fields() == ["input.1.output"]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
    result = {"role": "tool", "tool_call_id": "c"}
    for path, content in (
        ("/v1/chat/completions", {"content": image}),
        ("/api/chat", {"content": image}),
        ("/api/chat", {"content": "", "images": ["A" * 10_000]}),
    ):
        conversation = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, result | content]
        reply = http.post(path, json={"messages": conversation, "max_tokens": 4, "stream": False})
        assert reply.status_code == 200, reply.text
        assert '"ignored_fields": ["messages.2.' in reply.text
    reply = http.post("/api/chat", json={"messages": [{**MESSAGES[0], "images": ["AAAA"]}]})
    assert reply.status_code == 400
    assert "messages.0.images.0" in reply.text


@pytest.mark.long
@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_text", "text": QUESTION},
        {"type": "output_text", "text": QUESTION},
        {"type": "refusal", "refusal": QUESTION},
        {"type": "text", "text": QUESTION},
    ],
)
def test_parts_of_other_apis(http: httpx.Client, part: dict[str, Any]) -> None:
    def prompt_tokens(path: str, content: Any) -> int:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
        usage = http.post(path, json=body).json()["usage"]
        cached = usage.get("cache_read_input_tokens", 0)
        return int(usage.get("prompt_tokens") or usage["input_tokens"] + cached)

    for path in ("/v1/chat/completions", "/v1/messages"):
        assert prompt_tokens(path, [part]) == prompt_tokens(path, QUESTION)


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([{"type": "input_text", "text": "a"}], [("user", "a")]),
        ([{"type": "text", "text": "a"}], [("user", "a")]),
        ([{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}], [("user", "a\nb")]),
        (
            [
                {"role": "user", "content": "a"},
                {"type": "output_text", "text": "b"},
                {"type": "text", "text": "c"},
            ],
            [("user", "a"), ("assistant", "b"), ("user", "c")],
        ),
        (
            [{"role": "user", "content": "a"}, {"type": "input_text", "text": "b"}],
            [("user", "a"), ("user", "b")],
        ),
    ],
)
def test_parts_can_be_items(items: list[dict[str, Any]], messages: list[tuple[str, str]]) -> None:
    request = ResponsesRequest.model_validate({"input": items})
    made = chat_prompt(request, offered_tools([]), StoredItems())
    assert [(each["role"], each["content"]) for each in made.messages] == messages


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            "/v1/responses",
            {"input": [{"type": "input_image", "image_url": "x"}]},
            "input.0",
        ),
        ("/v1/responses", {"input": [{"type": "input_text"}]}, "input.0.text is missing"),
        ("/v1/responses", {"input": [{"type": "web_search_call"}]}, "no message"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "content": "x"}]},
            "no message",
        ),
        ("/v1/messages", {"messages": [{"role": "assistant", "content": "x"}]}, "no message"),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0",
        ),
    ],
)
def test_conversations_that_are_refused(
    http: httpx.Client, path: str, body: dict[str, Any], message: str
) -> None:
    reply = http.post(path, json=body)
    assert reply.status_code == 400
    assert message in reply.text


@pytest.mark.parametrize(
    ("part", "reasoning"),
    [
        ({"type": "thinking", "thinking": "Hm.", "signature": "s"}, "Hm."),
        ({"type": "reasoning", "text": "Hm."}, "Hm."),
        ({"type": "reasoning", "reasoning": "Hm."}, "Hm."),
        ({"type": "redacted_thinking", "data": "x"}, ""),
    ],
)
def test_reasoning_can_be_a_part(part: dict[str, Any], reasoning: str) -> None:
    reply = {"role": "assistant", "content": [part, {"type": "text", "text": "a"}]}
    body = ChatRequest.model_validate({"messages": [*MESSAGES, reply, *MESSAGES]})
    message = as_messages(chat_messages(body.messages).messages)[1]
    assert (message.content, message.reasoning) == ("a", reasoning)
    user = ChatRequest.model_validate({"messages": [{"role": "user", "content": [part]}]})
    with pytest.raises(ApiError):
        chat_messages(user.messages)


@pytest.mark.long
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_developers_and_parts(http: httpx.Client, path: str) -> None:
    def text(role: str, content: Any) -> str:
        body = {"messages": [{"role": role, "content": content}, *MESSAGES], "max_tokens": 9, "stream": False}
        reply = http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return re.sub(r'.*"(?:content|text)": ("(?:[^"\\]|\\.)*").*', r"\1", reply.text)

    plain = text("system", "Be brief.\nBe kind.")
    assert text("developer", "Be brief.\nBe kind.") == plain
    parts = ["Be brief.", "Be kind."]
    assert text("developer", [{"type": "text", "text": each} for each in parts]) == plain


NEWER_CALL = {"id": "f", "type": "function", "function": {"name": "f", "arguments": '{"b": 1}'}}


@pytest.mark.parametrize(
    ("messages", "arguments", "result"),
    [
        (
            [
                {"content": None, "function_call": {"name": "f", "arguments": '{"b": 1}'}},
                {"role": "function", "name": "f", "content": "found"},
            ],
            '{"b": 1}',
            "found",
        ),
        (
            [
                {
                    "content": "",
                    "tool_calls": [{"id": "f", "type": "custom", "custom": {"name": "f", "input": "x"}}],
                },
                {"role": "tool", "tool_call_id": "f", "content": "found"},
            ],
            '{"input": "x"}',
            "found",
        ),
        *(
            (
                [
                    {"content": None, "tool_calls": [NEWER_CALL], "function_call": None},
                    {"role": "tool", "tool_call_id": "f", "content": content},
                ],
                '{"b": 1}',
                text,
            )
            for content, text in (({"a": "ü"}, '{"a": "ü"}'), (42, "42"), (True, "true"), (1.5, "1.5"))
        ),
    ],
)
def test_older_and_unusual_calls(messages: list[dict[str, Any]], arguments: str, result: str) -> None:
    conversation = [*MESSAGES, {"role": "assistant", **messages[0]}, messages[1]]
    body = ChatRequest.model_validate_json(json.dumps({"messages": conversation}))
    _, call, answer = as_messages(chat_messages(body.messages).messages)
    assert [(each.id, each.name, each.arguments) for each in call.tool_calls] == [("f", "f", arguments)]
    assert (answer.role, answer.content, answer.tool_call_id, answer.name) == ("tool", result, "f", "f")


@pytest.mark.parametrize(
    "message", [{"role": "user", "content": {"a": 1}}, {"role": "assistant", "content": 5}]
)
def test_only_results_can_be_any_json(message: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ChatRequest.model_validate({"messages": [message]})


def test_anthropics_blocks_in_chats(http: httpx.Client) -> None:
    """Cursor sends calls and their results to this endpoint in the format of Anthropic's API."""
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {"b": 1}}
    blocks = [
        *MESSAGES,
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "found"}]},
    ]
    function = {"name": "f", "arguments": json.dumps({"b": 1})}
    calls = [{"id": "c", "type": "function", "function": function}]
    usual = [
        *MESSAGES,
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "found"},
    ]
    first, second = (
        chat_messages(ChatRequest.model_validate({"messages": each}).messages) for each in (blocks, usual)
    )
    assert as_messages(first.messages) == as_messages(second.messages)
    reply = http.post("/v1/chat/completions", json={"messages": blocks, "max_tokens": 2})
    assert reply.status_code == 200, reply.text


def test_a_body_for_another_endpoint_is_explained(http: httpx.Client) -> None:
    reply = http.post("/v1/chat/completions", json={"input": QUESTION})
    assert "POST /v1/responses" in reply.json()["error"]["message"]


def test_a_wrong_tool_is_named() -> None:
    with pytest.raises(ApiError) as error:
        offered_tools([FLAT, {**FLAT, "parameters": {"properties": [1]}}])
    assert error.value.param == "tools.1"
    assert "the tool f" in error.value.message
    body = ChatRequest.model_validate({"messages": MESSAGES, "tools": [NESTED, *HOSTED]})
    assert body.ignored_fields() == ["tools.1", "tools.2", "tools.3"]
