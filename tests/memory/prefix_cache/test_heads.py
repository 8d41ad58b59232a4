"""Heads keep drafting after a prefix is restored, even in a later process, and never change a reply."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec import Reply, Runtime
from edgespec.backends import llamacpp, mlx
from edgespec.decode.drafter_set import DrafterSet
from edgespec.methods.base import LoadedHead
from edgespec.methods.draft_cache import HeadCache
from edgespec.methods.model.drafter import ModelDrafter
from edgespec.model.base import Head, LanguageModel, LoadOptions
from edgespec.model.hidden_states import HeadModel
from tests.backends.head_histories import first_logits
from tests.backends.mlx.tiny_checkpoints import ROWS, write_checkpoint
from tests.backends.tiny_heads import write_eagle
from tests.backends.tiny_models import WORDS, write_llama
from tests.cases import covering
from tests.memory.prefix_cache.helpers import ask, keeper
from tests.model.heads.published import write_head
from tests.model.heads.residual_files import Attention, Layout, random_arrays, write_heads

PROMPT = np.random.default_rng(0).integers(3, 250, 120).tolist()
MEDUSA = Layout("medusa")


class Files(NamedTuple):
    """A target, two kinds of heads for it, and another EAGLE head with larger keys and values."""

    target: Path
    heads: dict[str, Path]
    other: Path

    def load(self) -> LanguageModel:
        load = mlx.load if self.target.is_dir() else llamacpp.load
        return load(str(self.target), "target", LoadOptions(context_tokens=512))

    def head(self, model: LanguageModel, method: str = "eagle") -> HeadModel:
        return model.self_draft(Head(method, self.heads[method]))  # type: ignore[return-value]


def _gguf(folder: Path) -> Files:
    target = write_llama(folder / "target.gguf", layers=3)
    arrays = random_arrays(MEDUSA, 32, 259 + len(WORDS), Attention(heads=2, kv_heads=2))
    heads = {
        "eagle": write_eagle(folder / "head.gguf", layers=(0, 1, 2)),
        "medusa": write_heads(folder / "medusa", MEDUSA, arrays),
    }
    return Files(target, heads, write_eagle(folder / "other.gguf", layers=(1, 1, 2)))


def _mlx(folder: Path) -> Files:
    write_checkpoint(folder / "target", "llama", config={"num_hidden_layers": 3})
    options: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    arrays = random_arrays(MEDUSA, 64, ROWS, Attention(heads=4, kv_heads=2))
    heads = {
        "eagle": write_head(folder / "head", "SafeAILab", size=64, vocab=ROWS, draft_vocab=200, **options),
        "medusa": write_heads(folder / "medusa", MEDUSA, arrays),
    }
    return Files(folder / "target", heads, write_head(folder / "other", "EAGLE-1", size=64, vocab=ROWS))


@pytest.fixture(scope="module", params=[_gguf, _mlx], ids=["llama.cpp", "MLX"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    made: Files = request.param(tmp_path_factory.mktemp("heads"))
    return made


def _runtime(files: Files, folder: Path, branches: tuple[int, ...] = ()) -> Runtime:
    """Create a runtime with both heads and a prefix cache on disk."""
    model = files.load()
    caches = [HeadCache(files.head(model, method), method) for method in files.heads]
    drafters = {
        cache.name: ModelDrafter(
            cache.model, model.facts.vocab_size, branches=branches, name=cache.name, cache=cache
        )
        for cache in caches
    }
    heads = [LoadedHead(cache.name, "", cache) for cache in caches]
    drafter_set = DrafterSet(model, drafters, heads=heads)
    return Runtime(model, None, drafter_set, prefix_cache=keeper(model, folder, heads=caches))


def _ask(runtime: Runtime, prompt: list[int], method: str, temperature: float) -> Reply:
    return ask(runtime, prompt, method=method, temperature=temperature, seed=5, max_tokens=24)


@pytest.mark.parametrize(
    ("method", "temperature", "branches"), covering(("eagle", "medusa"), (0.8, 0.0), ((2, 2), ()))
)
def test_replies_and_drafts_are_those_of_a_fresh_run(
    files: Files, tmp_path: Path, method: str, temperature: float, branches: tuple[int, ...]
) -> None:
    with _runtime(files, tmp_path, branches) as runtime:
        first = _ask(runtime, PROMPT, method, temperature)
    shorter = [*PROMPT[:90], 7, 8]
    with _runtime(files, tmp_path, branches) as runtime:
        again = _ask(runtime, PROMPT, method, temperature)
        shortened = _ask(runtime, shorter, method, temperature)
        assert runtime.memory().prefix_cache.hits
        runtime.clear_cache()
        expected = _ask(runtime, shorter, method, temperature)
        plain = _ask(runtime, shorter, "none", temperature)
    assert again.stats.cached_prompt_tokens >= len(PROMPT) - 2
    assert shortened.stats.cached_prompt_tokens == 89
    assert again.tokens == first.tokens
    assert shortened.tokens == expected.tokens == plain.tokens
    for reply, fresh in ((again, first), (shortened, expected)):
        assert reply.stats.drafted_tokens == fresh.stats.drafted_tokens
        assert reply.stats.accepted_per_position == fresh.stats.accepted_per_position


def test_the_size_of_the_heads_is_counted(files: Files) -> None:
    model = files.load()
    head = files.head(model)
    cache = HeadCache(head)
    model.prefill(PROMPT)
    cache.begin([*PROMPT, 9])
    cache.prefill()
    sizes = []
    for heads in ((), (cache,)):
        prefixes = keeper(model, heads=heads)
        prefixes.add(PROMPT)
        sizes.append(prefixes.usage().memory_bytes)
    assert sizes[1] - sizes[0] >= cache.token_bytes * (len(PROMPT) - 1) > 0
    head.close()
    model.close()


def _restored(files: Files, copy: bytes) -> tuple[int, bool]:
    """Restore a target and this copy of a head. Return the head's length, and whether it drafts later."""
    model = files.load()
    model.prefill(PROMPT)
    snapshot = model.snapshot()
    model.truncate(0)
    head = files.head(model)
    cache = HeadCache(head)
    model.restore(snapshot)
    cache.restore(PROMPT, copy)
    length = head.length
    text = [*PROMPT, *range(20, 30)]
    model.prefill(text[len(PROMPT) :])
    drafts = bool(np.isfinite(first_logits(head, cache, [*text, 4])).any())
    head.close()
    model.close()
    return length, drafts


def _copy(files: Files, path: Path) -> bytes:
    model = files.load()
    head: HeadModel = model.self_draft(Head("eagle", path))  # type: ignore[assignment]
    model.prefill(PROMPT)
    copy = HeadCache(head).copy(PROMPT, 0)
    head.close()
    model.close()
    return copy


def test_a_head_without_its_own_state_begins_after_the_prefix(files: Files) -> None:
    copy = _copy(files, files.heads["eagle"])
    assert _restored(files, copy) == (len(PROMPT), True)
    for damaged in (b"", copy[:30], copy[:-1], copy + b"x", copy[:24]):
        assert _restored(files, damaged) == (0, True)


def test_the_state_of_another_head_does_no_harm(files: Files) -> None:
    assert _restored(files, _copy(files, files.other))[1]


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_random_bytes_are_never_an_error(files: Files, copy: bytes) -> None:
    model = files.load()
    head = files.head(model)
    model.prefill(PROMPT[:40])
    HeadCache(head).restore(PROMPT[:40], copy)
    head.close()
    model.close()
