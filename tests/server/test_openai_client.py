"""OpenAI's own client, unmodified, talks to the server."""

from __future__ import annotations

import json
import re
import threading
import time
from typing import Any

import httpx
import openai
import pytest

from edgespec import Runtime
from edgespec.server.http_server import HttpServer
from tests.server.conftest import MESSAGES, QUESTION, running


def text_of(chunks: openai.Stream[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_replies_equal_plain_decoding(client: openai.OpenAI, plain: Runtime, temperature: float) -> None:
    expected = plain.reply(MESSAGES, max_tokens=48, temperature=temperature, seed=7)
    options: Any = {"max_tokens": 48, "temperature": temperature, "seed": 7}
    reply = client.chat.completions.create(model="demo", messages=MESSAGES, **options)
    assert reply.choices[0].message.content == expected.answer
    assert reply.choices[0].finish_reason == expected.finish_reason
    stream = client.chat.completions.create(model="demo", messages=MESSAGES, stream=True, **options)
    assert text_of(stream) == expected.answer


def test_completions_continue_the_text(client: openai.OpenAI, plain: Runtime) -> None:
    expected = plain.generate("To list files", raw=True, max_tokens=16, temperature=0.0)
    reply = client.completions.create(model="demo", prompt="To list files", max_tokens=16)
    assert reply.choices[0].text == expected.text
    chunks = client.completions.create(model="demo", prompt="To list files", max_tokens=16, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    both = client.completions.create(model="demo", prompt=["To list", "One"], n=2, max_tokens=4, echo=True)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert [choice.text.split()[0] for choice in both.choices] == ["To", "To", "One", "One"]
    # The seed of each further reply is incremented. After the largest seed, there is none.
    last = client.completions.create(model="demo", prompt="One", n=2, seed=2**63 - 1, max_tokens=2)
    assert len(last.choices) == 2


def test_completions_continue_tokens(client: openai.OpenAI, plain: Runtime) -> None:
    texts = ("To list files", "One")
    prompts = [plain.vocabulary.tokenize(text, special=False, start=True) for text in texts]
    expected = [plain.generate(text, raw=True, max_tokens=8, temperature=0.8, seed=3).text for text in texts]
    options: Any = {"model": "demo", "max_tokens": 8, "temperature": 0.8, "seed": 3}
    both = client.completions.create(prompt=prompts, **options)
    assert [choice.text for choice in both.choices] == expected
    assert both.usage
    assert both.usage.prompt_tokens == sum(map(len, prompts))
    one = client.completions.create(prompt=prompts[0], echo=True, **options)
    assert one.choices[0].text.strip() == f"{texts[0]}{expected[0]}".strip()
    chunks = list(client.completions.create(prompt=prompts, echo=True, stream=True, **options))
    for index, (text, continuation) in enumerate(zip(texts, expected, strict=True)):
        streamed = [chunk.choices[0].text for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(streamed).strip() == f"{text}{continuation}".strip()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([1, 10**6], "token_unknown"),
        ([[-1]], "token_unknown"),
        ([[]], "prompt_empty"),
        ([], "invalid_request"),
        ([5] * 2000, "context_length_exceeded"),
        ([5, "a"], "invalid_request"),
        ([1.5], "invalid_request"),
    ],
)
def test_invalid_token_prompts(client: openai.OpenAI, prompt: Any, code: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="demo", prompt=prompt, echo=True, max_tokens=4, stream=stream)
    assert error.value.code == code


def test_usage_and_timings_are_always_sent(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=24)
    *_, last = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=24, stream=True)
    for usage, timings in ((reply.usage, reply.timings), (last.usage, last.timings)):  # type: ignore[attr-defined]
        assert usage is not None
        assert usage.completion_tokens == 24 == timings["predicted_n"]
        assert usage.total_tokens == usage.prompt_tokens + 24
        assert timings["cache_n"] + timings["prompt_n"] == usage.prompt_tokens
        assert timings["draft_n"] >= timings["draft_n_accepted"] > 0
        assert timings["predicted_ms"] > 0


def test_usage_has_its_own_event_if_asked_for(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=4, stream=True, stream_options={"include_usage": True}
        )
    )
    assert [bool(chunk.usage) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert chunks[-2].choices[0].finish_reason == "length"


@pytest.mark.parametrize("method", ["auto", "model"])
def test_the_loss_limit_of_a_request(client: openai.OpenAI, plain: Runtime, method: str) -> None:
    expected = plain.reply(MESSAGES, max_tokens=24, temperature=0.0).answer
    for max_loss in (0.25, None):
        more = {"method": method} if max_loss is None else {"method": method, "max_loss": max_loss}
        reply = client.chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=24, extra_body=more
        )
        assert reply.choices[0].message.content == expected
        limit = reply.choices[0].edgespec["loss_limit"]  # type: ignore[attr-defined]
        default = {"share": 0.02, "passes": 2.0} if method == "auto" else None
        assert limit == (default if max_loss is None else {"share": 0.25, "passes": 2.0})


def test_the_method_and_ignored_fields_are_reported(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="demo",
        messages=MESSAGES,
        max_tokens=8,
        user="someone",
        store=False,
        extra_body={"method": "auto"},
    )
    report = reply.choices[0].edgespec  # type: ignore[attr-defined]
    assert report["ignored_fields"] == ["store", "user"]
    assert report["loss_limit"] == {"share": 0.02, "passes": 2.0}
    assert "auto" in report["method"]
    fixed = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=8)
    assert fixed.choices[0].edgespec["drafters"] == "model"  # type: ignore[attr-defined]


def test_replies_and_models_say_whether_replies_are_identical(client: openai.OpenAI) -> None:
    def reported(**more: Any) -> Any:
        reply = client.chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=2, temperature=0.8, extra_body=more
        )
        return reply.choices[0].edgespec["exactness"]  # type: ignore[attr-defined]

    exactness = reported()
    assert (exactness["requested"], exactness["effective"]) == ("auto", "bits")
    assert exactness["widths"][:2] == [1, 2]
    assert reported(acceptance="rejection")["effective"] == "rounding"
    assert client.models.retrieve("demo").exactness == exactness  # type: ignore[attr-defined]


@pytest.mark.long
@pytest.mark.parametrize(("path", "where"), [
    ("v1/completions", ("choices", 0, "edgespec")), ("api/generate", ("edgespec",))
])  # fmt: skip
def test_replies_that_can_differ_say_so(path: str, where: tuple[Any, ...]) -> None:
    options = {"context": 256, "exactness": "off", "method": "none"}
    with running(load_options=options, draft="none") as server:
        body = {"model": "demo", "prompt": "Hello", "max_tokens": 2, "stream": False}
        found: Any = httpx.post(f"{server.url}/{path}", json=body, timeout=60).json()
        for key in where:
            found = found[key]
        assert (found["exactness"]["requested"], found["exactness"]["effective"]) == ("off", "rounding")
        assert "rounding" in found["exactness"]["reason"]


@pytest.mark.long
def test_several_choices(client: openai.OpenAI, plain: Runtime) -> None:
    expected = [plain.reply(MESSAGES, max_tokens=16, temperature=1.0, seed=seed).answer for seed in (3, 4, 5)]
    options: Any = {"max_tokens": 16, "temperature": 1.0, "seed": 3, "n": 3}
    reply = client.chat.completions.create(model="demo", messages=MESSAGES, **options)
    assert [choice.message.content for choice in reply.choices] == expected
    assert reply.usage
    assert reply.usage.completion_tokens == 48
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(model="demo", messages=MESSAGES, stream=True, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == expected


def test_stop_and_logit_bias(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=16)
    text = whole.choices[0].message.content or ""
    word = text.split()[3]
    stopped = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=16, stop=[word])
    assert stopped.choices[0].message.content == text[: text.index(word)]
    assert stopped.choices[0].finish_reason == "stop"
    biased = client.completions.create(model="demo", prompt="One", max_tokens=3, logit_bias={"300": 100})
    assert len(set(biased.choices[0].text.split())) == 1


def test_a_last_assistant_message_is_continued(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=16).choices[0].message
    text = whole.content or ""
    start = " ".join(text.split(" ")[:2])
    messages: Any = [*MESSAGES, {"role": "assistant", "content": start}]
    rest = client.chat.completions.create(model="demo", messages=messages, max_tokens=8).choices[0].message
    assert text.startswith(start + (rest.content or "")[:10])


def test_replies_can_be_sent_back_as_dicts(client: openai.OpenAI) -> None:
    """Programs append `message.model_dump()`, which contains null fields, to the conversation."""
    first = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=16).choices[0].message
    dumped: Any = first.model_dump()
    assert dumped["function_call"] is None
    short: Any = {"role": "assistant", "content": first.content}
    replies = [
        client.chat.completions.create(
            model="demo", messages=[*MESSAGES, message, *MESSAGES], max_tokens=8
        ).choices[0]
        for message in (dumped, short)
    ]
    assert replies[0].message.content == replies[1].message.content


TOOL = {"type": "function", "function": {"name": "f"}}


def _with_part(**part: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part]}]}


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"temperatur": 1}, "temperatur", "unknown_field"),
        ({"temperature": "hot"}, "temperature", "option_invalid"),
        ({"temperature": -1}, "temperature", "option_invalid"),
        ({"method": "modle"}, "method", "option_invalid"),
        ({"method": "lookahead"}, "method", "method_unavailable"),
        ({"max_loss": 2}, "max_loss", "option_invalid"),
        ({"max_loss": 0.1, "method": "none"}, "max_loss", "option_without_effect"),
        ({"draft_window": 64}, "draft_window", "unknown_field"),
        ({"num_ctx": 4096}, "num_ctx", "unknown_field"),
        ({"keep_alive": "5m"}, "keep_alive", "unknown_field"),
        ({"prompt": "hi"}, "prompt", "unknown_field"),
        ({"functions": [{"name": "f"}], "tools": [TOOL]}, "functions", "option_conflict"),
        ({"function_call": {"name": "f"}}, "function_call", "tools_invalid"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, None, "tools_invalid"),
        ({"tools": [{"type": "function"}]}, None, "tools_invalid"),
        ({"n": 99}, "n", "invalid_request"),
        ({"messages": []}, "messages", "invalid_request"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "invalid_request"),
        (_with_part(text="x"), "messages.0.content.0.type", "missing_field"),
        (_with_part(type="image_url", image_url={"url": "x"}), "messages.0.content.0", "unsupported_content"),
        ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options", "invalid_request"),
    ],
)
def test_invalid_requests_are_explained(
    client: openai.OpenAI, change: dict[str, Any], param: str | None, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="demo", messages=MESSAGES, extra_body=change)
    assert (error.value.code, error.value.param) == (code, param)
    assert error.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ({"temperatur": 1}, "temperature?"),
        ({"method": "modle"}, "'model'"),
        ({"draft_window": 64}, "--draft-window"),
        ({"num_ctx": 4096}, "--context"),
        ({"keep_alive": "5m"}, "--idle-unload"),
        ({"prompt": "hi"}, "POST /v1/completions"),
    ],
)
def test_errors_name_what_to_use_instead(client: openai.OpenAI, change: dict[str, Any], advice: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="demo", messages=MESSAGES, extra_body=change)
    assert advice in error.value.message


@pytest.mark.parametrize("stream", [False, True])
def test_too_long_prompts_report_the_sizes(client: openai.OpenAI, stream: bool) -> None:
    messages: Any = [{"role": "user", "content": "word " * 1500}]
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="demo", messages=messages, stream=stream)
    assert error.value.type == "exceed_context_size_error"
    assert error.value.param == "messages"
    body: Any = error.value.body
    assert body["n_ctx"] == 1024
    assert body["n_prompt_tokens"] > 1024
    # LiteLLM and opencode recognise the error by its second part.
    advice = (
        "but the context holds only 1,024; this model's maximum context length is 1024 tokens, so shorten"
        " it, or start the server with a larger --context$"
    )
    assert re.search(advice, error.value.message)


def test_too_long_prompts_name_the_field_of_the_operation(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="demo", prompt="word " * 1500)
    assert error.value.param == "prompt"
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(model="demo", input="word " * 1500)
    assert error.value.param == "input"


def test_deep_nesting_is_not_called_invalid_json(client: openai.OpenAI) -> None:
    nested: Any = {}
    for _ in range(300):
        nested = {"properties": {"a": nested}}
    with pytest.raises(openai.BadRequestError, match="nested"):
        client.chat.completions.create(model="demo", messages=MESSAGES, extra_body={"schema": nested})


def test_unknown_models_are_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="gpt-77", messages=MESSAGES)
    assert error.value.code == "model_not_found"
    assert "path" not in error.value.message
    with pytest.raises(openai.NotFoundError, match="edgespec models pull"):
        client.chat.completions.create(model="70b-q4", messages=MESSAGES)
    with pytest.raises(openai.NotFoundError, match="passwd"):
        client.chat.completions.create(model="/etc/passwd", messages=MESSAGES)


def test_models_are_listed(client: openai.OpenAI) -> None:
    models = {model.id: model for model in client.models.list()}
    assert models["demo"].created > 0
    assert models["demo"].meta["n_ctx"] == 1024  # type: ignore[attr-defined]
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nothing")


@pytest.mark.long
def test_concurrent_requests_get_their_own_replies(client: openai.OpenAI, plain: Runtime) -> None:
    questions = [f"{QUESTION} Answer {number}." for number in range(6)]
    expected = [
        plain.reply([{"role": "user", "content": q}], max_tokens=24, temperature=0.0).answer
        for q in questions
    ]
    replies: dict[str, str] = {}

    def ask(question: str) -> None:
        messages: Any = [{"role": "user", "content": question}]
        stream = client.chat.completions.create(model="demo", messages=messages, max_tokens=24, stream=True)
        replies[question] = text_of(stream)

    threads = [threading.Thread(target=ask, args=(question,)) for question in questions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [replies[question] for question in questions] == expected


def test_a_waiting_request_is_cancelled(
    server: HttpServer, http: httpx.Client, endless: dict[str, Any]
) -> None:
    body = {"messages": MESSAGES, **endless}
    with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        with httpx.Client(base_url=server.url) as impatient, pytest.raises(httpx.ReadTimeout):
            impatient.post("/v1/chat/completions", json=body, timeout=0.1)
        deadline = time.monotonic() + 60
        while 'requests_waiting{model="demo"} 0' not in http.get("/metrics").text:
            assert time.monotonic() < deadline
        assert next(line for line in lines if line)


@pytest.mark.long
def test_full_queue(endless: dict[str, Any]) -> None:
    with running(max_waiting=1) as server, httpx.Client(base_url=server.url) as client:
        body = {"messages": MESSAGES, "n": 2, "stream": True, **endless}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            refused = client.post("/v1/chat/completions", json={"messages": MESSAGES})
            assert next(line for line in lines if line)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) > 0
    assert refused.json()["error"]["code"] == "queue_full"


def test_stopping_ends_replies(endless: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.server.http_server._GRACE_SECONDS", 0.1)
    with running() as server, httpx.Client(base_url=server.url) as client:
        body = {"messages": MESSAGES, "n": 3, "stream": True, **endless}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.stop()
            *_, last = (line for line in lines if line)
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"
