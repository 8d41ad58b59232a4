"""Client behaviour that differs from the APIs' documentation, and how the server handles it.

Each table has one row for each difference. The rules are in `edgespec/server/leniency`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter, ValidationError

from edgespec.errors import OptionError
from edgespec.server.anthropic import AnthropicMessageRequest
from edgespec.server.errors import ApiError
from edgespec.server.fields import reply_options
from edgespec.server.http_server import HttpServer
from edgespec.server.leniency.body import parse_body
from edgespec.server.leniency.paths import canonical_path
from edgespec.server.ollama.replies import OllamaChatRequest, OllamaGenerateRequest
from edgespec.server.openai.chat import ChatRequest
from edgespec.server.openai.completions import CompletionRequest
from edgespec.server.openai.responses import ResponsesRequest
from edgespec.server.security import is_origin, origins_regex
from edgespec.server.settings import ServerSettings
from tests.cases import covering
from tests.server.conftest import MESSAGES, QUESTION, running

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ANTHROPIC, OLLAMA, GENERATE = "/v1/messages", "/api/chat", "/api/generate"
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 4},
    COMPLETIONS: {"prompt": "x", "max_tokens": 4},
    RESPONSES: {"input": QUESTION, "max_output_tokens": 4},
    ANTHROPIC: {"messages": MESSAGES, "max_tokens": 4},
    OLLAMA: {"messages": MESSAGES, "stream": False, "options": {"num_predict": 4}},
    GENERATE: {"prompt": "x", "stream": False, "options": {"num_predict": 4}},
}
ALL = tuple(PROMPTS)
REQUESTS: dict[str, Any] = {
    CHAT: ChatRequest,
    COMPLETIONS: CompletionRequest,
    RESPONSES: ResponsesRequest,
    ANTHROPIC: AnthropicMessageRequest,
    OLLAMA: OllamaChatRequest,
    GENERATE: OllamaGenerateRequest,
}
PART = {"type": "text", "text": "x"}


def post(http: httpx.Client, path: str, more: dict[str, Any]) -> httpx.Response:
    return http.post(path, json=PROMPTS[path] | more)


def ignored(reply: httpx.Response) -> list[str]:
    """Return the ignored fields listed in a response, wherever its API puts them."""
    assert reply.status_code == 200, reply.text
    listed = re.search(r'"ignored_fields": (\[.*?\])', reply.text)
    assert listed
    return list(json.loads(listed[1]))


# Values that other languages and servers send, and their meanings.


@pytest.mark.parametrize("path", ALL)
def test_values_of_reply_options(path: str) -> None:
    for given, meant in (
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 40.0}, {"top_k": 40}),
        ({"top_k": -1.0}, {"top_k": 0}),
        ({"seed": 7.0}, {"seed": 7}),
        ({"seed": -1}, {}),
        ({"penalty_window": 64.0}, {"penalty_window": 64}),
        ({"logit_bias": []}, {"logit_bias": {}}),
        ({"logit_bias": [[5, -100], [7, False]]}, {"logit_bias": {5: -100, 7: -math.inf}}),
        ({"stop": ""}, {}),
        ({"stop": {}}, {"stop": ()}),
        ({"stop": ["", "e"]}, {"stop": ("e",)}),
        ({"stop_strings": ["e"]}, {"stop": ("e",)}),
        ({"stopping_strings": ["e"]}, {"stop": ("e",)}),
        ({"stopSequences": ["e"]}, {"stop": ("e",)}),
        ({"min_tokens": -1}, {"min_tokens": 0}),
        ({"random_seed": 7}, {"seed": 7}),
        ({"seed": "7"}, {"seed": 7}),
        ({"seed": "-1"}, {}),
        (
            {"temperature": "0.5", "top_p": " 0.9", "top_k": "40.0"},
            {"temperature": 0.5, "top_p": 0.9, "top_k": 40},
        ),
        ({"min_p": ""}, {}),
        ({"ignore_eos": "false"}, {}),
        ({"logit_bias": {"5": "-100", "7": "-1e2"}}, {"logit_bias": {5: -100, 7: -100}}),
        ({"stop": [None, "e"]}, {"stop": ("e",)}),
    ):
        data = json.dumps(PROMPTS[path] | given)
        read = reply_options(REQUESTS[path].model_validate_json(data))
        read.pop("max_tokens", None)
        assert read == meant, given
        assert {name: type(read[name]) for name in read} == {name: type(meant[name]) for name in meant}, given


def test_only_the_invalid_token_is_reported() -> None:
    data = json.dumps(PROMPTS[CHAT] | {"logit_bias": {"1": 5, "x": 1}})
    with pytest.raises(ValidationError, match="'x'"):
        REQUESTS[CHAT].model_validate_json(data)


@pytest.mark.parametrize("path", ALL)
def test_values_reach_the_reply(http: httpx.Client, path: str) -> None:
    given = {"temperature": "1", "random_seed": 7.0, "top_k": "40", "stop_sequences": ["", "e"]}
    meant = {"temperature": 1.0, "seed": 7, "top_k": 40, "stop": "e"}
    biases: Any = [[105, -100], [111, False]], {"105": -100, "111": -100}
    replies = [
        post(http, path, more | {"logit_bias": bias}).json()
        for more, bias in zip((given, meant), biases, strict=True)
    ]
    texts = [re.findall(r'"(?:content|text|response)": "(.*?)"', json.dumps(each)) for each in replies]
    assert texts[0] == texts[1]
    assert texts[0], replies


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"max_tokens": 4.0}),
        (CHAT, {"max_completion_tokens": 4.0}),
        (CHAT, {"n": 1.0}),
        (CHAT, {"n": "1", "stream": "false", "logprobs": "true", "top_logprobs": "2"}),
        (CHAT, {"max_completion_tokens": "4"}),
        (COMPLETIONS, {"echo": "True", "logprobs": "2"}),
        (ANTHROPIC, {"max_tokens": "4"}),
        (OLLAMA, {"think": "false", "options": {"num_predict": "4", "num_ctx": "2048", "temperature": "0"}}),
        (GENERATE, {"raw": "true"}),
        (CHAT, {"logprobs": True, "top_logprobs": 2.0}),
        (CHAT, {"logprobs": False, "top_logprobs": 0}),
        (CHAT, {"response_format": []}),
        (CHAT, {"response_format": {}}),
        (CHAT, {"stream_options": []}),
        (CHAT, {"reasoning": []}),
        (CHAT, {"chat_template_kwargs": []}),
        (CHAT, {"tools": {}}),
        (CHAT, {"structured_outputs": []}),
        (COMPLETIONS, {"max_tokens": 1e1}),
        (COMPLETIONS, {"best_of": 1.0}),
        (RESPONSES, {"max_output_tokens": 4.0}),
        (RESPONSES, {"max_output_tokens": -1, "max_tokens": 4}),
        (RESPONSES, {"text": []}),
        (RESPONSES, {"include": {}}),
        (ANTHROPIC, {"max_tokens": 4.0}),
        (ANTHROPIC, {"thinking": []}),
        (ANTHROPIC, {"tool_choice": []}),
        (ANTHROPIC, {"output_config": {}}),
        (ANTHROPIC, {"stop_sequences": {}}),
        (OLLAMA, {"options": {"num_predict": 4.0, "num_ctx": 2048.0, "repeat_last_n": 64.0, "top_k": -1}}),
        (OLLAMA, {"options": [], "max_tokens": 4}),
        (OLLAMA, {"options": {"num_predict": -2}, "max_tokens": 4}),
        (OLLAMA, {"format": []}),
        (GENERATE, {"context": {}, "images": {}}),
        (CHAT, {"functions": [], "function_call": "", "prompt": "", "input": ""}),
        (CHAT, {"stop": [""], "input": []}),
        (COMPLETIONS, {"suffix": "", "messages": []}),
        (RESPONSES, {"conversation": {}, "previous_response_id": "", "prompt": {}}),
        (ANTHROPIC, {"mcp_servers": [], "container": "", "stop_sequences": [""]}),
        (OLLAMA, {"prompt": "", "options": {"stop": [""]}}),
        (GENERATE, {"messages": [], "tools": []}),
        ("/v1/embeddings", {"input": "x", "dimensions": 4.0}),
    ],
    ids=str,
)
def test_values_that_are_accepted(http: httpx.Client, path: str, more: dict[str, Any]) -> None:
    reply = http.post(path, json=PROMPTS.get(path, {}) | more)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    "message",
    [
        {"role": "human", "content": QUESTION},
        {"role": "User", "content": QUESTION},
        {"role": "user", "content": [QUESTION]},
        {"role": "user", "content": {"type": "text", "text": QUESTION}},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [CHAT, ANTHROPIC, OLLAMA, RESPONSES])
def test_messages_of_other_libraries(http: httpx.Client, path: str, message: dict[str, Any]) -> None:
    def prompt_and_reply(first: dict[str, Any]) -> list[str]:
        messages = [first, {"role": "ai", "content": "Use ls."}, MESSAGES[0]]
        if first == MESSAGES[0]:
            messages[1]["role"] = "assistant"
        reply = post(http, path, {"input" if path == RESPONSES else "messages": messages})
        assert reply.status_code == 200, reply.text
        assert not ignored(reply)
        return re.findall(r'"(?:content|text)": "(.*?)"', reply.text)

    assert prompt_and_reply(message) == prompt_and_reply(MESSAGES[0])


@pytest.mark.parametrize("path", [CHAT, OLLAMA])
@pytest.mark.parametrize("result", [3, True, {"type": "circle"}])
def test_results_of_tools_can_be_any_json(http: httpx.Client, path: str, result: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": result},
    ]
    assert post(http, path, {"messages": messages}).status_code == 200


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("/v1/audio/speech", "only text"),
        ("/rerank", "/v1/embeddings"),
        ("/completion", "use /v1/completions"),
        ("/v1/responses/resp_1", "store responses"),
        ("/v1/messages/batches", "not support batches"),
        ("/api/v1/chat", "LM Studio"),
        ("/tokenize", "/v1/messages/count_tokens"),
        ("/completions/other", "base URL"),
    ],
)
def test_errors_name_what_replaces_endpoints_of_other_servers(
    http: httpx.Client, path: str, advice: str
) -> None:
    reply = http.post(path, json={})
    assert reply.status_code == 404
    assert f"there is nothing at {path}; " in reply.text
    assert advice in reply.text


@pytest.mark.parametrize(
    ("path", "more", "message"),
    [
        (CHAT, {"top_k": 2.5}, "not 2.5"),
        (CHAT, {"top_k": -2}, "top_k"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, {"logit_bias": False}, '{"1523": -2.5}'),
        (CHAT, {"logit_bias": [["Hello", -1]]}, '{"1523": -2.5}'),
        (CHAT, {"n": 1.5}, "not 1.5"),
        (OLLAMA, {"options": {"num_predict": 0}}, "options.num_predict"),
        (CHAT, {"structured_outputs": {"pattern": "x"}}, "'structured_outputs.pattern'"),
        (CHAT, {"stream_options": {"include_usages": True}}, "'stream_options.include_usages'"),
    ],
    ids=str,
)
def test_values_without_a_certain_meaning_are_refused_with_their_place(
    http: httpx.Client, path: str, more: dict[str, Any], message: str
) -> None:
    reply = http.post(path, json=PROMPTS[path] | more)
    assert reply.status_code == 400
    assert message in (reply.json()["error"] if path == OLLAMA else reply.json()["error"]["message"])


@pytest.mark.parametrize(
    ("path", "more", "names"),
    [
        (CHAT, {"stream_options": {"chunk_size": 8}, "stream": True}, ["stream_options.chunk_size"]),
        (COMPLETIONS, {"stream_options": {"chunk_size": 8}, "stream": True}, ["stream_options.chunk_size"]),
        (CHAT, {"response_format": {"type": "text", "style": "short"}}, ["response_format.style"]),
        (RESPONSES, {"text": {"format": {"type": "text", "style": 1}}}, ["text.format.style"]),
        (ANTHROPIC, {"thinking": {"type": "disabled", "level": 3}}, ["thinking.level"]),
        (OLLAMA, {"options": {"num_predict": 4, "max_workers": 2}}, ["options.max_workers"]),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [PART | {"cache": 1}], "mood": 1}]},
            ["messages.0.mood", "messages.0.content.0.cache"],
        ),
        (
            ANTHROPIC,
            {"messages": [{"role": "user", "content": [PART | {"cache_control": {}}] * 3}]},
            ["messages.0.content.0.cache_control"],
        ),
        (RESPONSES, {"input": [{"role": "user", "content": "x", "mood": 1}]}, ["input.0.mood"]),
        ("/v1/embeddings", {"input": "x", "input_kind": "query"}, ["input_kind"]),
        ("/api/embed", {"input": "x", "input_kind": "query"}, ["input_kind"]),
    ],
    ids=str,
)  # fmt: skip
def test_unknown_fields_at_any_depth_are_ignored_and_listed(
    http: httpx.Client, path: str, more: dict[str, Any], names: list[str]
) -> None:
    assert ignored(http.post(path, json=PROMPTS.get(path, {}) | more)) == names


def test_the_usage_can_be_in_every_event(http: httpx.Client) -> None:
    wanted = {"include_usage": True, "continuous_usage_stats": True}
    for path in (CHAT, COMPLETIONS):
        reply = post(http, path, {"max_tokens": 12, "stream": True, "stream_options": wanted})
        events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
        counts = [each["usage"]["completion_tokens"] for each in events]
        assert counts == sorted(counts)
        assert counts[-1] == counts[-2] > 0


# Replies whose text has an unusual effect in a stream.


@pytest.mark.long
@pytest.mark.parametrize("path", ALL)
def test_line_separators_do_not_split_events(http: httpx.Client, path: str) -> None:
    text = "one\u2028two\u2029three\x85four\x0bfive\x1esix"
    limits = (
        {"max_tokens": 60, "max_output_tokens": 60, "options": {}} if path != CHAT else {"max_tokens": 60}
    )
    limits = {name: value for name, value in limits.items() if name in PROMPTS[path]}
    reply = post(http, path, {**limits, "choice": [text], "stream": True})
    parts = []
    for line in reply.text.splitlines():
        if line.removeprefix("data: ").startswith("{"):
            found = re.findall(
                r'"(?:content|text|response|delta)": "((?:[^"\\]|\\.)*)"', line.removeprefix("data: ")
            )
            json.loads(line.removeprefix("data: "))
            parts += [json.loads(f'"{part}"') for part in found]
    assert text in "".join(parts)


# Fields of the other APIs.


@pytest.mark.parametrize(
    ("path", "name"),
    covering(ALL, ["max_tokens", "max_output_tokens", "max_completion_tokens", "maxOutputTokens"]),
)
def test_the_limit_has_many_names(http: httpx.Client, path: str, name: str) -> None:
    prompt = {
        key: PROMPTS[path][key] for key in ("messages", "prompt", "input", "stream") if key in PROMPTS[path]
    }
    reply = http.post(path, json=prompt | {name: 2})
    assert ignored(reply) == []
    assert re.search(r'"(completion_tokens|output_tokens|eval_count)": 2\b', reply.text), reply.text


@pytest.mark.long
@pytest.mark.parametrize("path", [CHAT, RESPONSES, ANTHROPIC, OLLAMA, GENERATE])
def test_the_system_prompt_has_many_names(http: httpx.Client, path: str) -> None:
    counts = [
        prompt_tokens(post(http, path, {name: "Answer in French, please."} if name else {}))
        for name in ("", "system", "system_prompt", "instructions")
    ]
    assert counts[0] < counts[1] == counts[2] == counts[3]


def prompt_tokens(reply: httpx.Response) -> int:
    assert ignored(reply) == []
    name = "prompt_tokens|input_tokens|cache_read_input_tokens|prompt_eval_count"
    return sum(map(int, re.findall(rf'"(?:{name})": (\d+)', reply.text)))


@pytest.mark.parametrize(
    ("path", "more", "advice"),
    [
        (COMPLETIONS, {"system": "x"}, "put it in prompt"),
        (COMPLETIONS, {"instructions": "x"}, "put it in prompt"),
        (GENERATE, {"messages": MESSAGES}, "POST /api/chat"),
        (GENERATE, {"tools": [{"name": "f"}]}, "POST /api/chat"),
        (OLLAMA, {"prompt": "x"}, "use messages"),
        (CHAT, {"system": "x", "instructions": "y"}, "instructions"),
        (CHAT, {"stop": "x", "stop_sequences": ["y"]}, "stop_sequences"),
    ],
)  # fmt: skip
def test_fields_of_other_endpoints_are_refused_with_advice(
    http: httpx.Client, path: str, more: dict[str, Any], advice: str
) -> None:
    reply = post(http, path, more)
    assert reply.status_code == 400
    assert advice in reply.text


def test_anthropics_api_reads_openais_fields(http: httpx.Client) -> None:
    assert ignored(post(http, ANTHROPIC, {"reasoning_effort": "none"})) == []
    assert ignored(post(http, ANTHROPIC, {"reasoning_effort": "low"})) == ["reasoning_effort"]
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "sunny"}]}
    counts = [
        prompt_tokens(post(http, ANTHROPIC, {"messages": [*MESSAGES, message, result]}))
        for message in (
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "weather", "input": {}}],
            },
        )
    ]
    assert counts[0] == counts[1]


# The bytes of a body.

SMALL = '{"a": "grün 🙂"}'
VALUE = {"a": "grün 🙂"}
ANY = TypeAdapter[Any](Any).validate_json
LATIN = "application/json; charset=iso-8859-1"


@pytest.mark.parametrize(
    ("data", "content_type", "value"),
    [
        (SMALL.encode(), "", VALUE),
        (b"\xef\xbb\xbf" + SMALL.encode(), "", VALUE),
        (SMALL.encode("utf-16"), "", VALUE),
        (SMALL.encode("utf-16-le"), "", VALUE),
        (SMALL.encode("utf-16-be"), "", VALUE),
        (SMALL.encode("utf-32"), "", VALUE),
        ('{"a": "grün"}'.encode("latin-1"), LATIN, {"a": "grün"}),
        ('{"a": "größe"}'.encode("cp1252"), 'application/json;Charset="windows-1252"', {"a": "größe"}),
        (SMALL.encode(), LATIN, VALUE),  # The header is wrong.
        (b'{"a": "cut \\ud83d"}', "", {"a": "cut \ufffd"}),
        (b'{"a": "\\ude42 \\ud83d\\ude42\\uD83D"}', "", {"a": "\ufffd 🙂\ufffd"}),
        (rb'{"a": "\\ud83d"}', "", {"a": "\\ud83d"}),
        (rb'{"\ud83d": {"b": ["\ud83d", "\\\ud83d"]}}', "", {"\ufffd": {"b": ["\ufffd", "\\\ufffd"]}}),
    ],
)
def test_bodies_that_are_read(data: bytes, content_type: str, value: Any) -> None:
    assert parse_body(data, {"content-type": content_type}, ANY) == value


@pytest.mark.parametrize(
    ("data", "headers", "status", "message"),
    [
        (b"", {}, 400, "is empty"),
        (b" \n", {}, 400, "is empty"),
        (b'{"a": 1,}', {}, 400, "line 1, column 9"),
        (b'{\n  "a": 1\n  "b": 2\n}', {}, 400, "line 3, column 3"),
        (b"{'a': 1}", {}, 400, "double quotes"),
        (b'{"a": "x\ny"}', {}, 400, "line 1, column 8"),
        (b'{"a": "x', {}, 400, "too early"),
        (b'{"a": "\\u00"}', {}, 400, "invalid escape"),
        (b"a=1&b=2", {}, 400, "is form data"),
        (b"--x\r\n", {"content-type": "multipart/form-data; boundary=x"}, 400, "is form data"),
        (b'"{\\"a\\": 1}"', {}, 400, "JSON twice"),
        (b"[" * 1000, {}, 400, "nested"),
        (b"[" * 300 + b"]" * 300, {}, 400, "nested"),
        ('{"a": "grün"}'.encode("latin-1"), {}, 400, "byte 0xfc at position 9"),
        (b'{"a": "\xed\xa0\xbd"}', {}, 400, "byte 0xed at position 7"),
        (b"\xff", {"content-type": "application/json; charset=klingon"}, 415, "charset klingon"),
        (b"\xff", {"content-type": "application/json; charset=zip"}, 415, "charset zip"),
        (b"{}", {"content-encoding": "zstd"}, 415, "compressed with zstd"),
        (b"{}", {"content-encoding": "br"}, 415, "compressed with br"),
        (b"\x1f\x8b\x08\x00", {"content-encoding": "gzip"}, 415, "compressed with gzip"),
        (b"\x1f\x8b\x08\x00", {}, 415, "compressed with gzip"),
    ],
)  # fmt: skip
def test_bodies_that_are_refused(data: bytes, headers: dict[str, str], status: int, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_body(data, headers, ANY)
    assert refused.value.status == status
    assert message in refused.value.message


@pytest.mark.long
@pytest.mark.parametrize("path", ALL)
def test_every_api_reads_bodies_alike(http: httpx.Client, path: str) -> None:
    text = json.dumps(PROMPTS[path])
    assert http.post(path, content=b"\xef\xbb\xbf" + text.encode()).status_code == 200
    cut = text.replace("How do I", "\\ud83d How do I").replace('"x"', '"x\\ud83d"')
    assert http.post(path, content=cut).status_code == 200
    refused = http.post(path, content=text[:-1] + ",}")
    assert refused.status_code == 400
    assert "trailing comma" in refused.text
    assert http.post(path, content=text, headers={"Content-Encoding": "gzip"}).status_code == 415


# Paths.

PATHS = ("/", "/health", "/v1/models", *ALL, "/v1/messages/count_tokens", "/v1/embeddings", "/api/tags")


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        *((path, path) for path in PATHS),
        *((f"/{path}/", path) for path in PATHS),
        ("//v1//chat///completions", CHAT),
        ("/chat/completions", CHAT),
        ("/completions/", COMPLETIONS),
        ("/models", "/v1/models"),
        ("/responses", RESPONSES),
        ("/embeddings", "/v1/embeddings"),
        ("/messages", ANTHROPIC),
        ("/v1/v1/chat/completions", CHAT),
        ("/v1/v1/v1/models", "/v1/models"),
        ("/v1/v1/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/v1/api/chat", OLLAMA),
        ("/api/api/tags", "/api/tags"),
        ("/api/v1/chat/completions", CHAT),
        ("/api/chat/completions", CHAT),
        ("/openai/v1/chat/completions", CHAT),
        ("/v1/chat/completions/chat/completions", CHAT),
        ("/v1/chat/completions%20".replace("%20", " "), CHAT),
        ("/v1/models/user/repo", "/v1/models/user/repo"),
        ("/models/demo", "/v1/models/demo"),
        ("/v1/v1/models/demo", "/v1/models/demo"),
        ("/v1/", "/v1"),
        ("/v2/chat/completions", "/v2/chat/completions"),
        ("/v1/threads/t/messages", "/v1/threads/t/messages"),
        ("/chat", "/chat"),
        ("http://127.0.0.1:11435/v1/chat/completions", CHAT),
        ("HTTPS://LocalHost/chat/completions/", CHAT),
        ("http://[::1]:11435//v1/models/demo", "/v1/models/demo"),
        ("http://127.0.0.1:11435", "/"),
        ("ftp://127.0.0.1/v1/models", "/ftp:/127.0.0.1/v1/models"),
    ],
)
def test_paths(path: str, meant: str) -> None:
    assert canonical_path(path, PATHS) == meant


def test_unknown_paths_name_the_base_url(http: httpx.Client, server: HttpServer) -> None:
    for path in ("/v1/", "/v2/chat/completions"):
        reply = http.get(path)
        assert reply.status_code == 404
        assert f"{server.url}/v1 if it uses OpenAI's API" in reply.json()["error"]["message"]
    assert isinstance(http.get(f"{server.url}//api/nothing").json()["error"], str)
    assert http.get("/api/tags/").status_code == http.get(f"{server.url}//v1/models/").status_code == 200
    assert http.post("/chat/completions", json=PROMPTS[CHAT]).status_code == 200


# Origins.


@pytest.mark.parametrize(
    ("allowed", "origin", "matches"),
    [
        ("https://chat.example.com", "https://chat.example.com", True),
        ("https://chat.example.com/", "https://chat.example.com", True),
        ("HTTPS://Chat.Example.com:443", "https://chat.example.com", True),
        ("https://chat.example.com", "https://chat.example.com.evil.example", False),
        ("https://chat.example.com", "http://chat.example.com", False),
        ("https://chat.example.com", "https://chatXexample.com", False),
        ("https://chat.example.com", "https://chat.example.com:8443", False),
        ("https://chat.example.com:*", "https://chat.example.com:8443", True),
        ("https://*.example.com", "https://a.b.example.com", True),
        ("https://*.example.com", "https://example.com", False),
        ("https://*.example.com", "https://evil.example/.example.com", False),
        ("https://*.example.com", "https://evil.example:1.example.com", False),
        ("http://localhost", "http://localhost:3000", True),
        ("http://localhost", "http://localhost", True),
        ("http://localhost:3000", "http://localhost:3001", False),
        ("http://127.0.0.1:*", "http://127.0.0.1:5173", True),
        ("http://[::1]", "http://[::1]:80", True),
        ("chrome-extension://*", "chrome-extension://abcdef", True),
        ("chrome-extension://abcdef", "chrome-extension://abcdef", True),
        ("chrome-extension://*", "moz-extension://abcdef", False),
        ("app://obsidian.md", "app://obsidian.md", True),
        ("tauri://localhost", "tauri://localhost", True),
        ("file://", "file://", True),
        ("null", "null", True),
        ("https://bücher.example", "https://xn--bcher-kva.example", True),
        ("https://a.example, https://b.example", "https://b.example", True),
        ("*", "anything://at.all", True),
    ],
)
def test_origins(allowed: str, origin: str, matches: bool) -> None:
    assert bool(re.fullmatch(origins_regex([allowed]), origin)) == matches
    assert is_origin(origin) or not matches


@pytest.mark.parametrize(
    ("allowed", "advice"),
    [
        ("chat.example.com", "write https://chat.example.com"),
        ("localhost:3000", "write http://localhost:3000"),
        ("*.example.com", "write https://*.example.com"),
        ("https://chat.example.com/app", "no path"),
        ("https://user@chat.example.com", "such as"),
        ("https://ch*t.example.com", "invalid host"),
        ("https://chat.example.com:port", "such as"),
        ("", "such as"),
    ],
)
def test_origins_that_are_refused_at_the_start(allowed: str, advice: str) -> None:
    with pytest.raises(OptionError) as refused:
        ServerSettings(allowed_origins=(allowed,))
    assert advice in str(refused.value)


@pytest.fixture(scope="module")
def open_server() -> Iterator[HttpServer]:
    """A server started with `--target demo` that some web pages may use."""
    with running(
        target="demo",
        allowed_origins=("chrome-extension://*", "https://chat.example.com/"),
        load_options={"context": 512, "method": "none"},
        reply_options={"temperature": 0.0},
    ) as server:
        yield server


@pytest.mark.long
def test_web_pages_of_the_internet_may_use_the_private_network(open_server: HttpServer) -> None:
    for origin in ("chrome-extension://abc", "https://chat.example.com"):
        asked = {
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Private-Network": "true",
        }
        reply = httpx.options(f"{open_server.url}{CHAT}", headers=asked)
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-private-network"] == "true"
        assert reply.headers["access-control-allow-origin"] == origin
        used = httpx.post(
            f"{open_server.url}{CHAT}", json=PROMPTS[CHAT], headers={"Origin": origin}, timeout=60
        )
        assert used.status_code == 200


# Conversations.


@pytest.mark.parametrize("path", [CHAT, RESPONSES, OLLAMA])
def test_a_conversation_can_be_a_system_message(http: httpx.Client, path: str) -> None:
    name = "input" if path == RESPONSES else "messages"
    reply = post(http, path, {name: [{"role": "system", "content": QUESTION}]})
    assert reply.status_code == 200, reply.text


# Model names.


@pytest.mark.parametrize(
    ("path", "name"),
    covering(
        [CHAT, ANTHROPIC, OLLAMA],
        ["dummy", "gpt-4o", "tgi", "http://127.0.0.1:11435/v1/", "https://example.com", "x:latest", "x y"],
    ),
)
def test_an_unusable_name_means_the_served_model(open_server: HttpServer, path: str, name: str) -> None:
    reply = httpx.post(f"{open_server.url}{path}", json={**PROMPTS[path], "model": name}, timeout=60)
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == "demo"


@pytest.mark.parametrize("name", ["demo-drft", "70b-q4", "user/repo", "/dev/zero", "other.gguf"])
def test_a_name_that_could_mean_another_model_is_refused(open_server: HttpServer, name: str) -> None:
    reply = httpx.post(f"{open_server.url}{CHAT}", json={**PROMPTS[CHAT], "model": name}, timeout=60)
    assert reply.status_code == 404
    message = reply.json()["error"]["message"]
    assert "demo" in message or "alias" in message


def test_without_a_chosen_target_an_unknown_name_lists_the_models(http: httpx.Client) -> None:
    reply = post(http, CHAT, {"model": "dummy"})
    assert reply.status_code == 404
    assert "demo, " in reply.json()["error"]["message"]
    near = post(http, CHAT, {"model": "demo-drat"}).json()["error"]["message"]
    assert "did you mean demo-draft" in near


# Benchmarks with replies of one length.


@pytest.mark.parametrize("path", ALL)
def test_replies_can_have_a_fixed_length(http: httpx.Client, path: str) -> None:
    limits = {"max_tokens": 40, "max_output_tokens": 40, "options": {"num_predict": 40}}
    limit = {name: value for name, value in limits.items() if name in PROMPTS[path]}
    ignore, least = {"ignore_eos": True}, {"min_tokens": 40}
    for wish, method in ((ignore, "none"), (least, "model"), (ignore, "suffix")):
        reply = post(http, path, limit | wish | {"method": method}).json()
        usage = reply.get("usage", reply)
        counts = [usage.get(key) for key in ("completion_tokens", "output_tokens", "eval_count")]
        assert 40 in counts, reply


@pytest.mark.parametrize("path", ["/", "/models/demo:generateContent"])
def test_clients_of_unsupported_apis_learn_the_base_urls(http: httpx.Client, path: str) -> None:
    """Hugging Face's and Google's clients send these paths."""
    reply = http.post(path, json={"inputs": "x", "contents": []})
    assert reply.status_code == 405
    assert f"{path} is not supported; use GET" in reply.text
    assert "set your program's base URL to http://127.0.0.1:" in reply.text
