"""`echo` repeats the prompt, including the log-probabilities that evaluation programs read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from edgespec import Runtime
from edgespec.decode.reply import TokenLogprobs
from edgespec.server.http_server import HttpServer
from edgespec.server.openai.logprobs import spelled_in
from tests.server.conftest import QUESTION, check_disconnect_cancels, running

EMOJI = "Files 🙂 by 日本 size, é."
# The request that lm-evaluation-harness sends for the log-likelihood of a text.
EVALUATION: dict[str, Any] = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}


def choice_of(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    reply = http.post("/v1/completions", json=fields)
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def raw_bytes(token: str) -> bytes:
    is_part = token.startswith("bytes:")
    return bytes.fromhex(token[6:].replace("\\x", "")) if is_part else token.encode()


def streamed(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    with http.stream("POST", "/v1/completions", json={**fields, "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    return [json.loads(line[6:])["choices"][0] for line in lines]


@pytest.mark.long
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_with_openais_client(client: openai.OpenAI, plain: Runtime, max_tokens: int) -> None:
    tokens = plain.vocabulary.tokenize(EMOJI, special=True, start=True)
    prompt = plain.stream_tokens(tokens, prompt_logprobs=3, max_tokens=0).wait().prompt_logprobs
    completion = client.completions.create(
        model="demo", prompt=EMOJI, echo=True, logprobs=3, max_tokens=max_tokens
    )
    choice = completion.choices[0]
    without = client.completions.create(
        model="demo", prompt=EMOJI, max_tokens=max_tokens, logprobs=3
    ).choices[0]
    assert choice.text == EMOJI + without.text
    assert choice.finish_reason == without.finish_reason == "length"
    assert completion.usage
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (len(tokens), max_tokens)
    got = choice.logprobs
    assert got
    assert got.tokens
    assert got.token_logprobs
    assert got.top_logprobs
    assert got.text_offset
    count = len(tokens)
    assert {len(got.tokens), len(got.token_logprobs), len(got.top_logprobs), len(got.text_offset)} == {
        count + max_tokens
    }
    # The client's types do not allow null, but OpenAI's API returns it.
    firsts: list[Any] = [got.token_logprobs[0], got.top_logprobs[0]]
    assert firsts == [None, None]
    assert got.token_logprobs[1:count] == pytest.approx([each.logprob for each in prompt[1:]], abs=1e-3)
    for top, expected in zip(got.top_logprobs[1:count], prompt[1:], strict=True):
        assert len(top) == 3
        assert max(top.values()) == pytest.approx(expected.top[0].logprob, abs=1e-3)
    if max_tokens:
        assert without.logprobs
        assert without.logprobs.text_offset
        assert got.tokens[count:] == without.logprobs.tokens
        assert got.text_offset[count:] == [len(EMOJI) + offset for offset in without.logprobs.text_offset]
    else:
        assert without.logprobs is None


@pytest.mark.parametrize("prompt", [EMOJI, "🙂", "a", "  two spaces\n", "<|im_end|>after", "日本日本", "�é"])
def test_offsets_begin_each_token_in_the_text(http: httpx.Client, prompt: str) -> None:
    choice = choice_of(http, prompt=prompt, echo=True, logprobs=2, max_tokens=0)
    logprobs = choice["logprobs"]
    assert choice["text"] == prompt
    characters = iter(prompt.encode())
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        raw = raw_bytes(token)
        assert bytes(next(characters) for _ in raw) == raw
        if not token.startswith("bytes:"):
            assert prompt[offset:].startswith(token)
        else:
            assert raw in prompt[offset:].encode()[: len(raw) + 3]
    assert next(characters, None) is None


def test_prompts_as_tokens_and_lists(http: httpx.Client, plain: Runtime) -> None:
    texts = [QUESTION, EMOJI]
    lists = [plain.vocabulary.tokenize(text, special=True, start=True) for text in texts]
    for max_tokens in (0, 1):
        fields = {**EVALUATION, "max_tokens": max_tokens}
        alone = [choice_of(http, prompt=text, **fields) for text in texts]
        for prompt in (texts, lists):
            choices = http.post("/v1/completions", json={"prompt": prompt, **fields}).json()["choices"]
            for index, (got, expected) in enumerate(zip(choices, alone, strict=True)):
                assert got["index"] == index
                assert (got["text"], got["logprobs"]) == (expected["text"], expected["logprobs"])
        assert choice_of(http, prompt=lists[1], **fields)["logprobs"] == alone[1]["logprobs"]


def test_what_evaluation_programs_compute(http: httpx.Client, plain: Runtime) -> None:
    """The model's own greedy reply is more likely than another text."""
    tokens = plain.vocabulary.tokenize(QUESTION, special=False, start=True)
    reply = plain.stream_tokens(tokens, max_tokens=6, temperature=0.0).wait()
    own, other = list(reply.tokens), list(reversed(tokens))[:6]
    likelihoods = []
    for continuation, is_greedy in ((own, True), (other, False)):
        choice = choice_of(http, prompt=[[*tokens, *continuation]], **EVALUATION)
        logprobs = choice["logprobs"]
        values = logprobs["token_logprobs"][len(tokens) : -1]
        tops = logprobs["top_logprobs"][len(tokens) : -1]
        assert len(values) == len(continuation)
        assert all(value == max(top.values()) for value, top in zip(values, tops, strict=True)) == is_greedy
        likelihoods.append(sum(values))
    assert likelihoods[0] > likelihoods[1]


@pytest.mark.long
@pytest.mark.parametrize("max_tokens", [0, 4])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_streams(http: httpx.Client, max_tokens: int, logprobs: int | None) -> None:
    fields = {"prompt": EMOJI, "echo": True, "max_tokens": max_tokens, "logprobs": logprobs}
    whole = choice_of(http, **fields)
    parts = streamed(http, **fields)
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert whole["text"].startswith(EMOJI)
    assert parts[-1]["finish_reason"] == whole["finish_reason"]
    if logprobs is None:
        assert whole["logprobs"] is None
        assert not any(part["logprobs"] for part in parts)
    else:
        for name, values in whole["logprobs"].items():
            assert [each for part in parts if part["logprobs"] for each in part["logprobs"][name]] == values


def test_nothing_to_generate(http: httpx.Client) -> None:
    assert choice_of(http, prompt="a", max_tokens=0)["text"] == ""
    assert choice_of(http, prompt="a", max_tokens=0.0, echo=True)["text"] == "a"
    assert choice_of(http, prompt="a", n_predict=0, echo=True)["text"] == "a"
    for field, value in (("max_tokens", -2), ("max_tokens", False), ("logprobs", 21)):
        body = {"prompt": "a", "echo": True, "logprobs": 1, field: value}
        error = http.post("/v1/completions", json=body)
        assert error.status_code == 400
        assert field in error.json()["error"]["message"]
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}
    assert http.post("/v1/chat/completions", json=body).status_code == 400


def test_a_prompt_longer_than_the_context_is_refused(client: openai.OpenAI) -> None:
    for prompt in ("word " * 2000, [5] * 1025):
        with pytest.raises(openai.BadRequestError, match="the context holds only 1,024"):
            client.completions.create(model="demo", prompt=prompt, **EVALUATION)


def test_a_reply_afterwards_is_the_same(client: openai.OpenAI, plain: Runtime) -> None:
    expected = plain.generate(QUESTION, raw=True, max_tokens=16, temperature=0.0).text
    for prompt in (QUESTION, EMOJI):
        client.completions.create(model="demo", prompt=prompt, **EVALUATION)
        reply = client.completions.create(model="demo", prompt=QUESTION, max_tokens=16).choices[0]
        assert reply.text == expected


@pytest.fixture(scope="module")
def slow_server() -> Iterator[HttpServer]:
    """A server that reads one token per pass, with a large context."""
    with running(load_options={"method": "none", "draft": "none", "context": 16384}) as server:
        yield server


@pytest.mark.long
def test_a_client_that_disconnects_ends_the_work(slow_server: HttpServer) -> None:
    body = {"prompt": [11] * 16000, "echo": True, "logprobs": 20, "max_tokens": 0, "stream": False}
    with httpx.Client(base_url=slow_server.url, timeout=120) as http:
        check_disconnect_cancels(slow_server, http, "/v1/completions", body)


@pytest.mark.parametrize(
    ("text", "tokens", "expected"),
    [
        # The space that SentencePiece puts before the text, also as a separate token.
        ("Hello you", [b" Hello", b" you"], [b"Hello", b" you"]),
        ("日本", [b" ", "日本".encode()], [b"", "日本".encode()]),
        # The BOS token that the model needs, and the one in the text.
        ("Hi", [b"<s>", b"Hi"], [b"", b"Hi"]),
        ("<s>Hi", [b"<s>", b"Hi"], [b"<s>", b"Hi"]),
        ("🙂a", [b"\xf0\x9f", b"\x99\x82", b"a"], [b"\xf0\x9f", b"\x99\x82", b"a"]),
        # A tokenizer that changes characters.
        ("Élan vital", ["élan".encode(), b" vital"], ["Élan".encode(), b" vital"]),
    ],
)
def test_what_each_token_stands_for(text: str, tokens: list[bytes], expected: list[bytes]) -> None:
    pieces = [b"" if each == b"<s>" else each for each in tokens]
    given = [TokenLogprobs(index, "", 0.0, raw=raw) for index, raw in enumerate(tokens)]
    assert spelled_in(text, given, pieces.__getitem__) == expected
