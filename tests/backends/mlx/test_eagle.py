"""EAGLE heads in every published layout follow an MLX target through any history, and change no reply."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import edgespec
from edgespec.api.loading import always_draft
from edgespec.backends import mlx
from edgespec.backends.mlx.eagle import EagleHead, estimate_head
from edgespec.backends.mlx.evaluation import release_thread_state
from edgespec.backends.mlx.model import MlxModel
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError, CapabilityError, ClosedError, MemoryBudgetError, ModelFileError
from edgespec.methods.draft_cache import HeadCache
from edgespec.model.base import Head, LoadOptions
from edgespec.model.hidden_states import POST_NORM
from edgespec.store.catalogue import models_folder
from tests.backends.head_histories import ROUNDS, Round, check_history, check_same_replies, first_logits
from tests.backends.mlx.tiny_checkpoints import ROWS, write_checkpoint
from tests.cases import covering
from tests.model.heads.published import LAYOUTS, Layout, write_head
from tests.raising import raises

CONTEXT = 512
SIZE = 64
KINDS = ("llama", "gemma3", "qwen3_next", "llama_sliding", "lfm2")
# These exist in all tiny models.
STATES = [0, 1, 2]


class Files:
    """Targets and heads, each written when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def target(self, kind: str, **options: Any) -> Path:
        path = self._folder / f"{kind}{len(options) or ''}"
        return path if path.exists() else write_checkpoint(path, kind, **options)

    def head(self, layout: Layout = "SafeAILab", **options: Any) -> Path:
        path = self._folder / f"{layout}{'-'.join(map(str, options))}"
        if path.exists():
            return path
        draft_vocab = None if layout == "EAGLE-1" else 200
        defaults: dict[str, Any] = {"size": SIZE, "vocab": ROWS, "draft_vocab": draft_vocab}
        if layout != "EAGLE-1":
            defaults["eagle_aux_hidden_state_layer_ids"] = STATES
        return write_head(path, layout, **{**defaults, **options})

    def load(self, kind: str = "llama", **options: Any) -> Any:
        return mlx.load(str(self.target(kind, **options)), kind, LoadOptions(context_tokens=CONTEXT))


def head_of(target: Any, path: Path) -> EagleHead:
    head = target.self_draft(Head("eagle", path))
    assert isinstance(head, EagleHead)
    return head


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("eagle"))


@pytest.fixture
def target(files: Files) -> Iterator[MlxModel]:
    model = files.load()
    yield model
    model.close()


@pytest.mark.long
@pytest.mark.parametrize(("kind", "layout"), covering(KINDS, ("SafeAILab", "EAGLE-1"), count=3))
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rounds=st.lists(ROUNDS, min_size=1, max_size=8), seed=st.integers(0, 1 << 16))
def test_a_draft_after_any_history_equals_that_of_a_fresh_head(
    files: Files, kind: str, layout: Layout, rounds: list[Round], seed: int
) -> None:
    path = files.head(layout)
    check_history(lambda: files.load(kind), lambda target: head_of(target, path), rounds, seed)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "layout"), covering(KINDS, LAYOUTS, count=3))
def test_no_head_changes_a_reply(files: Files, kind: str, layout: Layout) -> None:
    path, head = files.target(kind), files.head(layout)
    branches = () if kind in ("qwen3_next", "lfm2") else (2, 2)
    with (
        always_draft(),
        edgespec.load(
            str(path), "none", method="eagle", head=head, context=256, draft_branches=branches
        ) as tree,
        edgespec.load(str(path), "none", method="eagle", head=head, context=256) as chain,
    ):
        for temperature in (0.0, 0.8):
            asked: dict[str, Any] = {"max_tokens": 16, "temperature": temperature, "seed": 3}
            expected = chain.generate("the file", method="none", **asked).tokens
            for drafting in (tree, chain):
                reply = drafting.generate("the file", **asked)
                assert reply.tokens == expected
                assert reply.stats.drafted_tokens


def test_a_restored_prefix_has_no_hidden_states_so_the_head_starts_after_it(
    files: Files, target: MlxModel
) -> None:
    tokens = list(range(10, 40))
    target.prefill(tokens)
    snapshot = target.snapshot()
    head = head_of(target, files.head())
    cache = HeadCache(head)
    target.truncate(0)
    target.restore(snapshot)
    cache.begin([*tokens, 50])
    cache.prefill()
    assert not cache.can_draft(8)
    target.verify(TokenTree.chain(50, [51]))
    target.commit((1,))
    assert np.isfinite(first_logits(head, cache, [*tokens, 50, 51, 52])).any()


def tree_logits(head: EagleHead, cache: HeadCache, levels: bool) -> np.ndarray[Any, Any]:
    tree = TokenTree((12, 20, 21, 30, 31, 40), (-1, 0, 0, 1, 2, 4), (None,) * 6)
    cache.begin([*range(5, 12), 12])
    cache.prefill()
    assert head.length == 7
    parts = [(0, 6)] if not levels else [(0, 1), (1, 3), (3, 5), (5, 6)]
    rows = []
    for first, end in parts:
        logits = head.verify(tree.pruned(1 << 30, 1 << 30, end), first)
        rows += [logits.at(row, np.arange(ROWS)) for row in range(end - first)]
    head.truncate(head.length)
    return np.stack(rows)


@pytest.mark.parametrize("layout", ["SafeAILab", "EAGLE-1"])
def test_a_tree_gives_the_logits_of_its_paths(files: Files, target: MlxModel, layout: Layout) -> None:
    head = head_of(target, files.head(layout))
    cache = HeadCache(head)
    target.prefill(list(range(5, 12)))
    whole, levels = tree_logits(head, cache, False), tree_logits(head, cache, True)
    known = np.isfinite(whole)
    np.testing.assert_allclose(whole[known], levels[known], atol=1e-4)
    chain = head.verify(TokenTree.chain(12, [21, 31, 40]))
    path = np.stack([chain.at(row, np.arange(ROWS)) for row in range(4)])
    known = known[[0, 2, 4, 5]]
    np.testing.assert_allclose(path[known], whole[[0, 2, 4, 5]][known], atol=1e-4)


def test_a_draft_vocabulary_is_mapped_to_the_targets(files: Files, target: MlxModel) -> None:
    head = head_of(target, files.head())
    target.prefill([5, 6, 7])
    logits = first_logits(head, HeadCache(head), [5, 6, 7, 8])
    assert np.flatnonzero(np.isfinite(logits)).tolist() == list(range(7, 207))


_VARIANTS: list[dict[str, Any]] = [
    {"norm_before_residual": True},
    {"norm_output": True},
    {"norm_before_fc": True, "changes": {"input_norm.weight": np.full(192, 3.0, np.float32)}},
    {"changes": {f"fc_norm.{i}.weight": np.full(SIZE, 3.0, np.float32) for i in range(3)}},
    {"changes": {"layer.self_attn.q_proj.bias": np.full(32, 3.0, np.float32)}},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                      "original_max_position_embeddings": 16}},
    {"rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}},
    {"rope_theta": 50.0},
    {"own_embeddings": True},
]  # fmt: skip


@pytest.mark.parametrize("variant", _VARIANTS, ids="-".join)
def test_every_variant_is_computed(
    files: Files, target: MlxModel, tmp_path: Path, variant: dict[str, Any]
) -> None:
    """Each setting changes the second drafted token, and the head still follows the target."""

    def second_guess(path: Path) -> np.ndarray[Any, Any]:
        head = head_of(target, path)
        target.truncate(0)
        target.prefill(list(range(20, 60)))
        rows = first_logits(head, HeadCache(head), [*range(20, 60), 9], depth=2).reshape(2, -1)
        head.close()
        return rows[1, 7:207]

    options = {"size": SIZE, "vocab": ROWS, "draft_vocab": 200, "eagle_aux_hidden_state_layer_ids": STATES}
    path = write_head(tmp_path / "head", "NVIDIA", **{**options, **variant})
    assert np.abs(second_guess(path) - second_guess(files.head())).max() > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("hidden_first", [False, True])
def test_the_inputs_of_a_head_are_found_by_a_trial(tmp_path: Path, hidden_first: bool) -> None:
    """The target repeats every token, and so does the head unless the state that it reads is large."""
    target_path = write_checkpoint(tmp_path / "target", "llama", config={"tie_word_embeddings": True})
    weights = mx.load(str(target_path / "model.safetensors"))
    assert isinstance(weights, dict)
    for name in weights:
        if "o_proj" in name or "down_proj" in name:
            weights[name] *= 0
    for norm, expected in ((100.0, "[2]"), (0.001, f"[{POST_NORM}]")):
        weights["model.norm.weight"] = mx.full(SIZE, norm)
        mx.save_safetensors(str(target_path / "model.safetensors"), weights, {"format": "mlx"})
        scale = 0.3 if norm > 1 else 3.0
        noise = np.random.default_rng(0).normal(size=(SIZE, SIZE)) * scale / SIZE**0.5
        halves = [np.eye(SIZE), noise]
        silent = {"layer.self_attn.o_proj.weight": (SIZE, 32), "layer.mlp.down_proj.weight": (SIZE, 64)}
        changes: dict[str, Any] = {
            "fc.weight": np.concatenate(halves[::-1] if hidden_first else halves, axis=1).astype(np.float32),
            "fc.bias": None,
            "embed_tokens.weight": None,
            **{name: np.zeros(shape, np.float32) for name, shape in silent.items()},
        }
        path = write_head(tmp_path / f"head{norm}", "EAGLE-1", size=SIZE, vocab=ROWS, changes=changes)
        target = mlx.load(str(target_path), "target", LoadOptions(context_tokens=CONTEXT))
        head = head_of(target, path)
        assert expected in head.facts.description
        network: Any = head.networks[0]
        assert network._hidden_first is hidden_first
        assert target.length == 0
        target.close()


@pytest.mark.long
def test_a_trained_head_whose_inputs_were_swapped_drafts_as_before(tmp_path: Path) -> None:
    """A copy of the demo head that reads hidden states before embeddings predicts the same tokens."""
    path = copytree(models_folder() / "demo-mlx-head", tmp_path / "head")
    weights = mx.load(str(path / "model.safetensors"))
    assert isinstance(weights, dict)
    for name in ("q_proj", "k_proj", "v_proj"):
        matrix = weights[f"midlayer.self_attn.{name}.weight"]
        embedding, hidden = mx.split(matrix, 2, axis=1)
        weights[f"midlayer.self_attn.{name}.weight"] = mx.concatenate([hidden, embedding], axis=1)
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    tokens, rows = [5, 600, 70, 8, 91, 1000], []
    target = mlx.load(str(models_folder() / "demo-mlx"), "target", LoadOptions(context_tokens=CONTEXT))
    for folder in (models_folder() / "demo-mlx-head", path):
        head = head_of(target, folder)
        target.prefill(tokens[:-1])
        rows.append(first_logits(head, HeadCache(head), tokens))
        head.close()
        target.truncate(0)
    target.close()
    np.testing.assert_allclose(rows[1], rows[0], atol=1e-3)


@pytest.mark.long
def test_a_quantised_target_takes_heads(files: Files) -> None:
    for layout in ("SafeAILab", "EAGLE-1"):
        model = files.load("llama", quantisation=("affine", 4, 32))
        head = head_of(model, files.head(layout))
        model.prefill([5, 6, 7])
        assert np.isfinite(first_logits(head, HeadCache(head), [5, 6, 7, 8])).any()
        model.close()


def test_interrupting_and_closing(files: Files, target: MlxModel) -> None:
    head = head_of(target, files.head())
    target.prefill([5, 6, 7])
    head.interrupt(True)
    for call in (lambda: head.verify(TokenTree.chain(8)), lambda: head.prefill([6])):
        with pytest.raises(CancelledError):
            call()
    head.interrupt(False)
    assert np.isfinite(first_logits(head, HeadCache(head), [5, 6, 7, 8])).any()
    head.close()
    head.close()
    with pytest.raises(ClosedError):
        head.verify(TokenTree.chain(8))
    target.prefill([8])


def test_a_head_drafts_in_another_thread_than_it_was_loaded_in(files: Files, target: MlxModel) -> None:
    head = head_of(target, files.head("EAGLE-1"))
    target.prefill([5, 6, 7])
    found: list[Any] = []

    def draft() -> None:
        found.append(first_logits(head, HeadCache(head), [5, 6, 7, 8]))
        release_thread_state()

    thread = threading.Thread(target=draft)
    thread.start()
    thread.join()
    np.testing.assert_allclose(found[0], first_logits(head, HeadCache(head), [5, 6, 7, 8]), atol=1e-5)


def write_own_head(folder: Path, **options: Any) -> Path:
    """Write a head for the tiny target, with some changed settings or tensors."""
    defaults: dict[str, Any] = {"size": SIZE, "vocab": ROWS, "eagle_aux_hidden_state_layer_ids": STATES}
    return write_head(folder / "head", **{**defaults, **options})


def down_proj(value: float) -> dict[str, Any]:
    return {"changes": {"layer.mlp.down_proj.weight": np.full((SIZE, 64), value, np.float32)}}


LLAMA3 = {"factor": 0, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ({"size": 32}, "head_mismatch", "hidden states of size 32"),
        ({"vocab": ROWS + 1}, "head_mismatch", "a vocabulary of size"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, "head_mismatch", "reads the layers"),
        (down_proj(np.nan), "model_file_damaged", "not finite"),
        (down_proj(np.inf), "model_file_damaged", "not finite"),
        ({"rope_scaling": {"type": "linear"}}, "", ""),
        ({"rope_scaling": {"type": "unknown"}}, "", ""),
        ({"rope_scaling": {"type": "yarn", "factor": "x"}}, "", ""),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "", ""),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, "", ""),
        ({"rope_scaling": {"type": "longrope", "factor": 2}}, "", ""),
    ],
)
def test_an_unsuitable_head_is_refused(
    target: MlxModel, tmp_path: Path, options: dict[str, Any], code: str, message: str
) -> None:
    path = write_own_head(tmp_path, **options)
    with pytest.raises((CapabilityError, ModelFileError)) as caught:
        target.self_draft(Head("eagle", path))
    assert message in caught.value.what
    assert caught.value.code in ([code] if code else ["model_file_damaged", "model_file_not_supported"])
    # Nothing is left open.
    assert not target.logs.states


def test_a_gguf_head_is_refused(target: MlxModel, tmp_path: Path) -> None:
    (tmp_path / "head.gguf").write_bytes(b"GGUF")
    with raises(CapabilityError, code="wrong_file"):
        target.self_draft(Head("eagle", tmp_path / "head.gguf"))


@pytest.mark.long
def test_a_head_with_huge_weights_changes_no_reply(files: Files, tmp_path: Path) -> None:
    head = write_own_head(tmp_path, **down_proj(1e30))
    check_same_replies(files.target("llama"), "eagle", head, [0.8])


def test_a_head_that_does_not_fit_in_memory_is_refused(files: Files) -> None:
    path = str(files.target("llama"))
    needed = mlx.load(path, "llama", LoadOptions(context_tokens=256)).facts
    limit = needed.weight_bytes + needed.kv_bytes + 1000
    model = mlx.load(path, "llama", LoadOptions(context_tokens=256, memory_bytes=limit))
    with pytest.raises(MemoryBudgetError):
        model.self_draft(Head("eagle", files.head()))
    model.close()


def test_the_estimate_covers_weights_and_cache(files: Files, target: MlxModel) -> None:
    head = head_of(target, files.head())
    estimate = estimate_head(Head("eagle", files.head()), files.head(), CONTEXT)
    assert estimate.bytes_of("weights") == head.facts.weight_bytes
    assert estimate.bytes_of("cache") == head.facts.kv_bytes


def test_a_truncated_head_is_refused(target: MlxModel, tmp_path: Path) -> None:
    path = write_head(tmp_path / "head", size=SIZE, vocab=ROWS)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with raises(ModelFileError, "truncated"):
        target.self_draft(Head("eagle", path))
    (path / "config.json").write_text(json.dumps({"hidden_size": SIZE}))
    with pytest.raises(ModelFileError):
        target.self_draft(Head("eagle", path))
