"""With LongRoPE, key rotation depends on the context size, so a resize must not cross the threshold."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec import Runtime
from tests.backends.tiny_models import write_llama

PROMPT = [(7 * i * i + 11) % 250 + 5 for i in range(180)]


@pytest.fixture(autouse=True)
def small_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.loading.load_request.INITIAL_CONTEXT_TOKENS", 256)
    for module in ("memory.context_resize", "decode.session"):
        monkeypatch.setattr(f"edgespec.{module}.MIN_ROOM_TOKENS", 16)


def replies_of(runtime: Runtime) -> list[tuple[int, ...]]:
    vocabulary = runtime.vocabulary
    never = {token: -math.inf for token in range(vocabulary.size) if vocabulary.is_end(token)}
    replies = []
    for temperature in (0.0, 0.8):
        stream = runtime.stream_tokens(
            PROMPT, max_tokens=200, seed=3, logit_bias=never, temperature=temperature
        )
        for _ in stream:
            pass
        replies.append(tuple(stream.reply.tokens))
    return replies


@pytest.mark.long
@pytest.mark.parametrize(("first_trained", "begins"), [(300, 512), (2048, 256)])
def test_a_growing_context_gives_the_replies_of_a_full_one(
    first_trained: int, begins: int, tmp_path: Path
) -> None:
    path = str(write_llama(tmp_path / "tiny.gguf", context=2048, long_from=first_trained, layers=2))
    options: dict[str, Any] = {
        "draft": None,
        "context": 1024,
        "method": "none",
        "threads": 1,
        "prefix_cache": "none",
    }
    with edgespec.load(path, **options, reserve_full_context=True) as runtime:
        whole = replies_of(runtime)
    assert edgespec.plan(path, "none", context=1024).first_context_tokens == begins
    with edgespec.load(path, **options) as runtime:
        assert runtime.target.context_tokens == begins
        assert replies_of(runtime) == whole
        assert runtime.target.context_tokens > begins or begins == 512
