"""Tool calls of the demo model, which was not trained for them. Prompts describe the tools.

Grammars enforce the calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

import edgespec
from edgespec import Reply, RequestQueue, Runtime, ToolCall
from edgespec.api.loading import always_draft
from edgespec.chat.tool_calls.calls import collect_calls
from edgespec.errors import OptionError
from tests.api.questions import HOWTO
from tests.cases import covering, first
from tests.forced import Begin
from tests.raising import raises

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"enum": ["/tmp", "/home", "/var/log"]},
        "depth": {"type": "integer", "minimum": 0, "maximum": 9},
        "hidden": {"type": "boolean"},
    },
    "required": ["path", "depth", "hidden"],
}
FUNCTION = {"name": "list_files", "parameters": PARAMETERS}
LIST_FILES: dict[str, Any] = {"type": "function", "function": FUNCTION}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now", "description": "The current time"}}
TOOLS = (LIST_FILES, NOW)
NAMED = {"type": "function", "function": {"name": "list_files"}}
MESSAGES: tuple[dict[str, Any], ...] = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": HOWTO},
)


# The small MLX model is five times as fast as the large one, which the tree tests below use.
@pytest.fixture(scope="module", params=["demo", "demo-mlx-draft"])
def runtime(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    if request.param == "demo-mlx-draft":
        pytest.importorskip("mlx.core")
    with always_draft(), edgespec.load(request.param, "demo-draft") as runtime:
        yield runtime


# Parsing a reply's text does not depend on the backend.
ON_ONE_BACKEND = pytest.mark.parametrize("runtime", first(["demo", "demo-mlx-draft"]), indirect=True)


@pytest.mark.long
@pytest.mark.parametrize("temperature", first([0.8, 0.0]))
def test_required_calls_are_valid_and_the_same_with_every_method(
    runtime: Runtime, temperature: float
) -> None:
    options: dict[str, Any] = {"seed": 5, "temperature": temperature, "tools": TOOLS, "tool_choice": NAMED}
    plain = runtime.reply(MESSAGES, method="none", **options)
    assert plain.finish_reason == "stop"
    assert plain.answer == ""
    (call,) = plain.tool_calls
    assert call.name == "list_files"
    jsonschema.validate(json.loads(call.arguments), PARAMETERS)
    drafts = (("model", None), ("model", 3), ("grammar", None), ("suffix", 3), ("auto", None))
    for method, draft_length in drafts:
        reply = runtime.reply(MESSAGES, method=method, draft_length=draft_length, **options)
        assert reply.tokens == plain.tokens
        assert [(each.name, each.arguments) for each in reply.tool_calls] == [(call.name, call.arguments)]


ANSWER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"command": {"type": "string", "maxLength": 12}, "safe": {"type": "boolean"}},
    "required": ["command", "safe"],
    "additionalProperties": False,
}


@pytest.mark.long
@pytest.mark.parametrize("start", ["<", "{"])
def test_calls_or_answers_are_the_same_with_every_method(runtime: Runtime, start: str) -> None:
    """With tools and a schema, the first token decides whether a reply is calls or an answer."""
    tokens = runtime.vocabulary.tokenize(start, special=False, start=False)

    def reply(method: str, draft_length: int | None = None) -> Reply:
        options: dict[str, Any] = {"seed": 5, "temperature": 0.8, "max_tokens": 60, "schema": ANSWER_SCHEMA}
        options |= {"method": method, "draft_length": draft_length}
        return runtime.reply(MESSAGES, tools=TOOLS, processors=[Begin(tokens)], **options)

    plain = reply("none")
    if start == "<":
        assert plain.tool_calls
        assert plain.answer == ""
    else:
        assert not plain.tool_calls
        jsonschema.validate(json.loads(plain.answer), ANSWER_SCHEMA)
    drafts = (("model", None), ("model", 3), ("grammar", None), ("model+grammar", 4), ("auto", None))
    for method, draft_length in drafts:
        assert reply(method, draft_length).tokens == plain.tokens


@ON_ONE_BACKEND
def test_a_started_answer_continues_with_tools(runtime: Runtime) -> None:
    options: dict[str, Any] = {"tools": TOOLS, "schema": ANSWER_SCHEMA, "seed": 1, "max_tokens": 60}
    begun = '{"command": "ls'
    answer = runtime.stream_messages(MESSAGES, reply_start=begun, **options).wait()
    jsonschema.validate(json.loads(begun + answer.text), ANSWER_SCHEMA)
    with raises(OptionError, "'Sure'", "constraint", code="constraint_violated"):
        runtime.stream_messages(MESSAGES, reply_start="Sure", **options)


@pytest.mark.long
@pytest.mark.parametrize("temperature", first([0.8, 0.0]))
@pytest.mark.parametrize(
    ("target", "draft"),
    [("demo", "demo-draft"), pytest.param("demo-mlx", "demo-mlx-draft", marks=pytest.mark.long)],
)
def test_trees_give_the_calls_of_plain_decoding(target: str, draft: str, temperature: float) -> None:
    if target == "demo-mlx":
        pytest.importorskip("mlx.core")
    with edgespec.load(target, draft, draft_branches=(3, 2), method="model", context=1024) as trees:
        options: dict[str, Any] = {"tools": TOOLS, "tool_choice": NAMED}
        options |= {"seed": 5, "temperature": temperature}
        plain = trees.reply(MESSAGES, method="none", **options)
        reply = trees.reply(MESSAGES, **options)
        assert reply.stats.drafted_tokens
        assert reply.tokens == plain.tokens
        assert [c.arguments for c in reply.tool_calls] == [c.arguments for c in plain.tool_calls]


@pytest.mark.parametrize("choice", first(["required", NAMED]))
def test_calls_stream(runtime: Runtime, choice: Any) -> None:
    stream = runtime.stream_messages(MESSAGES, tools=TOOLS, tool_choice=choice, seed=2)
    chunks = list(stream)
    reply = stream.reply
    deltas = [chunk.tool_call for chunk in chunks if chunk.tool_call]
    assert collect_calls(deltas) == reply.tool_calls
    assert [bool(delta.id) for delta in deltas] == [True, *[False] * (len(deltas) - 1)]
    assert "".join(chunk.text for chunk in chunks) == reply.answer == ""
    assert "".join(chunk.raw_text for chunk in chunks) == reply.text
    assert sum(chunk.token_count for chunk in chunks) == len(reply.tokens)
    assert reply.to_json()["tool_calls"] == [reply.tool_calls[0].to_json()]


@pytest.mark.long
def test_a_conversation_with_results(runtime: Runtime) -> None:
    first = runtime.reply(MESSAGES, tools=TOOLS, tool_choice="required", seed=3)
    (call,) = first.tool_calls
    messages: list[dict[str, Any]] = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call.to_json()]},
        {"role": "tool", "tool_call_id": call.id, "content": "a.txt\nb.txt"},
    ]
    second = runtime.reply(messages, tools=TOOLS, seed=3, max_tokens=20)
    assert second.tokens
    # The call in the prompt consists of the tokens that the model generated, so its KV cache can be reused.
    assert second.stats.cached_prompt_tokens >= first.stats.prompt_tokens
    again = runtime.reply(messages, tools=TOOLS, seed=3, max_tokens=20, method="none")
    assert again.tokens == second.tokens


@ON_ONE_BACKEND
def test_ids_differ_between_replies(runtime: Runtime) -> None:
    replies = [runtime.reply(MESSAGES, tools=TOOLS, tool_choice="required", seed=1) for _ in range(2)]
    ids = [reply.tool_calls[0].id for reply in replies]
    assert replies[0].tokens == replies[1].tokens
    assert len(set(ids)) == 2
    assert all(each.startswith("call_") for each in ids)


def forced(runtime: Runtime, text: str) -> dict[str, Any]:
    """Return options that make the reply begin with a text."""
    tokens = runtime.vocabulary.tokenize(text, special=False, start=False)
    return {"processors": [Begin(tokens)], "max_tokens": len(tokens), "method": "none", "temperature": 0.0}


CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'


@ON_ONE_BACKEND
def test_text_around_calls_is_the_answer(runtime: Runtime) -> None:
    reply = runtime.reply(MESSAGES, tools=TOOLS, **forced(runtime, f"I will look.\n{CALL}\n{CALL}"))
    assert reply.answer.strip() == "I will look."
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("now", '{"zone": "UTC"}')] * 2


LISTED = '[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]'


@ON_ONE_BACKEND
@pytest.mark.parametrize(
    ("method", "text"),
    covering(
        ["none", "suffix", "model"],
        [f"{CALL}\n{CALL}", f"{CALL} Here it is.", f"<tool_call>\n{LISTED}\n</tool_call>"],
    ),
)
def test_a_reply_with_a_single_call_ends_after_it(runtime: Runtime, method: str, text: str) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    options = {**forced(runtime, f"I will look.\n{text}"), "method": method}
    stream = runtime.stream_messages(MESSAGES, tools=TOOLS, tool_choice=choice, **options)
    chunks = list(stream)
    deltas = [chunk.tool_call for chunk in chunks if chunk.tool_call]
    assert stream.reply.tool_calls == collect_calls(deltas)
    assert [call.name for call in stream.reply.tool_calls] == ["now"]
    assert stream.reply.answer.strip() == "I will look."
    assert "".join(chunk.text for chunk in chunks).strip() == "I will look."
    if text != f"<tool_call>\n{LISTED}\n</tool_call>":
        assert stream.reply.finish_reason == "stop"
        assert stream.reply.stop_string == ""


@ON_ONE_BACKEND
@pytest.mark.parametrize("options", [{}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": ()}])
def test_without_tools_there_are_no_calls(runtime: Runtime, options: dict[str, Any]) -> None:
    reply = runtime.reply(MESSAGES, **options, **forced(runtime, CALL))
    assert reply.tool_calls == ()
    assert reply.answer == reply.text
    assert CALL in reply.text


@ON_ONE_BACKEND
def test_calls_within_the_reasoning_are_no_calls(runtime: Runtime) -> None:
    text = f"<think>\n{CALL}\n</think>\n\nDone. {CALL}"
    reply = runtime.reply(MESSAGES, tools=TOOLS, **forced(runtime, text))
    assert reply.reasoning == CALL
    assert len(reply.tool_calls) == 1
    assert reply.answer.strip() == "Done."


@ON_ONE_BACKEND
def test_a_stop_string_does_not_cut_a_call(runtime: Runtime) -> None:
    options = forced(runtime, CALL)
    reply = runtime.reply(MESSAGES, tools=TOOLS, stop="UTC", **options)
    assert [call.arguments for call in reply.tool_calls] == ['{"zone": "UTC"}']
    assert reply.stop_string == ""


@pytest.mark.long
def test_strict_tools_constrain_calls_but_not_text(runtime: Runtime) -> None:
    strict = {"type": "function", "function": {**LIST_FILES["function"], "strict": True}}
    plain = runtime.reply(MESSAGES, tools=[LIST_FILES], seed=4, temperature=0.8, max_tokens=12)
    reply = runtime.reply(MESSAGES, tools=[strict], seed=4, temperature=0.8, max_tokens=12)
    assert reply.answer.startswith(plain.answer[:5])
    opening = forced(runtime, "<tool_call>")
    for seed in range(3):
        options = {**opening, "processors": [Begin(opening["processors"][0]._tokens)]}
        options |= {"max_tokens": 120, "temperature": 0.8, "method": "auto"}
        reply = runtime.reply(MESSAGES, tools=[strict], seed=seed, **options)
        jsonschema.validate(json.loads(reply.tool_calls[0].arguments), PARAMETERS)


@ON_ONE_BACKEND
def test_a_queue_takes_tools(runtime: Runtime) -> None:
    with RequestQueue(runtime) as queue:
        reply = queue.stream_messages(MESSAGES, tools=TOOLS, tool_choice=NAMED).wait()
        assert [call.name for call in reply.tool_calls] == ["list_files"]
        with raises(OptionError, "unknown tool", code="tools_invalid"):
            queue.stream_messages(MESSAGES, tools=[NOW], tool_choice=NAMED)


@ON_ONE_BACKEND
def test_tools_count_as_prompt_tokens(runtime: Runtime) -> None:
    without, counted = runtime.count_tokens(MESSAGES), runtime.count_tokens(MESSAGES, tools=TOOLS)
    assert counted > without + 50
    assert runtime.stream_messages(MESSAGES, tools=TOOLS).prompt_tokens == counted
    assert runtime.count_tokens(MESSAGES, tools=TOOLS, tool_choice="none") == without


@ON_ONE_BACKEND
@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ({"tools": {"type": "function"}}, "tools_invalid", "dict"),
        ({"tools": [{"type": "web_search"}]}, "tools_invalid", "function"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools_invalid", "tool 1"),
        ({"tools": [NOW, NOW]}, "tools_invalid", "now"),
        ({"tools": [], "tool_choice": "required"}, "tools_invalid", "no tools"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tools_invalid", "'sometimes'"),
        ({"tools": TOOLS, "tool_choice": "required", "regex": "a"}, "option_conflict", "regex"),
        ({"thinking": "maybe"}, "option_invalid", "auto, on, off"),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"$ref": "x"}}}], "tool_choice": "required"},
            "constraint_not_supported",
            "f cannot",
        ),
    ],
)
def test_invalid_tools_are_refused(
    runtime: Runtime, options: dict[str, Any], code: str, message: str
) -> None:
    with raises(OptionError, message, code=code):
        runtime.stream_messages(MESSAGES, **options)


@ON_ONE_BACKEND
@pytest.mark.parametrize(
    ("last", "message"),
    [
        ({"role": "assistant", "content": "x"}, "assistant"),
        ({"role": "tool", "content": None}, "message 3"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "tool_call_id"),
        ({"role": "assistant", "tool_calls": "x"}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "invalid tool"),
    ],
)
def test_invalid_messages_are_refused(runtime: Runtime, last: dict[str, Any], message: str) -> None:
    with raises(OptionError, message, code="messages_invalid"):
        runtime.reply([*MESSAGES, last], tools=TOOLS)


@ON_ONE_BACKEND
def test_reasoning_content_is_accepted(runtime: Runtime) -> None:
    reply = [{"role": "assistant", "content": "Hi", key: "hm"} for key in ("reasoning", "reasoning_content")]
    counts = {runtime.count_tokens([MESSAGES[1], each, MESSAGES[1]]) for each in reply}
    assert len(counts) == 1


def test_calls_are_public() -> None:
    assert ToolCall("a", "b", "{}").to_json()["function"] == {"name": "b", "arguments": "{}"}


@pytest.mark.long
@ON_ONE_BACKEND
def test_parts_of_calls_and_text_stream_in_order(runtime: Runtime) -> None:
    text = (
        'I look.\n<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>\nThen I sort them.'
    )
    # The prompt contains the reply, so drafts extend beyond the call into the following text.
    messages = [{"role": "user", "content": f"Repeat: {text}"}]
    options: dict[str, Any] = {"regex": re.escape(text), "temperature": 0.0, "tools": TOOLS}
    # Without the bias, the reply could consist of calls alone.
    [marker_start] = runtime.vocabulary.tokenize("<", special=False, start=False)
    options["logit_bias"] = {marker_start: -100.0}

    def order(**method: Any) -> str:
        chunks = runtime.stream_messages(messages, **method, **options)
        return "".join(chunk.tool_call.arguments if chunk.tool_call else chunk.text for chunk in chunks)

    plain = order(method="none")
    assert plain == 'I look.{"zone": "UTC"}Then I sort them.'
    for draft_length in range(8, 16):
        assert order(method="ngram", draft_length=draft_length) == plain
