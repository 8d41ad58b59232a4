"""Anthropic's own client, unmodified, talks to the server and raises its exceptions for errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import pytest
from pydantic import BaseModel

import edgespec
from edgespec import Runtime
from edgespec.server.http_server import HttpServer
from edgespec.server.leniency.content import omitted_parts, result_text
from tests.server.conftest import MESSAGES, QUESTION, running
from tests.server.test_constraints import SCHEMA
from tests.server.test_tools import DRAFTED, QUOTING, check_arguments
from tests.server.test_tools import TOOLS as OPENAI_TOOLS

if TYPE_CHECKING:  # Tests import it when they run, because that takes three seconds in each test process.
    import anthropic

_FUNCTION = OPENAI_TOOLS[0]["function"]
TOOLS: Any = [
    {
        "name": _FUNCTION["name"],
        "description": _FUNCTION["description"],
        "input_schema": _FUNCTION["parameters"],
    }
]
WEB_SEARCH: Any = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
PNG: Any = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
}
HEADER = "x-anthropic-billing-header: cc_version=2.1; cch={};"


@pytest.fixture
def client(server: HttpServer) -> Iterator[anthropic.Anthropic]:
    """Anthropic's own client."""
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0, timeout=60) as client:
        yield client


def ask(client: anthropic.Anthropic, **options: Any) -> anthropic.types.Message:
    """Return the message of a reply, and check that the streamed message is the same."""
    options = {"model": "demo", "max_tokens": 48, "messages": MESSAGES, **options}
    whole: anthropic.types.Message = client.messages.create(**options)
    with client.messages.stream(**options) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(streamed.content)
    assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert prompt_tokens(streamed) == prompt_tokens(whole)
    assert [contents(block) for block in streamed.content] == [contents(block) for block in whole.content]
    return whole


def prompt_tokens(message: anthropic.types.Message) -> int:
    return message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def contents(block: Any) -> dict[str, Any]:
    """Return the fields of a block that do not change from reply to reply."""
    return {name: value for name, value in block.to_dict().items() if name not in ("id", "parsed_output")}


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_replies_equal_plain_decoding(
    client: anthropic.Anthropic, plain: Runtime, temperature: float
) -> None:
    expected = plain.reply(MESSAGES, max_tokens=48, temperature=temperature, seed=7)
    reply = ask(client, extra_body={"temperature": temperature, "seed": 7})
    assert text_of(reply) == expected.answer
    assert reply.usage.output_tokens == len(expected.tokens)
    assert reply.stop_reason == ("max_tokens" if expected.finish_reason == "length" else "end_turn")


@pytest.mark.long
@pytest.mark.parametrize("target", ["demo", pytest.param("demo-mlx", marks=pytest.mark.long)])
def test_drafted_trees_do_not_change_replies(target: str) -> None:
    import anthropic

    with edgespec.load(target, "none", method="none", context=512) as runtime:
        expected = [
            runtime.reply(MESSAGES, max_tokens=32, temperature=each, seed=7).answer for each in (0.0, 0.8)
        ]
    load: dict[str, Any] = {"context": 512, "method": "model", "draft_branches": (2, 2)}
    with (
        running(target=target, load_options=load) as server,
        anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client,
    ):
        for temperature, answer in zip((0.0, 0.8), expected, strict=True):
            settings = {"temperature": temperature, "seed": 7}
            reply = ask(client, model=target, max_tokens=32, extra_body=settings)
            assert text_of(reply) == answer


def test_events_come_in_anthropics_order(http: httpx.Client) -> None:
    body = {"messages": MESSAGES, "max_tokens": 8, "stream": True}
    with http.stream("POST", "/v1/messages", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert names == [event["type"] for event in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start, delta = events[0]["message"], events[-2]
    assert (start["content"], start["stop_reason"], delta["delta"]["stop_reason"]) == ([], None, "max_tokens")
    assert start["usage"]["input_tokens"] + start["usage"]["cache_read_input_tokens"] > 0
    assert delta["timings"]["predicted_n"] == delta["usage"]["output_tokens"] == 8
    assert delta["edgespec"]["drafters"] == "model"


def test_a_request_as_claude_code_sends_it(http: httpx.Client) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": "demo",
        "max_tokens": 32000,
        "stream": True,
        "system": [{"type": "text", "text": HEADER}, {"type": "text", "text": "You are an agent.", **cached}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION, **cached}]}],
        "tools": [{**TOOLS[0], "eager_input_streaming": True}],
        "metadata": {"user_id": "someone"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stop_sequences": ["."],
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219"}
    reply = http.post("/v1/messages?beta=true", json=body, headers=headers)
    assert reply.status_code == 200
    assert reply.text.endswith('event: message_stop\ndata: {"type": "message_stop"}\n\n')
    last = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")][-2]
    assert set(last["edgespec"]["ignored_fields"]) == {
        "context_management", "metadata", "output_config.effort", "system.1.cache_control",
        "messages.0.content.0.cache_control",
    }  # fmt: skip


def test_stop_sequences(client: anthropic.Anthropic) -> None:
    text = text_of(ask(client, max_tokens=16))
    word = text.split()[3]
    reply = ask(client, max_tokens=16, stop_sequences=["never written", word])
    assert text_of(reply) == text[: text.index(word)]
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", word)


@pytest.mark.long
def test_a_full_context_ends_the_reply(client: anthropic.Anthropic, endless: dict[str, Any]) -> None:
    # The question fills most of the context.
    question = {"role": "user", "content": f"{QUESTION} " * 90}
    options: Any = {"model": "demo", "messages": [question], "max_tokens": 5000}
    reply = client.messages.create(**options, extra_body={"logit_bias": endless["logit_bias"]})
    assert reply.stop_reason == "model_context_window_exceeded"


@pytest.mark.long
@pytest.mark.parametrize(
    "system",
    [
        "Be brief.\nUse words.",
        [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Use words."}],
        f"{HEADER}\nBe brief.\nUse words.",
        [{"type": "text", "text": text} for text in (HEADER.format("ab12"), "Be brief.", "Use words.")],
    ],
)
def test_system_prompts(client: anthropic.Anthropic, plain: Runtime, system: Any) -> None:
    messages = [{"role": "system", "content": "Be brief.\nUse words."}, *MESSAGES]
    expected = plain.reply(messages, max_tokens=16, temperature=0.0)
    reply = ask(client, max_tokens=16, system=system)
    assert text_of(reply) == expected.answer
    assert prompt_tokens(reply) == expected.stats.prompt_tokens


def test_a_changing_billing_header_keeps_the_prefix_cache(client: anthropic.Anthropic) -> None:
    def cached(header: str) -> int:
        system: Any = [{"type": "text", "text": text} for text in (header, "Answer like a pirate. " * 20)]
        reply = client.messages.create(model="demo", max_tokens=4, messages=MESSAGES, system=system)
        return reply.usage.cache_read_input_tokens or 0

    assert cached(HEADER.format("1aaaa")) < 100
    assert cached(HEADER.format("2bbbb")) > 100


def test_system_messages_within_the_conversation(client: anthropic.Anthropic, plain: Runtime) -> None:
    note = {"role": "system", "content": "The user is on a Mac."}
    messages: Any = [*MESSAGES, {"role": "assistant", "content": "With ls."}, note, *MESSAGES]
    expected = plain.reply(messages, max_tokens=16, temperature=0.0)
    assert text_of(ask(client, max_tokens=16, messages=messages)) == expected.answer
    assert text_of(ask(client, max_tokens=4, messages=[*MESSAGES, note]))


DOCUMENT = {"type": "text", "media_type": "text/plain", "data": "ls -S sorts by size."}
PARTS = [{"type": "text", "text": "ls -S"}, {"type": "text", "text": "sorts by size."}]


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "document", "source": DOCUMENT}, "ls -S sorts by size."),
        ({"type": "document", "source": DOCUMENT, "title": "Notes"}, "Notes\nls -S sorts by size."),
        (
            {"type": "document", "source": DOCUMENT, "title": "Notes", "context": "From a man page."},
            "Notes\nFrom a man page.\nls -S sorts by size.",
        ),
        ({"type": "document", "source": {"type": "content", "content": PARTS}}, "ls -S\nsorts by size."),
        (
            {"type": "search_result", "source": "http://a.b", "title": "Man", "content": PARTS},
            "Man\nhttp://a.b\nls -S\nsorts by size.",
        ),
        ({"type": "search_result", "title": "Man", "content": PARTS[0]}, "Man\nls -S"),
        (
            {"type": "search_result", "source": {"url": "http://a.b"}, "title": "Man", "content": PARTS[:1]},
            'Man\n{"url": "http://a.b"}\nls -S',
        ),
        (
            {
                "type": "search_result",
                "content": [*PARTS[:1], {"type": "text", "content": "lost?"}, {"type": "image"}],
            },
            'ls -S\n{"type": "text", "content": "lost?"}\n[image omitted: text only]',
        ),
    ],
)
@pytest.mark.parametrize("is_result", [False, True])
def test_documents_are_read_as_text(
    http: httpx.Client, block: dict[str, Any], text: str, is_result: bool
) -> None:
    """Documents can be in messages of the user and in results of tools."""

    def count(content: Any) -> Any:
        called = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "a", "content": content}
        talk = [*MESSAGES, {"role": "assistant", "content": [called]}, {"role": "user", "content": [result]}]
        messages = talk if is_result else [{"role": "user", "content": content}]
        reply = http.post("/v1/messages/count_tokens", json={"messages": messages})
        assert reply.status_code == 200, reply.text
        return reply.json()["input_tokens"]

    assert count([block]) == count([{"type": "text", "text": text}])


@pytest.mark.parametrize(
    "content", [[], {"type": "web_search_tool_result_error", "error_code": "unavailable"}]
)
def test_results_of_tools_of_anthropics_servers_are_skipped(http: httpx.Client, content: Any) -> None:
    result = {"type": "web_search_tool_result", "tool_use_id": "a", "content": content}
    reply = {"role": "assistant", "content": [result, {"type": "text", "text": "With ls."}]}
    body = {"max_tokens": 2, "messages": [*MESSAGES, reply, *MESSAGES]}
    answer = http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["edgespec"]["ignored_fields"] == ["messages.1.content.0"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (
            [
                {
                    "type": "web_search_result",
                    "title": "Man",
                    "url": "http://a.b",
                    "encrypted_content": "x" * 99,
                }
            ],
            '{"type": "web_search_result", "title": "Man", "url": "http://a.b"}',
        ),
        (
            [{"type": "resource", "resource": {"uri": "f", "text": "ls -S", "blob": "x" * 99}}, *PARTS],
            '{"type": "resource", "resource": {"uri": "f", "text": "ls -S"}}\nls -S\nsorts by size.',
        ),
        (
            [{"type": "document", "source": {"type": "content", "content": [*PARTS, {"type": "image"}]}}],
            "ls -S\nsorts by size.\n[image omitted: text only]",
        ),
        (
            [{"type": "image", "source": {"data": "x"}}, *PARTS],
            "[image omitted: text only]\nls -S\nsorts by size.",
        ),
    ],
)
def test_tool_results_keep_all_texts(content: Any, text: str) -> None:
    assert result_text("messages.0.content", content) == text
    assert omitted_parts("at", content) == (["at.0"] if "omitted" in text else [])


def test_other_documents_are_refused(http: httpx.Client) -> None:
    source = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
    messages = [{"role": "user", "content": [{"type": "document", "source": source}]}]
    reply = http.post("/v1/messages", json={"max_tokens": 2, "messages": messages})
    assert reply.status_code == 400
    assert "messages.0.content.0" in reply.json()["error"]["message"]


def test_a_last_assistant_message_is_continued(client: anthropic.Anthropic) -> None:
    text = text_of(ask(client, max_tokens=16))
    start = " ".join(text.split(" ")[:2])
    rest = text_of(ask(client, max_tokens=8, messages=[*MESSAGES, {"role": "assistant", "content": start}]))
    assert text.startswith(start + rest[:10])


def test_reasoning_becomes_a_block(client: anthropic.Anthropic, plain: Runtime) -> None:
    # The demo model does not reason by itself.
    begun: Any = {"reply_start": "<think>", "max_tokens": 16, "temperature": 0.0}
    expected = plain.stream_messages(MESSAGES, **begun).wait().reasoning
    assert expected
    messages: Any = [*MESSAGES, {"role": "assistant", "content": "<think>"}]
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    reply = ask(client, max_tokens=16, messages=messages, thinking=thinking)
    (block,) = reply.content
    assert block.type == "thinking"
    assert (block.thinking, bool(block.signature)) == (expected, True)
    # The block can be sent back.
    answered: Any = [*MESSAGES, {"role": "assistant", "content": reply.content}, *MESSAGES]
    assert (
        ask(client, max_tokens=4, messages=answered, thinking={"type": "adaptive"}).usage.output_tokens == 4
    )


@pytest.mark.long
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "list_files"}])
def test_required_tool_calls(client: anthropic.Anthropic, choice: Any) -> None:
    options: Any = {"max_tokens": 120, "tools": [WEB_SEARCH, *TOOLS]}
    reply = ask(client, tool_choice=choice, **options)
    assert reply.stop_reason == "tool_use"
    (call,) = reply.content
    assert call.type == "tool_use"
    assert call.name == "list_files"
    check_arguments(json.dumps(call.input))
    assert reply.edgespec["ignored_fields"] == ["tools.0"]  # type: ignore[attr-defined]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "a.txt"}]}
    messages: Any = [
        *MESSAGES,
        {"role": "assistant", "content": reply.content},
        {"role": "user", "content": [result, {"type": "text", "text": "Thanks."}]},
    ]
    final = ask(client, messages=messages, tool_choice={"type": "none"}, **options)
    assert {block.type for block in final.content} == {"text"}


@pytest.mark.long
def test_tool_results_reach_the_model(client: anthropic.Anthropic, plain: Runtime) -> None:
    arguments = {"folder": "home", "hidden": True}
    function = {"name": "list_files", "arguments": json.dumps(arguments)}
    expected = plain.reply(
        [
            *MESSAGES,
            {"role": "assistant", "content": "I look.", "tool_calls": [{"id": "a", "function": function}]},
            {"role": "tool", "tool_call_id": "a", "content": "notes.txt"},
        ],
        tools=OPENAI_TOOLS,
        max_tokens=24,
        temperature=0.0,
    )
    call = {"type": "tool_use", "id": "a", "name": "list_files", "input": arguments}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "notes.txt"}
    messages: Any = [
        *MESSAGES,
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]},
        {"role": "user", "content": [result]},
    ]
    reply = ask(client, messages=messages, tools=TOOLS, max_tokens=24)
    assert prompt_tokens(reply) == expected.stats.prompt_tokens
    assert text_of(reply) == expected.answer


@pytest.mark.long
def test_the_clients_tool_runner(client: anthropic.Anthropic) -> None:
    """The runner asks the server to store the conversation, and resends it if the server does not."""
    import anthropic

    @anthropic.beta_tool
    def list_files(folder: str) -> str:
        """List the files in a folder."""
        folders.append(folder)
        return "notes.txt"

    folders: list[str] = []
    runner = client.beta.messages.tool_runner(
        model="demo",
        max_tokens=200,
        messages=MESSAGES,
        tools=[list_files],
        tool_choice={"type": "any"},
        max_iterations=3,
    )
    messages = list(runner)
    assert [message.stop_reason for message in messages] == ["tool_use"] * 3
    assert len(folders) >= 2
    # Each turn sees the calls and results before it.
    sizes = [prompt_tokens(message) for message in messages]  # type: ignore[arg-type]
    assert sizes == sorted(set(sizes))


@pytest.mark.long
def test_a_call_between_texts(client: anthropic.Anthropic) -> None:
    reply = ask(client, messages=[QUOTING], tools=TOOLS, max_tokens=200, extra_body=DRAFTED)
    before, call, after = (block.to_dict() for block in reply.content)
    assert (before["text"], call["input"], after["text"]) == ("I look.", {"folder": "home"}, "Then I sort.")
    assert reply.stop_reason == "tool_use"
    # The conversation goes on after this message.
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "notes.txt"}
    messages: Any = [
        QUOTING,
        {"role": "assistant", "content": reply.content},
        {"role": "user", "content": [result]},
    ]
    next_reply = ask(client, messages=messages, tools=TOOLS, max_tokens=4)
    assert (next_reply.usage.cache_read_input_tokens or 0) > 0
    assert prompt_tokens(next_reply) > prompt_tokens(reply)


def test_a_call_that_the_reply_ended_within_is_left_out(client: anthropic.Anthropic) -> None:
    options: Any = {"model": "demo", "max_tokens": 20, "messages": MESSAGES, "tools": TOOLS}
    reply = client.messages.create(tool_choice={"type": "any"}, **options)
    assert (reply.content, reply.stop_reason) == ([], "max_tokens")


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_json_schemas(client: anthropic.Anthropic, plain: Runtime, temperature: float) -> None:
    output: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    expected = plain.reply(MESSAGES, schema=SCHEMA, max_tokens=100, temperature=temperature, seed=5).answer
    settings = {"temperature": temperature, "seed": 5}
    assert text_of(ask(client, max_tokens=100, output_config=output, extra_body=settings)) == expected
    jsonschema.validate(json.loads(expected), SCHEMA)


class Folder(BaseModel):
    """A folder."""

    hidden: bool


def test_the_clients_parse_helper(client: anthropic.Anthropic) -> None:
    reply = client.messages.parse(model="demo", max_tokens=200, messages=MESSAGES, output_format=Folder)
    assert isinstance(reply.parsed_output, Folder)


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    prompts: list[dict[str, Any]] = [
        {},
        {"system": [{"type": "text", "text": f"{HEADER}\nBe brief."}]},
        {"tools": TOOLS, "thinking": {"type": "disabled"}},
    ]
    for prompt in prompts:
        counted = client.messages.count_tokens(model="demo", messages=MESSAGES, **prompt)
        assert counted.input_tokens == prompt_tokens(ask(client, max_tokens=1, **prompt))
    long: Any = [{"role": "user", "content": "word " * 1500}]
    assert client.messages.count_tokens(model="demo", messages=long).input_tokens > 1500
    begun: Any = [*MESSAGES, {"role": "assistant", "content": "With"}]
    shorter = client.messages.count_tokens(model="demo", messages=MESSAGES).input_tokens
    assert client.messages.count_tokens(model="demo", messages=begun).input_tokens > shorter


def test_models(client: anthropic.Anthropic) -> None:
    models = client.models.list(limit=1000)
    assert not models.has_next_page()
    demo = next(model for model in models if model.id == "demo")
    assert (demo.type, demo.display_name) == ("model", "demo")
    assert demo.created_at.year >= 2024
    assert client.models.retrieve("demo") == demo


@pytest.mark.long
def test_api_keys() -> None:
    import anthropic

    options: Any = {"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": QUESTION}]}
    with running(api_key="secret") as server:
        keys: list[dict[str, Any]] = [{"api_key": "secret"}, {"auth_token": "secret"}]
        for key in keys:
            with anthropic.Anthropic(base_url=server.url, max_retries=0, **key) as client:
                assert client.messages.create(**options).usage.output_tokens == 2
        with (
            anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as client,
            pytest.raises(anthropic.AuthenticationError) as error,
        ):
            client.messages.create(**options)
    assert error.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


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
