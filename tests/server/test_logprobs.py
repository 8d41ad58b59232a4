"""Log-probabilities: their bytes form the text, and any API's request fields are accepted."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from edgespec.decode.reply import TokenLogprobs
from edgespec.server.openai.logprobs import TextOffsets, text_logprobs
from tests.server.conftest import MESSAGES, QUESTION

TEXTS = ["🙂日", "🙂ab", "é", "plain text", "👩‍💻 ż"]


def chat(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    reply = http.post("/v1/chat/completions", json={"messages": MESSAGES, **fields})
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def joined(tokens: list[dict[str, Any]]) -> str:
    return bytes(byte for token in tokens for byte in token["bytes"]).decode()


@pytest.mark.long
@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_the_tokens_are_the_text(http: httpx.Client, text: str) -> None:
    constrained = {"choice": [text], "max_tokens": 60}
    choice = chat(http, logprobs=True, top_logprobs=3, **constrained)
    tokens = choice["logprobs"]["content"]
    assert choice["finish_reason"] == "stop"
    assert joined(tokens) == choice["message"]["content"] == text
    for token in tokens:
        assert len({each["token"] for each in token["top_logprobs"]}) == 3
        if token["token"].startswith("bytes:"):
            assert token["token"] == "bytes:" + "".join(f"\\x{byte:02x}" for byte in token["bytes"])
    body = {"input": QUESTION, "top_logprobs": 2, **constrained}
    (item,) = http.post("/v1/responses", json=body).json()["output"]
    assert joined(item["content"][0]["logprobs"]) == text
    body = {"messages": MESSAGES, "logprobs": True, "stream": False, **constrained}
    assert joined(http.post("/api/chat", json=body).json()["logprobs"]) == text


@pytest.mark.long
@pytest.mark.parametrize(("start", "length"), [(0, 3), (5, 1), (5, 7), (9, 2), (12, 20), (0, 0)])
def test_the_tokens_of_a_stop_string_are_left_out(http: httpx.Client, start: int, length: int) -> None:
    text = chat(http, max_tokens=20)["message"]["content"]
    stop = text[start : start + length] or f"{text[-1]}nowhere"
    options = {"stop": [stop], "max_tokens": 20}
    choice = chat(http, logprobs=True, top_logprobs=1, **options)
    content = choice["message"]["content"]
    assert content == text.partition(stop)[0]
    assert joined(choice["logprobs"]["content"]) == content
    streamed = http.post(
        "/v1/chat/completions", json={"messages": MESSAGES, "logprobs": True, "stream": True, **options}
    )
    choices = [json.loads(line[6:])["choices"][0] for line in streamed.text.split("\n\n") if "{" in line]
    so_far = spelled = ""
    for each in choices:
        so_far += each["delta"].get("content") or ""
        parts = (each.get("logprobs") or {}).get("content", [])
        spelled += joined(parts)
        # Streams do not show the log-probabilities of withheld text either.
        assert len(spelled) <= len(so_far)
    assert spelled == so_far == content
    body = {"input": QUESTION, "top_logprobs": 1, **options}
    for item in http.post("/v1/responses", json=body).json()["output"]:
        assert joined(item["content"][0]["logprobs"]) == item["content"][0]["text"]
    body = {"messages": MESSAGES, "logprobs": True, "stream": False, **options}
    reply = http.post("/api/chat", json=body).json()
    assert joined(reply.get("logprobs", [])) == reply["message"]["content"]


@pytest.mark.parametrize(("start", "length"), [(0, 2), (3, 1), (4, 5), (7, 12)])
def test_completions_leave_the_tokens_of_a_stop_string_out(
    http: httpx.Client, start: int, length: int
) -> None:
    body = {"prompt": "Use `ls` to", "logprobs": 1, "min_tokens": 24, "max_tokens": 24}
    text = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    stop = text[start : start + length]
    assert stop
    body = {**body, "stop": stop}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    logprobs = choice["logprobs"] or {"tokens": [], "text_offset": []}
    tokens = logprobs["tokens"]
    assert choice["finish_reason"] == "stop"
    assert stop not in choice["text"]
    assert "".join(tokens) == choice["text"]
    assert logprobs["text_offset"] == [len("".join(tokens[:at])) for at in range(len(tokens))]


@pytest.mark.long
@pytest.mark.parametrize("text", TEXTS)
def test_offsets_of_completions(http: httpx.Client, text: str) -> None:
    body = {"prompt": QUESTION, "choice": [text], "logprobs": 2, "max_tokens": 60}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == text
    *tokens, end = zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
    assert end[1] == len(text)
    characters = iter(text.encode())
    for token, offset in tokens:
        raw = bytes.fromhex(token[6:].replace("\\x", "")) if token.startswith("bytes:") else token.encode()
        read = bytes(next(characters) for _ in raw)
        assert read == raw
        assert offset <= len(text)
        if not token.startswith("bytes:"):
            assert text[offset:].startswith(token)
    assert next(characters, None) is None
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    streamed = [json.loads(line[6:])["choices"][0]["logprobs"] for line in lines]
    for name in ("tokens", "text_offset"):
        assert [each for part in streamed if part for each in part[name]] == logprobs[name]


def test_the_offset_of_a_part_of_a_character_is_that_of_the_character() -> None:
    pieces = [b"\xf0", b"\x9f", b"\x99", b"\x82", b"a", b"bc"]
    tokens = [TokenLogprobs(0, "", 0.0, raw=piece) for piece in pieces]
    result = text_logprobs([*tokens, TokenLogprobs(0, "", 0.0, raw=b"<end>", is_end=True)], TextOffsets(10))
    assert result["text_offset"] == [10, 10, 10, 10, 11, 12, 14]
    assert result["tokens"][:2] == ["bytes:\\xf0", "bytes:\\x9f"]


def test_a_number_asks_for_alternatives(http: httpx.Client) -> None:
    for number in (0, 2):
        tokens = chat(http, logprobs=number, max_tokens=2)["logprobs"]["content"]
        assert {len(token["top_logprobs"]) for token in tokens} == {number}
    assert chat(http, logprobs=False, max_tokens=2)["logprobs"] is None
    body = {"prompt": QUESTION, "max_tokens": 2}
    for fields in ({"logprobs": True, "top_logprobs": 2}, {"logprobs": 2}):
        choice = http.post("/v1/completions", json={**body, **fields}).json()["choices"][0]
        assert {len(each) for each in choice["logprobs"]["top_logprobs"]} == {2}
    reply = http.post(
        "/api/chat", json={"messages": MESSAGES, "logprobs": 2, "max_tokens": 2, "stream": False}
    )
    assert {len(token["top_logprobs"]) for token in reply.json()["logprobs"]} == {2}
    error = http.post("/v1/chat/completions", json={"messages": MESSAGES, "logprobs": 21})
    assert error.status_code == 400
    assert "logprobs" in error.text
