"""OpenAI's own client lets the demo model call tools, in a format enforced by a grammar."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import MESSAGES

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "list_files",
            "description": "List the files in a folder",
            "parameters": {
                "type": "object",
                "properties": {"folder": {"enum": ["home", "root"]}, "hidden": {"type": "boolean"}},
                "required": ["folder", "hidden"],
                "additionalProperties": False,
            },
        },
    }
]
OPTIONS: Any = {"model": "demo", "max_tokens": 120, "temperature": 0, "tools": TOOLS}
# A reply with a call between pieces of text. The prompt contains it, so that drafts extend from one part into
# the next.
CALL = '<tool_call>\n{"name": "list_files", "arguments": {"folder": "home"}}\n</tool_call>'
CALL_IN_TEXT = f"I look.\n{CALL}\nThen I sort."
QUOTING: Any = {"role": "user", "content": f"Repeat: {CALL_IN_TEXT}"}
# With a regular expression and tools, a reply can also consist of calls alone. A bias against `<` (token 30)
# prevents that where there is a choice.
DRAFTED: Any = {
    "regex": re.escape(CALL_IN_TEXT),
    "logit_bias": {"30": -100},
    "method": "ngram",
    "draft_length": 12,
}


def check_arguments(text: str) -> None:
    arguments = json.loads(text)
    assert arguments["folder"] in ("home", "root")
    assert isinstance(arguments["hidden"], bool)


@pytest.mark.long
def test_a_required_call(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(messages=MESSAGES, tool_choice="required", **OPTIONS)
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "list_files"
    check_arguments(call.function.arguments)
    answered: Any = [
        *MESSAGES,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "notes.txt"},
    ]
    final = client.chat.completions.create(messages=answered, tool_choice="none", **OPTIONS)
    assert final.choices[0].message.content
    assert not final.choices[0].message.tool_calls


def test_a_streamed_call_equals_the_whole_one(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=MESSAGES, tool_choice="required", **OPTIONS)
    name, arguments, reasons = "", "", []
    for chunk in client.chat.completions.create(
        messages=MESSAGES, tool_choice="required", stream=True, **OPTIONS
    ):
        for choice in chunk.choices:
            reasons.append(choice.finish_reason)
            for delta in choice.delta.tool_calls or ():
                assert delta.index == 0
                assert delta.function is not None
                name += delta.function.name or ""
                arguments += delta.function.arguments or ""
    assert whole.choices[0].message.tool_calls
    (call,) = whole.choices[0].message.tool_calls
    assert call.type == "function"
    assert (name, arguments) == (call.function.name, call.function.arguments)
    assert reasons[-1] == "tool_calls"


def visible_text(api: str, response: httpx.Response) -> str:
    """Return the text in a whole or a streamed response."""
    lines = response.text.splitlines()
    parts = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith(("data: {", "{"))]
    texts: list[str] = []
    for part in parts:
        if api == "chat":
            (choice,) = part["choices"]
            texts.append((choice.get("message") or choice.get("delta") or {}).get("content") or "")
        elif api == "ollama":
            texts.append(part["message"]["content"])
        elif api == "anthropic":
            blocks = part.get("content") or [part.get("delta") or {}]
            texts += [block.get("text", "") for block in blocks]
        else:
            items = part.get("output") or ()
            texts += [item["content"][0]["text"] for item in items if item["type"] == "message"]
            texts.append(part["delta"] if part.get("type") == "response.output_text.delta" else "")
    return "".join(texts)


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("api", "path"),
    [
        ("chat", "/v1/chat/completions"),
        ("responses", "/v1/responses"),
        ("anthropic", "/v1/messages"),
        ("ollama", "/api/chat"),
    ],
)
def test_a_reply_cut_within_a_marker_shows_no_part_of_it(
    http: httpx.Client, api: str, path: str, stream: bool
) -> None:
    """The demo writes each marker in several tokens. `max_tokens` can end the reply after any of them."""
    body: dict[str, Any] = {**DRAFTED, "regex": re.escape(CALL), "temperature": 0, "tools": TOOLS}
    whole = http.post("/v1/chat/completions", json={**body, "messages": MESSAGES, "max_tokens": 99})
    length = whole.json()["usage"]["completion_tokens"]
    prompt = {"input": MESSAGES} if api == "responses" else {"messages": MESSAGES}
    for cut in (*range(1, 5), *range(length - 5, length)):
        limit = {"max_output_tokens" if api == "responses" else "max_tokens": cut}
        response = http.post(path, json={**body, **prompt, **limit, "stream": stream})
        assert response.status_code == 200, response.text
        assert visible_text(api, response) in ("", "<"), cut


SINGLE = {"type": "auto", "disable_parallel_tool_use": True}


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "prompt", "single"),
    [
        ("/v1/chat/completions", "messages", {"parallel_tool_calls": False}),
        ("/v1/responses", "input", {"parallel_tool_calls": False}),
        ("/v1/messages", "messages", {"tool_choice": SINGLE}),
        ("/api/chat", "messages", {"tool_choice": SINGLE, "options": {"temperature": 0}}),
    ],
)
def test_a_client_can_ask_for_a_single_call(
    http: httpx.Client, path: str, prompt: str, single: dict[str, Any], *, stream: bool
) -> None:
    body = {
        **DRAFTED,
        "regex": re.escape(f"{CALL}\n{CALL}"),
        "temperature": 0,
        "tools": TOOLS,
        "max_tokens": 150,
    }
    if path == "/v1/responses":
        body["max_output_tokens"] = body.pop("max_tokens")

    def calls(**changes: Any) -> int:
        reply = http.post(path, json={**body, prompt: MESSAGES, "stream": stream, **changes})
        assert reply.status_code == 200, reply.text
        # The Responses API also lists the tools in its reply, and repeats the whole reply in its last event.
        mark = r'"type": ?"function_call"' if path == "/v1/responses" else r'"name": ?"list_files"'
        return len(re.findall(mark, reply.text.rpartition("response.completed")[2]))

    assert calls(**single) == 1
    assert calls() == 2


@pytest.mark.parametrize("function_call", [{"name": "list_files"}, "auto", "none", None])
def test_the_older_form_of_tools(client: openai.OpenAI, function_call: Any) -> None:
    """LangChain 0.0 and AutoGen 0.2 send `functions`, and read `function_call` in the reply."""
    options: Any = {**OPTIONS, "functions": [TOOLS[0]["function"]], "messages": MESSAGES}
    del options["tools"]
    if function_call is not None:
        options["function_call"] = function_call
    choice = client.chat.completions.create(**options).choices[0]
    assert choice.message.tool_calls is None
    content = name = arguments = ""
    reasons = []
    for chunk in client.chat.completions.create(**{**options, "stream": True}):
        for part in chunk.choices:
            assert part.delta.tool_calls is None
            content += part.delta.content or ""
            reasons.append(part.finish_reason)
            if part.delta.function_call:
                name += part.delta.function_call.name or ""
                arguments += part.delta.function_call.arguments or ""
    if not isinstance(function_call, dict):
        assert choice.message.function_call is None
        assert (content, name) == (choice.message.content, "")
        return
    call = choice.message.function_call
    assert call is not None
    assert (choice.finish_reason, reasons[-1]) == ("function_call", "function_call")
    assert (call.name, call.arguments) == (name, arguments)
    assert name == "list_files"
    check_arguments(arguments)
    result = {"role": "function", "name": name, "content": "notes.txt"}
    called = choice.message.model_dump(exclude_none=True)
    answered: Any = {**options, "messages": [*MESSAGES, called, result], "function_call": "none"}
    final = client.chat.completions.create(**answered).choices[0]
    assert final.message.content
    assert final.message.function_call is None
