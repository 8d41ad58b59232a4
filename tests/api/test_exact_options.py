"""With options and events that change a model or its cache, a real model's replies equal plain decoding.

`test_exact_real.py` compares its other quantisations, and drafts with low-bit copies of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec import Reply, Runtime
from edgespec.api.loading import always_draft
from edgespec.memory.constants import DEFAULT_RESERVE_BYTES
from edgespec.memory.prefix_cache.store import ReuseCosts
from tests.backends.gguf_adapters import write_gguf_adapter
from tests.model.heads.published_dflash import write_dflash_head

QUESTION = "Count from one to ten, and then count from one to ten again."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "inhabitants": {"type": "integer"}},
    "required": ["city", "inhabitants"],
    "additionalProperties": False,
}
# Of SmolLM2.
SIZE, VOCAB = 576, 49_152
FIRST = 256
# A prompt that fits the first context, and leaves no room for a reply of TOKENS tokens.
LONG = [(7 * i * i + 11) % 900 + 50 for i in range(120)] * 2
TOKENS = 16


@contextmanager
def loaded(path: Path, **options: Any) -> Iterator[Runtime]:
    """Load a model, and check that it promises replies that are identical to plain decoding."""
    defaults: dict[str, Any] = {"draft": "none", "context": 2 * FIRST, "threads": 1, "measure_costs": False}
    with always_draft(), edgespec.load(str(path), **defaults | options) as runtime:
        assert runtime.target.exactness is not None
        assert runtime.target.exactness.bits
        yield runtime


def ask(runtime: Runtime, prompt: str | list[int], **options: Any) -> Reply:
    options = {"max_tokens": TOKENS, "seed": 2, "temperature": 0.8, **options}
    if isinstance(prompt, str):
        return runtime.generate(prompt, **options)
    return runtime.stream_tokens(prompt, **options).wait()


def check_same(runtime: Runtime, method: str, **options: Any) -> None:
    """Check that drafted replies equal plain decoding, and that tokens were drafted."""
    drafted = 0
    for temperature in (0.0, 0.8):
        plain = ask(runtime, QUESTION, method="none", temperature=temperature, **options)
        reply = ask(runtime, QUESTION, method=method, temperature=temperature, **options)
        assert reply.tokens == plain.tokens
        drafted += reply.stats.drafted_tokens
    assert drafted


# `backends/test_adapters.py` compares replies of the demo model with adapters in each run.
@pytest.mark.long
def test_an_adapter(smollm2: Path, tmp_path: Path) -> None:
    adapter = write_gguf_adapter(tmp_path / "style.gguf", smollm2, size=0.5)
    with loaded(smollm2, adapter=str(adapter)) as runtime:
        check_same(runtime, "suffix+ngram")
        weaker = {"style": 0.5}
        plain = ask(runtime, QUESTION, method="none", adapter_scales=weaker)
        assert ask(runtime, QUESTION, adapter_scales=weaker).tokens == plain.tokens
        assert ask(runtime, QUESTION, method="none").tokens != plain.tokens


def test_a_head_that_drafts_trees(smollm2: Path, tmp_path: Path) -> None:
    """Nearly all drafts of a random head are rejected."""
    write_dflash_head(tmp_path / "dflash", size=SIZE, vocab=VOCAB, states=(1, 15, 29))
    options: dict[str, Any] = {"methods": ("dflash",), "draft_branches": (3, 2)}
    with loaded(smollm2, head=str(tmp_path / "dflash"), **options) as runtime:
        check_same(runtime, "dflash")


def test_a_constraint(smollm2: Path) -> None:
    with loaded(smollm2) as runtime:
        check_same(runtime, "grammar", schema=SCHEMA)
        check_same(runtime, "suffix+ngram", schema=SCHEMA)


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start with a small context, so that a short reply makes it grow."""
    monkeypatch.setattr("edgespec.loading.load_request.INITIAL_CONTEXT_TOKENS", FIRST)
    for module in ("memory.context_resize", "decode.session"):
        monkeypatch.setattr(f"edgespec.{module}.MIN_ROOM_TOKENS", 16)


@pytest.mark.usefixtures("small_steps")
def test_a_context_that_grows_and_shrinks(smollm2: Path) -> None:
    with loaded(smollm2, method="suffix") as runtime:
        assert runtime.target.context_tokens == FIRST
        growing = ask(runtime, LONG)
        assert growing.stats.drafted_tokens
        assert growing.stats.growth_seconds
        assert runtime.target.context_tokens == 2 * FIRST
        runtime.clear_cache()
        assert ask(runtime, LONG, method="none").tokens == growing.tokens
        short = ask(runtime, QUESTION, method="none")
        # Memory becomes scarce while nothing is generated.
        runtime._session.memory_pressure.available = lambda: DEFAULT_RESERVE_BYTES - 1
        runtime._session._reclaim_memory(lambda: True)
        assert runtime.target.context_tokens == FIRST
        assert ask(runtime, QUESTION).tokens == short.tokens
        assert ask(runtime, LONG).tokens == growing.tokens


def test_a_prefix_from_disk(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(ReuseCosts, "saves_time", lambda _self, tokens, _bytes: tokens > 0)
    with loaded(smollm2, prefix_cache="disk") as runtime:
        chat = [*LONG, *ask(runtime, LONG, method="suffix").tokens, 50, 60, 70]
    with loaded(smollm2, prefix_cache="disk") as runtime:
        restored = ask(runtime, chat, method="suffix")
        assert restored.stats.cached_prompt_tokens >= len(LONG)
        assert restored.stats.drafted_tokens
        runtime.clear_cache()
        plain = ask(runtime, chat, method="none")
    assert plain.stats.cached_prompt_tokens == 0
    assert plain.tokens == restored.tokens
