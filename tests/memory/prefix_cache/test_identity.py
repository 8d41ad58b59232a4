"""A model whose KV cache has another format does not reuse prefixes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.memory.prefix_cache.disk import prefix_cache_folder
from edgespec.memory.prefix_cache.store import ReuseCosts
from tests.backends.tiny_models import write_llama
from tests.memory.prefix_cache.helpers import ask

TEXT = [(7 * i * i + 11) % 250 + 5 for i in range(300)]
# So much of it is kept, whatever it is read in.
KEPT = 256
LOADED: dict[str, Any] = {"draft": None, "method": "none", "threads": 1, "exactness": "off"}


@pytest.fixture(autouse=True)
def keeps_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr(ReuseCosts, "saves_time", lambda _self, tokens, _bytes: tokens > 0)


def said(
    path: str, context: int, *, prefix_cache: str = "disk", **others: Any
) -> tuple[int, tuple[int, ...]]:
    """Load the model for one reply. Return the number of cached prompt tokens, and the reply's tokens."""
    with edgespec.load(path, context=context, prefix_cache=prefix_cache, **{**LOADED, **others}) as runtime:
        tokens = ask(runtime, [*TEXT, 9], max_tokens=20, seed=1, temperature=0.8).tokens
        return runtime.memory().prefix_cache.reused_tokens, tokens


def check_apart(path: str, small: int, large: int) -> None:
    fresh = {context: said(path, context, prefix_cache="none")[1] for context in (small, large)}
    assert said(path, small) == (0, fresh[small])
    assert said(path, large) == (0, fresh[large])
    # Neither took the other's files away.
    for context in (small, large):
        not_read, tokens = said(path, context)
        assert not_read >= KEPT
        assert tokens == fresh[context]


def test_short_and_long_longrope_factors_do_not_share_prefixes(tmp_path: Path) -> None:
    check_apart(str(write_llama(tmp_path / "tiny.gguf", context=2048, long_from=512, layers=2)), 512, 1024)


def test_exact_and_unrestricted_passes_do_not_share_prefixes(tmp_path: Path) -> None:
    path = str(write_llama(tmp_path / "tiny.gguf", context=2048, layers=2))
    for exactness in ("bits", "off"):
        assert said(path, 512, exactness=exactness)[0] == 0
        assert said(path, 512, exactness=exactness)[0] >= KEPT


def test_context_lengths_share_prefixes(tmp_path: Path) -> None:
    path = str(write_llama(tmp_path / "tiny.gguf", context=2048, layers=2))
    run = partial(said, path)
    first, second = run(512), run(1024)
    assert (first[0], second[0] >= KEPT) == (0, True)
    assert first[1] == second[1]
    assert len(list(prefix_cache_folder().glob("*/"))) == 1


def test_thread_counts_do_not_change_replies_after_a_cached_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --threads, the number of threads depends on the cores available to the process."""
    path = str(write_llama(tmp_path / "tiny.gguf", context=2048, layers=2))
    run = partial(said, path, 512, threads=None, kv_type="f16")
    for threads in (2, 1):
        monkeypatch.setattr(
            "edgespec.backends.llamacpp.loading.default_threads", lambda _, some=threads: some
        )
        first, fresh = run(), run(prefix_cache="none")
        assert first[1] == fresh[1]
        again = run()
        assert again[0] >= KEPT
        assert again[1] == fresh[1]
