"""Embeddings through the unmodified clients of OpenAI and Ollama."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np
import ollama
import openai
import pytest
from numpy.typing import NDArray

from edgespec import Runtime
from edgespec.server.http_server import HttpServer
from tests.backends.tiny_models import write_llama
from tests.server.conftest import MESSAGES, running

TEXTS = ["How do I list files by size?", "Make a folder"]


@pytest.fixture(scope="module")
def expected(plain: Runtime) -> list[NDArray[np.float32]]:
    return [each.vector for each in plain.embed(TEXTS)]


@pytest.fixture(scope="module")
def counts(plain: Runtime) -> list[int]:
    return [each.tokens for each in plain.embed(TEXTS)]


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_openai_vectors(
    http: httpx.Client, client: openai.OpenAI, expected: list[Any], counts: list[int], encoding: Any
) -> None:
    result = client.embeddings.create(model="demo", input=TEXTS, encoding_format=encoding)
    assert [item.index for item in result.data] == [0, 1]
    assert result.usage.prompt_tokens == result.usage.total_tokens == sum(counts)
    if encoding == "float":
        for item, vector in zip(result.data, expected, strict=True):
            np.testing.assert_array_equal(np.array(item.embedding, np.float32), vector)
    raw = http.post("/v1/embeddings", json={"input": TEXTS[0], "encoding_format": encoding}).json()
    assert isinstance(raw["data"][0]["embedding"], str if encoding == "base64" else list)
    assert raw["model"] == "demo"
    assert raw["id"].startswith("embd-")  # Mistral's clients require an id.


def test_openai_decodes_its_default_encoding(client: openai.OpenAI, expected: list[Any]) -> None:
    # The client asks for base64 by itself.
    (item,) = client.embeddings.create(model="demo", input=TEXTS[0]).data
    np.testing.assert_array_equal(np.array(item.embedding, np.float32), expected[0])


def test_openai_tokens(client: openai.OpenAI, plain: Runtime, expected: list[Any]) -> None:
    tokens = [plain.vocabulary.tokenize(text, special=False, start=True) for text in TEXTS]
    (one,) = client.embeddings.create(model="demo", input=tokens[0]).data
    both = client.embeddings.create(model="demo", input=tokens).data
    for item, vector in zip((one, *both), (expected[0], *expected), strict=True):
        np.testing.assert_array_equal(np.array(item.embedding, np.float32), vector)


def test_fewer_dimensions(client: openai.OpenAI, server: HttpServer, plain: Runtime) -> None:
    (short,) = [each.shortened(8).vector for each in plain.embed(TEXTS[:1])]
    (item,) = client.embeddings.create(model="demo", input=TEXTS[0], dimensions=8).data
    np.testing.assert_array_equal(np.array(item.embedding, np.float32), short)
    with ollama.Client(server.url) as theirs:
        (vector,) = theirs.embed("demo", TEXTS[0], dimensions=8).embeddings
    np.testing.assert_array_equal(np.array(vector, np.float32), short)


def test_ollama_vectors(server: HttpServer, expected: list[Any], counts: list[int]) -> None:
    with ollama.Client(server.url) as client:
        both = client.embed("demo", TEXTS, keep_alive="5m", options={"num_ctx": 2048})
        assert both.prompt_eval_count == sum(counts)
        assert both.total_duration
        vectors = [*both.embeddings, *client.embed("demo", TEXTS[0]).embeddings]
        vectors.append(client.embeddings("demo", TEXTS[0]).embedding)
        for vector, other in zip(vectors, (*expected, expected[0], expected[0]), strict=True):
            np.testing.assert_array_equal(np.array(vector, np.float32), other)
        assert client.embed("demo", []).embeddings == []
        with pytest.raises(ollama.ResponseError, match="1,501") as error:
            client.embed("demo", "word " * 1500)
        assert error.value.status_code == 400
        assert client.embed("demo", "word " * 1500, truncate=True).prompt_eval_count == 1023


@pytest.mark.parametrize(
    ("body", "code", "quoted"),
    [
        ({}, "missing_field", "input"),
        ({"input": []}, "invalid_request", "0 texts"),
        ({"input": ""}, "prompt_empty", "text 1"),
        ({"input": ["One", ""]}, "prompt_empty", "text 2"),
        ({"input": [[1, 2], []]}, "prompt_empty", "text 2"),
        ({"input": [99999999]}, "token_unknown", "99999999"),
        ({"input": [1, "One"]}, "invalid_request", "input"),
        ({"input": ["x"] * 2049}, "invalid_request", "2049 texts"),
        ({"input": "One", "dimensions": 0}, "invalid_request", "dimensions"),
        ({"input": "One", "dimensions": 100000}, "option_invalid", "dimensions"),
        ({"input": "One", "encoding_format": "int8"}, "invalid_request", "encoding_format"),
        ({"input": "One", "dimension": 1}, "unknown_field", "dimensions?"),
        ({"input": "word " * 1500}, "context_length_exceeded", "1,501"),
    ],
)
def test_invalid_requests_are_explained(
    http: httpx.Client, body: dict[str, Any], code: str, quoted: str
) -> None:
    reply = http.post("/v1/embeddings", json=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["code"] == code
    assert quoted in error["message"]


@pytest.mark.long
def test_models_without_embeddings(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "ranker.gguf", pooling=gguf.PoolingType.RANK)
    with running(target=str(path), load_options={"context": 256}) as server:
        reply = httpx.post(f"{server.url}/v1/embeddings", json={"input": "One"}, timeout=60)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "embeddings_not_supported"


@pytest.mark.long
def test_vectors_and_replies_at_the_same_time(client: openai.OpenAI, expected: list[Any]) -> None:
    texts: list[str] = []

    def chat() -> None:
        reply = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=32)
        texts.append(reply.choices[0].message.content or "")

    threads = [threading.Thread(target=chat) for _ in range(3)]
    for thread in threads:
        thread.start()
        (item,) = client.embeddings.create(model="demo", input=TEXTS[0]).data
        np.testing.assert_array_equal(np.array(item.embedding, np.float32), expected[0])
    for thread in threads:
        thread.join(60)
    assert len(texts) == 3
    assert len(set(texts)) == 1


@pytest.mark.long
def test_a_disconnect_ends_the_work(server: HttpServer, http: httpx.Client) -> None:
    body = {"input": ["word " * 1000] * 1500}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=0.5)
    started = time.monotonic()
    assert http.post("/v1/embeddings", json={"input": "One"}).status_code == 200
    assert time.monotonic() - started < 30
