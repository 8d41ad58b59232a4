"""Embeddings equal those of llama-cpp-python, and embedding occupies the session of a reply."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import llama_cpp
import numpy as np
import pytest
from numpy.typing import NDArray

import edgespec
from edgespec import RequestQueue, Runtime
from edgespec.backends.llamacpp.loading import model_params
from edgespec.errors import (
    BusyError,
    CancelledError,
    CapabilityError,
    ClosedError,
    ContextFullError,
    OptionError,
)
from edgespec.store.reference import resolve
from tests.api.questions import HOWTO
from tests.backends.tiny_models import write_lfm2, write_llama, write_mamba
from tests.cases import first
from tests.raising import raises

# The last text needs several passes.
TEXTS = ["How do I list files by size?", "x", "a b " * 240]
# With the same KV types as llama-cpp-python, only the order of additions differs.
SAME: dict[str, Any] = {"kv_type": "f16", "flash_attention": "off", "context": 1024}


def reference(path: str, texts: Sequence[str], pooling: int) -> list[NDArray[np.float64]]:
    """llama-cpp-python's embeddings, with edgespec's choice of kernels."""
    with patch.object(llama_cpp.llama_cpp, "llama_model_default_params", model_params):
        model = llama_cpp.Llama(
            path,
            embedding=True,
            pooling_type=pooling,
            n_ctx=1024,
            n_batch=1024,
            n_ubatch=1024,
            flash_attn=False,
            verbose=False,
        )
    try:
        return [np.array(model.embed(text, normalize=True)) for text in texts]
    finally:
        model.close()


def check_equal(runtime: Runtime, expected: Sequence[NDArray[np.float64]]) -> None:
    found = runtime.embed(TEXTS)
    assert [each.tokens for each in found][:2] == [
        len(runtime.vocabulary.tokenize(text, special=False, start=True)) for text in TEXTS[:2]
    ]
    for each, other in zip(found, expected, strict=True):
        assert each.vector.dtype == np.float32
        np.testing.assert_allclose(each.vector, other, atol=1e-6)


@pytest.mark.parametrize("parallel", first([2, 1]))
def test_vectors_equal_those_of_llama_cpp(parallel: int) -> None:
    expected = reference(str(resolve("demo").path), TEXTS, llama_cpp.LLAMA_POOLING_TYPE_MEAN)
    with edgespec.load("demo", "none", parallel=parallel, **SAME) as runtime:
        check_equal(runtime, expected)


@pytest.mark.long
@pytest.mark.parametrize("pooling", [gguf.PoolingType.MEAN, gguf.PoolingType.CLS, gguf.PoolingType.LAST])
def test_vectors_are_pooled_as_the_metadata_says(tmp_path: Path, pooling: gguf.PoolingType) -> None:
    path = str(write_llama(tmp_path / "model.gguf", layers=2, context=1024, pooling=pooling))
    with edgespec.load(path, "none", **SAME) as runtime:
        check_equal(runtime, reference(path, TEXTS, int(pooling)))


def test_models_that_rank_texts_are_refused(tmp_path: Path) -> None:
    path = str(write_llama(tmp_path / "model.gguf", pooling=gguf.PoolingType.RANK))
    with edgespec.load(path, "none") as runtime, raises(CapabilityError, code="embeddings_not_supported"):
        runtime.embed(TEXTS[:1])


@pytest.mark.parametrize("write", [write_mamba, write_lfm2])
def test_recurrent_models(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    path = str(write(tmp_path / "model.gguf"))
    with edgespec.load(path, "none", kv_type="f16", flash_attention="off") as runtime:
        expected = reference(path, TEXTS[:2], llama_cpp.LLAMA_POOLING_TYPE_MEAN)
        for each, other in zip(runtime.embed(TEXTS[:2]), expected, strict=True):
            np.testing.assert_allclose(each.vector, other, atol=1e-6)


def test_mlx_models_are_refused() -> None:
    with (
        edgespec.load("demo-mlx-draft", "none", context=256, exactness="off", measure_costs=False) as runtime,
        raises(CapabilityError, code="embeddings_not_supported"),
    ):
        runtime.embed(TEXTS[:1])


@pytest.fixture(scope="module")
def small() -> Iterator[Runtime]:
    with edgespec.load("demo", context=512, methods=("none", "model")) as runtime:
        yield runtime


@pytest.mark.long
@pytest.mark.parametrize("temperature", first([0.8, 0.0]))
def test_replies_do_not_change(small: Runtime, temperature: float) -> None:
    options: Any = {"max_tokens": 32, "temperature": temperature, "seed": 7, "method": "model"}
    before = small.generate(HOWTO, **options)
    first = small.embed(TEXTS[:2])
    after = small.generate(HOWTO, **options)
    assert after.tokens == before.tokens == small.generate(HOWTO, **{**options, "method": "none"}).tokens
    # The prompt came from the prefix cache, because the vectors needed the target's cache.
    assert after.stats.cached_prompt_tokens == after.stats.prompt_tokens - 1
    for each, other in zip(first, small.embed(TEXTS[:2]), strict=True):
        np.testing.assert_array_equal(each.vector, other.vector)


@pytest.mark.long
def test_texts_longer_than_the_context(small: Runtime) -> None:
    text = "word " * 600
    with raises(ContextFullError, "2 has") as error:
        small.embed(["One", text])
    assert error.value.context_tokens == 512
    (cut,) = small.embed([text], truncate=True)
    assert cut.tokens == 511
    tokens = small.vocabulary.tokenize(text, special=False, start=True)
    (same,) = small.embed([tokens[:511]])
    np.testing.assert_array_equal(cut.vector, same.vector)


def test_fewer_dimensions(small: Runtime) -> None:
    (whole,) = small.embed(TEXTS[:1])
    short = whole.shortened(16)
    np.testing.assert_allclose(np.linalg.norm(short.vector), 1.0, rtol=1e-6)
    np.testing.assert_allclose(short.vector @ whole.vector[:16], np.linalg.norm(whole.vector[:16]), rtol=1e-6)
    with raises(OptionError, "dimensions"):
        whole.shortened(len(whole.vector) + 1)


@pytest.mark.parametrize(
    ("texts", "code", "message"),
    [
        ("One", "option_invalid", "texts"),
        ([""], "prompt_empty", "text 1"),
        (["One", []], "prompt_empty", "text 2"),
        ([[10**9]], "token_unknown", "text 1"),
        ([3], "option_invalid", "token IDs"),
    ],
)
def test_invalid_texts_are_refused(small: Runtime, texts: Any, code: str, message: str) -> None:
    with raises(OptionError, message, code=code):
        small.embed(texts)
    assert small.embed([]) == []


def test_embedding_occupies_the_session_of_a_reply(small: Runtime) -> None:
    stream = small.stream(HOWTO, max_tokens=20)
    next(iter(stream))
    with pytest.raises(BusyError):
        small.embed(TEXTS[:1])
    stream.cancel()
    stream.wait()
    small.embed(TEXTS[:1])


def test_progress_cancels(small: Runtime) -> None:
    with pytest.raises(CancelledError):
        small.embed(TEXTS, progress=lambda *_: False)
    assert len(small.embed(TEXTS[:1])) == 1


class TestQueue:
    @pytest.mark.long
    def test_texts_and_replies_take_turns(self, small: Runtime) -> None:
        expected = small.embed(TEXTS)
        reply = small.generate(HOWTO, max_tokens=16, temperature=0.0)
        with RequestQueue(small) as queue:
            queued = [
                (queue.stream(HOWTO, max_tokens=16, temperature=0.0), queue.embed(TEXTS)) for _ in range(2)
            ]
            for queued_reply, embeddings in queued:
                assert queued_reply.wait().tokens == reply.tokens
                for found, other in zip(embeddings.wait(), expected, strict=True):
                    np.testing.assert_array_equal(found.vector, other.vector)

    def test_errors_reach_the_caller(self, small: Runtime) -> None:
        with RequestQueue(small) as queue, raises(OptionError, "1 is", code="prompt_empty"):
            queue.embed([""]).wait()

    def test_waiting_and_running_work_can_be_cancelled(self, small: Runtime) -> None:
        started, released = threading.Event(), threading.Event()

        def progress(_what: str, _fraction: float) -> bool:
            started.set()
            return released.wait(60)

        small.clear_cache()
        with RequestQueue(small) as queue:
            running = queue.stream(HOWTO, max_tokens=4, progress=progress)
            assert started.wait(60)
            waiting, closed = queue.embed(TEXTS), queue.embed(TEXTS)
            waiting.cancel()
            with pytest.raises(CancelledError):
                waiting.wait()
            assert queue.waiting == 1
            released.set()
            running.wait()
            closed.cancel()
        with pytest.raises((CancelledError, ClosedError)):
            closed.wait()
