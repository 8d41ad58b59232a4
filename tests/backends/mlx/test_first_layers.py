"""Tests of what the bit-exactness trial asks of MLX models: the first layers alone, and long contexts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends import mlx
from edgespec.backends.mlx.model import MlxModel
from edgespec.engine.tree import TokenTree
from edgespec.loading.bit_exactness import find_width_classes
from edgespec.model.base import EarlyExit, LoadOptions
from edgespec.model.base_model import BaseModel
from tests.backends.mlx.conftest import row
from tests.backends.mlx.tiny_checkpoints import write_checkpoint

TOKENS = list(range(5, 25))
LAYERS = 10


@pytest.fixture(scope="module")
def deep(folder: Path) -> Iterator[MlxModel]:
    path = write_checkpoint(folder / "deep", "llama", config={"num_hidden_layers": LAYERS})
    model = mlx.load(str(path), "deep", LoadOptions(context_tokens=512))
    assert isinstance(model, MlxModel)
    yield model
    model.close()


def test_the_first_layers_run_alone(deep: MlxModel) -> None:
    """Their results are those of an early exit, and the cells of the other layers are not computed."""
    deep.truncate(0)
    deep.prefill(TOKENS)
    whole = row(deep, TokenTree.chain(5, [6, 7]), 2)
    all_cells = len(deep.snapshot(0, 20).data)
    view = deep.self_draft(EarlyExit(4))
    early = row(view, TokenTree.chain(5, [6, 7]), 2)
    view.close()
    assert deep.run_first_layers(True)
    assert deep.length == 0
    deep.prefill(TOKENS[:4])
    deep.verify(TokenTree.chain(TOKENS[4], TOKENS[5:8]))
    deep.commit((1, 2, 3))
    deep.prefill(TOKENS[8:])
    np.testing.assert_allclose(row(deep, TokenTree.chain(5, [6, 7]), 2), early, rtol=1e-4, atol=1e-4)
    tree = TokenTree((5, 9, 6, 8, 7), (-1, 0, 0, 1, 2), (None,) * 5)
    np.testing.assert_allclose(row(deep, tree, 4), early, rtol=1e-4, atol=1e-4)
    deep.commit((2, 4))
    assert deep.length == 23
    assert len(deep.snapshot(0, 20).data) < all_cells / 2
    # All layers run again.
    assert not deep.run_first_layers(False)
    assert deep.length == 0
    deep.prefill(TOKENS)
    np.testing.assert_array_equal(row(deep, TokenTree.chain(5, [6, 7]), 2), whole)
    assert len(deep.snapshot(0, 20).data) == all_cells


@pytest.mark.parametrize(("kind", "layers"), [("llama", 7), ("gemma3", 12), ("mamba2", 10)])
def test_other_models_run_all_layers(tmp_path: Path, kind: str, layers: int) -> None:
    """The model is not deep enough, has layers with a sliding window, or is recurrent."""
    path = write_checkpoint(tmp_path / kind, kind, config={"num_hidden_layers": layers})
    model = mlx.load(str(path), kind, LoadOptions(context_tokens=64))
    try:
        model.prefill(TOKENS)
        assert model.repeat_cached(30) == (kind == "llama")
        assert not model.run_first_layers(True)
        assert model.length == 0
    finally:
        model.close()


def test_the_first_layers_include_each_kind_of_weight(tmp_path: Path) -> None:
    """DeepSeek's first layer is dense, and the others have experts. Here, the first six are dense."""
    counts = []
    for dense in (1, 6):
        config = {"num_hidden_layers": 14, "first_k_dense_replace": dense}
        path = write_checkpoint(tmp_path / str(dense), "deepseek_v3", config=config)
        model = mlx.load(str(path), "deepseek", LoadOptions(context_tokens=64))
        assert isinstance(model, MlxModel)
        assert model.run_first_layers(True)
        model.prefill(TOKENS)
        counts.append(sum(bool(cache.state) for cache in model.caches.attention))
        model.close()
    assert counts == [4, 7]


@pytest.mark.parametrize("kv_type", ["auto", "q8_0"])
def test_copies_hold_the_same_values_and_roll_back(folder: Path, kv_type: str) -> None:
    path = write_checkpoint(folder / "repeated", "llama", config={"head_dim": 32})
    model = mlx.load(str(path), "repeated", LoadOptions(context_tokens=512, kv_type=kv_type))
    try:
        assert not model.repeat_cached(10)
        model.prefill(TOKENS)
        expected = row(model, TokenTree.chain(5))
        model.truncate(20)
        original = model.snapshot(0, 20).data
        assert model.repeat_cached(450)
        assert model.length == 450
        copy = model.snapshot(40, 60).data
        # After the header, the copies are equal.
        assert copy.partition(b"\n")[2] == original.partition(b"\n")[2]
        assert np.isfinite(row(model, TokenTree.chain(7))).all()
        model.verify(TokenTree((5, 6, 7), (-1, 0, 0), (None,) * 3))
        model.commit((2,))
        assert model.length == 452
        model.truncate(20)
        np.testing.assert_array_equal(row(model, TokenTree.chain(5)), expected)
    finally:
        model.close()


def test_the_trial_of_the_first_layers_finds_the_classes_of_all_layers(
    deep: MlxModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = find_width_classes(deep)
    monkeypatch.setattr(MlxModel, "run_first_layers", BaseModel.run_first_layers)
    assert [found.widths for found in find_width_classes(deep)] == [found.widths for found in first]
