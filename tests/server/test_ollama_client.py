"""Ollama's own client, unmodified, talks to the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from ollama import ResponseError

import edgespec
from edgespec import Runtime
from edgespec.server.http_server import HttpServer
from edgespec.server.ollama.replies import OllamaFields
from edgespec.store.catalogue import user_aliases_path
from tests.backends.tiny_models import write_llama
from tests.server.conftest import MESSAGES, QUESTION, running
from tests.server.test_tools import TOOLS

SCHEMA: Any = {
    "type": "object",
    "properties": {"folder": {"enum": ["home", "root"]}},
    "required": ["folder"],
    "additionalProperties": False,
}
PNG = "iVBORw0KGgo="


@pytest.fixture
def client(server: HttpServer) -> Iterator[ollama.Client]:
    """Ollama's own client."""
    with ollama.Client(host=server.url, timeout=60) as client:
        yield client


def test_the_settings_that_the_makers_recommend_are_shown(client: ollama.Client, tmp_path: Path) -> None:
    path = write_llama(tmp_path / "model.gguf", sampling={"temp": 0.6, "penalty_repeat": 1.05})
    user_aliases_path().write_text(f'[aliases]\nstated = "{path}"\n')
    try:
        shown = client.show("stated").parameters
    finally:
        user_aliases_path().unlink()
    assert shown is not None
    assert [line.split() for line in shown.splitlines()] == [
        ["temperature", "0.6"],
        ["repeat_penalty", "1.05"],
    ]
    assert not client.show("demo").parameters


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_chats_equal_plain_decoding(client: ollama.Client, plain: Runtime, temperature: float) -> None:
    expected = plain.reply(MESSAGES, max_tokens=48, temperature=temperature, seed=7)
    options = {"num_predict": 48, "temperature": temperature, "seed": 7}
    reply = client.chat("demo", MESSAGES, options=options)
    assert reply.message.content == expected.answer
    assert reply.done_reason == expected.finish_reason
    *chunks, last = client.chat("demo", MESSAGES, options=options, stream=True)
    assert "".join(chunk.message.content or "" for chunk in chunks) == expected.answer
    assert len(chunks) > 1
    assert not any(chunk.done for chunk in chunks)
    assert last.done
    assert last.done_reason == expected.finish_reason


@pytest.mark.long
@pytest.mark.parametrize("target", ["demo", pytest.param("demo-mlx", marks=pytest.mark.long)])
def test_drafted_trees_do_not_change_chats(target: str) -> None:
    model: dict[str, Any] = {"context": 512}
    with edgespec.load(target, "none", method="none", **model) as runtime:
        expected = [
            runtime.reply(MESSAGES, max_tokens=32, temperature=each, seed=7).answer for each in (0.0, 0.8)
        ]
    options = {**model, "method": "model", "draft_branches": (2, 2)}
    # MLX chooses the number of threads itself.
    threads = 1 if target == "demo" else None
    with (
        running(threads=threads, target=target, load_options=options) as server,
        ollama.Client(server.url) as client,
    ):
        for temperature, answer in zip((0.0, 0.8), expected, strict=True):
            settings = {"num_predict": 32, "temperature": temperature, "seed": 7}
            reply = client.chat(target, MESSAGES, options=settings)
            assert reply.message.content == answer


def test_generate_replies_or_continues(client: ollama.Client, plain: Runtime) -> None:
    options: Any = {"max_tokens": 16, "temperature": 0.0}
    messages = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    expected = plain.reply(messages, **options).answer
    reply = client.generate("demo", QUESTION, system="Be brief.", options=options)
    assert reply.response == expected
    assert reply.response != client.generate("demo", QUESTION, options=options).response
    continued = plain.generate("To list files", raw=True, **options).text
    raw = client.generate("demo", "To list files", raw=True, options=options)
    assert raw.response == continued
    parts = client.generate("demo", "To list files", raw=True, options=options, stream=True)
    assert "".join(part.response or "" for part in parts) == continued


def test_counts_and_times(client: ollama.Client, http: httpx.Client) -> None:
    whole = client.chat("demo", MESSAGES, options={"num_predict": 24})
    *_, last = client.chat("demo", MESSAGES, options={"num_predict": 24}, stream=True)
    for reply in (whole, last):
        assert reply.eval_count == 24
        assert reply.prompt_eval_count == whole.prompt_eval_count
        assert reply.eval_duration
        assert reply.total_duration
        assert reply.load_duration
        assert reply.total_duration > reply.load_duration + reply.eval_duration > reply.eval_duration > 1000
    body = {"messages": MESSAGES, "stream": False, "keep_alive": "5m", "options": {"num_ctx": 99}}
    report = http.post("/api/chat", json=body).json()["edgespec"]
    assert report["ignored_fields"] == ["keep_alive", "options.num_ctx"]
    assert report["drafters"] == "model"


def test_options_have_ollamas_names(client: ollama.Client, plain: Runtime) -> None:
    options = {"num_predict": 32, "repeat_penalty": 1.5, "repeat_last_n": 8, "top_k": 20, "top_p": 0.9}
    names: Any = {"max_tokens": 32, "repetition_penalty": 1.5, "penalty_window": 8, "top_k": 20, "top_p": 0.9}
    expected = plain.reply(MESSAGES, temperature=0.9, seed=3, min_p=0.01, **names).answer
    more = {"temperature": 0.9, "seed": 3, "min_p": 0.01}
    assert client.chat("demo", MESSAGES, options={**options, **more}).message.content == expected
    word = expected.split()[3]
    stopped = client.chat("demo", MESSAGES, options={**options, **more, "stop": [word]})
    assert stopped.message.content == expected[: expected.index(word)]
    assert stopped.done_reason == "stop"
    unlimited = client.generate("demo", "One", raw=True, options={"num_predict": -1, "stop": [" "]})
    assert unlimited.done_reason == "stop"


def test_options_outside_of_the_field_for_them_count(http: httpx.Client, plain: Runtime) -> None:
    """As a provider of the AI SDK sends them."""
    expected = plain.reply(MESSAGES, max_tokens=12, temperature=0.8, top_p=0.9, seed=5).answer
    body = {
        "model": "demo",
        "messages": MESSAGES,
        "max_output_tokens": 12,
        "temperature": 0.8,
        "top_p": 0.9,
        "seed": 5,
        "think": False,
        "stream": False,
    }
    assert http.post("/api/chat", json=body).json()["message"]["content"] == expected
    body |= {"tools": TOOLS, "tool_choice": "required", "max_output_tokens": 200}
    (call,) = http.post("/api/chat", json=body).json()["message"]["tool_calls"]
    assert call["function"]["name"] == TOOLS[0]["function"]["name"]


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
def test_format_makes_the_answer_json(client: ollama.Client, stream: bool) -> None:
    options = {"num_predict": 200}
    if stream:
        parts = client.chat("demo", MESSAGES, format=SCHEMA, options=options, stream=True)
        text = "".join(part.message.content or "" for part in parts)
    else:
        text = client.chat("demo", MESSAGES, format=SCHEMA, options=options).message.content or ""
    assert json.loads(text)["folder"] in ("home", "root")
    assert (client.generate("demo", QUESTION, format="json", options=options).response or "").startswith("{")


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_come_whole(client: ollama.Client, stream: bool) -> None:
    # The demo model rarely calls tools by itself, and Ollama's API cannot require a call.
    call_text = r'<tool_call>\n\{"name": "list_files", "arguments": \{"folder": "home"\}\}\n</tool_call>'
    options = {"num_predict": 120, "regex": call_text}
    reply: ollama.ChatResponse
    if stream:
        reply, end = client.chat("demo", MESSAGES, tools=TOOLS, options=options, stream=True)
    else:
        reply = end = client.chat("demo", MESSAGES, tools=TOOLS, options=options)
    assert reply.message.tool_calls
    (call,) = reply.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("list_files", {"folder": "home"})
    assert end.done_reason == "stop"
    # A call that the reply ended within has no valid arguments.
    cut = client.chat("demo", MESSAGES, tools=TOOLS, options={**options, "num_predict": 20})
    assert (cut.message.tool_calls, cut.done_reason) == (None, "length")


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning(client: ollama.Client, plain: Runtime, stream: bool) -> None:
    # The demo model does not reason by itself.
    messages: Any = [*MESSAGES, {"role": "assistant", "content": "<think>"}]
    begun: Any = {"reply_start": "<think>", "max_tokens": 16, "temperature": 0.0}
    expected = plain.stream_messages(MESSAGES, **begun).wait().reasoning
    assert expected
    options = {"num_predict": 16}
    parts = (
        list(client.chat("demo", messages, think=True, options=options, stream=True))
        if stream
        else [client.chat("demo", messages, think=True, options=options)]
    )
    assert "".join(part.message.thinking or "" for part in parts) == expected
    assert not any(part.message.content for part in parts)


def test_a_conversation_with_tool_results(client: ollama.Client) -> None:
    call = {"function": {"name": "list_files", "arguments": {"folder": "home"}}}
    messages: Any = [
        *MESSAGES,
        {"role": "assistant", "content": "", "thinking": "Look.", "tool_calls": [call]},
        {"role": "tool", "tool_name": "list_files", "content": "notes.txt"},
    ]
    reply = client.chat("demo", messages, tools=TOOLS, options={"num_predict": 8})
    assert reply.eval_count == 8


def test_logprobs(client: ollama.Client) -> None:
    options = {"num_predict": 8}
    whole = client.chat("demo", MESSAGES, logprobs=True, top_logprobs=2, options=options)
    parts = list(client.chat("demo", MESSAGES, logprobs=True, top_logprobs=2, options=options, stream=True))
    assert whole.logprobs
    assert [each.token for part in parts for each in part.logprobs or ()] == [t.token for t in whole.logprobs]
    assert all(len(each.top_logprobs or ()) == 2 for each in whole.logprobs)


def test_empty_prompts_load_the_model(client: ollama.Client) -> None:
    assert client.chat("demo").done_reason == "load"
    assert client.generate("demo", "").done_reason == "load"


@pytest.mark.parametrize(
    ("keep_alive", "unloads"),
    [
        *(
            (zero, True)
            for zero in (0, 0.0, "0", "0s", "0m", "0h", "0ms", "0.0", "0h0m", "-0", "+0s", " 0S ")
        ),
        *(
            (other, False)
            for other in (None, "", -1, 0.5, 300, "300", "-1", "5m", "1h30m", "1.5h", "10µs", "0h1m")
        ),
    ],
)
def test_keep_alive_is_a_duration(keep_alive: Any, unloads: bool) -> None:
    assert OllamaFields.model_validate({"keep_alive": keep_alive}).unloads is unloads


@pytest.mark.parametrize("keep_alive", ["abc", "5x", "m", "--5m", "5 m", "1h30", True, []])
def test_an_invalid_keep_alive_is_refused(http: httpx.Client, keep_alive: Any) -> None:
    reply = http.post("/api/generate", json={"prompt": "", "keep_alive": keep_alive})
    assert reply.status_code == 400
    assert "keep_alive" in reply.json()["error"]


def test_keep_alive_0_unloads_the_model(client: ollama.Client, plain: Runtime) -> None:
    expected = plain.reply(MESSAGES, max_tokens=8, temperature=0.0).answer
    options = {"num_predict": 8}
    for stream in (False, True):
        if stream:
            parts = client.chat("demo", MESSAGES, options=options, keep_alive=0, stream=True)
            answer = "".join(part.message.content or "" for part in parts)
        else:
            answer = client.chat("demo", MESSAGES, options=options, keep_alive=0).message.content or ""
        assert answer == expected
        assert not client.ps().models
    assert client.generate("demo", "").done_reason == "load"
    assert client.ps().models
    assert client.generate("demo", "", keep_alive=0).done_reason == "unload"
    assert client.chat("demo", keep_alive="0s").done_reason == "unload"
    assert not client.ps().models
    with pytest.raises(ResponseError) as missing:
        client.generate("gpt-77", "", keep_alive=0)
    assert missing.value.status_code == 404


def test_models_are_described(client: ollama.Client, http: httpx.Client) -> None:
    tags = {each.model: each for each in client.list().models}
    assert tags["demo"].size
    assert tags["demo"].digest
    assert tags["demo"].details
    assert tags["demo"].details.parent_model == "", "clients require a string"
    client.chat("demo")  # loads it
    (loaded,) = client.ps().models
    assert (loaded.name, loaded.context_length) == ("demo", 1024)
    assert loaded.size
    shown = client.show("demo")
    assert shown.modelinfo
    assert (shown.modelfile, shown.template) == ("", ""), "clients require strings"
    architecture = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{architecture}.context_length"] == 1024
    assert shown.capabilities == ["completion", "tools"]
    major, minor, patch = http.get("/api/version").json()["version"].split(".")
    assert (int(major), int(minor), int(patch)) >= (0, 6, 4)  # VS Code's oldest version.
    assert http.head("/").status_code == 200


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_predictt": 1}, "options.num_predict?"),
        ({"temperature": -1}, "temperature"),
        ({"options": {"temperatur": 1}}, "options.temperature?"),
        ({"options": {"mirostat": 2}}, "mirostat 2"),
        ({"options": {"tfs_z": 0.5}}, "tfs_z 0.5"),
        ({"options": {"temperature": -1}}, "temperature"),
        ({"options": {"num_predict": -3}}, "options.num_predict"),
        ({"format": "xml"}, "'xml'"),
        ({"think": "hard"}, "think: "),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "x", "images": [PNG]}]}, "messages.0.images"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "'robot'"),
        ({"tools": [{"type": "function"}]}, "tool"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_invalid_chats_are_explained(
    http: httpx.Client, change: dict[str, Any], message: str, stream: bool
) -> None:
    reply = http.post("/api/chat", json={"messages": MESSAGES, "stream": stream, **change})
    assert reply.status_code == 400
    assert set(reply.json()) == {"error"}
    assert message in reply.json()["error"]


@pytest.mark.parametrize("field", [{"suffix": "x"}, {"template": "x"}, {"context": [1]}, {"images": [PNG]}])
def test_unsupported_fields_of_generate(http: httpx.Client, field: dict[str, Any]) -> None:
    (name,) = field
    refused = http.post("/api/generate", json={"prompt": "One", **field})
    assert refused.status_code == 400
    assert name in refused.json()["error"]
    empty: Any = {name: type(field[name])(), "options": {"num_predict": 1}}
    assert http.post("/api/generate", json={"prompt": "One", **empty}).status_code == 200


def test_other_errors(client: ollama.Client, http: httpx.Client) -> None:
    with pytest.raises(ResponseError) as missing:
        client.chat("gpt-77", MESSAGES)
    assert missing.value.status_code == 404
    with pytest.raises(ResponseError, match="gpt-77") as unknown:
        client.show("gpt-77")
    assert unknown.value.status_code == 404
    with pytest.raises(ResponseError) as long:
        list(client.chat("demo", [{"role": "user", "content": "word " * 1500}], stream=True))
    assert "1024" in str(long.value)
    assert "use `edgespec models pull`" in http.post("/api/delete", json={}).json()["error"]


def test_pulling_confirms_a_model_on_this_machine(client: ollama.Client) -> None:
    assert client.pull("demo").status == "success"
    assert [each.status for each in client.pull("demo:latest", stream=True)] == ["success"]
    with pytest.raises(ResponseError, match="download it with `edgespec models pull") as missing:
        client.pull("llama3.2")
    assert missing.value.status_code == 404
    with (
        running(target="demo") as server,
        ollama.Client(host=server.url) as other,
        # A reply would come from the server's own model.
        pytest.raises(ResponseError, match="gpt-77"),
    ):
        other.pull("gpt-77")


def test_options_that_change_nothing_are_ignored(http: httpx.Client) -> None:
    neutral = {
        "mirostat": 0,
        "mirostat_tau": 5.0,
        "tfs_z": 1.0,
        "penalize_newline": True,
        "vocab_only": False,
    }
    body = {"messages": MESSAGES, "stream": False, "options": {**neutral, "num_predict": 4}}
    report = http.post("/api/chat", json=body).json()["edgespec"]
    assert sorted(report["ignored_fields"]) == sorted(f"options.{name}" for name in neutral)
