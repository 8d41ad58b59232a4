"""Medusa and Hydra heads are read as published, and compute what their papers describe."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from edgespec.backends.residual_heads import AttentionShape, PrefixLayer, ResidualNetwork
from edgespec.errors import CapabilityError, ModelFileError
from edgespec.model.heads.numpy_layers import Product, WeightLoader
from edgespec.model.heads.residual_layout import ResidualHeads, read_residual_heads, residual_head_method
from tests.model.heads.residual_files import (
    ATTENTION,
    LAYOUTS,
    Arrays,
    Attention,
    Layout,
    plain_logits,
    random_arrays,
    write_heads,
)
from tests.model.heads.torch_files import Call, Named, pickled, write_archive
from tests.raising import raises

SIZE, VOCAB = 16, 40
RANDOM = np.random.default_rng(5)
STATES = RANDOM.normal(size=(30, SIZE)).astype(np.float32)
LM_HEAD = RANDOM.normal(size=(VOCAB, SIZE)).astype(np.float32)
TABLE = RANDOM.normal(size=(VOCAB, SIZE)).astype(np.float32)


def embed(token: int) -> NDArray[Any]:
    return np.array(TABLE[token])


def numpy_product(matrix: NDArray[np.floating], _dtype: str = "") -> Product:
    transposed = np.array(matrix, np.float32).T
    return lambda rows: rows @ transposed


def arrays_of(layout: Layout, attention: Attention = ATTENTION) -> Arrays:
    return random_arrays(layout, SIZE, VOCAB, attention)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_heads_compute_what_a_plain_reading_of_the_papers_does(layout: Layout, tmp_path: Path) -> None:
    attention = Attention(heads=4, kv_heads=2, theta=500.0)
    arrays = arrays_of(layout, attention)
    folder = write_heads(tmp_path / "head", layout, arrays)
    heads = read_residual_heads(folder)
    assert residual_head_method(folder) == layout.method
    assert len(heads.heads) == layout.count
    unused = "prefix_embeding_layer.embed_tokens.weight"
    assert heads.parameters == sum(each.size for name, each in arrays.items() if name != unused)
    loader = WeightLoader(heads.file, numpy_product)
    network = ResidualNetwork(heads, loader, numpy_product(LM_HEAD))
    x = STATES[-1:]
    if heads.prefix:
        layer = PrefixLayer(
            heads.prefix, AttentionShape(attention.heads, attention.theta, attention.epsilon), loader
        )
        layer.append(STATES[:11])
        layer.append(STATES[11:25])
        x = layer.run(STATES[25:])[-1:]
    tokens = [3, 39, 0, 7, 21]
    for head in range(layout.count):
        path = tokens[: head + 1]
        inputs = np.concatenate([x, *(TABLE[[token]] for token in path)], axis=1) if layout.grounded else x
        expected = plain_logits(layout, arrays, attention, STATES, embed, path, LM_HEAD)
        np.testing.assert_allclose(network.logits(head, inputs)[0], expected, rtol=0, atol=2e-4)


def test_the_layer_of_hydra_heads_can_be_rolled_back(tmp_path: Path) -> None:
    layout = next(layout for layout in LAYOUTS if layout.prefix)
    heads = read_residual_heads(write_heads(tmp_path / "head", layout, arrays_of(layout)))
    assert heads.prefix
    loader = WeightLoader(heads.file, numpy_product)
    layer, fresh = (PrefixLayer(heads.prefix, AttentionShape(2, 1e4, 1e-5), loader) for _ in range(2))
    layer.run(STATES)
    layer.attention.truncate(12)
    layer.append(STATES[12:20])
    fresh.append(STATES[:20])
    np.testing.assert_allclose(layer.run(STATES[20:]), fresh.run(STATES[20:]), rtol=0, atol=1e-5)
    layer.attention.restart(5)
    layer.attention.truncate(3)
    assert (layer.attention.start, layer.attention.end) == (3, 3)
    many = np.tile(STATES, (40, 1))
    layer.append(many)
    assert layer.attention.end == 3 + len(many)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_file_can_be_passed_instead_of_its_folder(layout: Layout, tmp_path: Path) -> None:
    folder = write_heads(tmp_path / "head", layout, arrays_of(layout))
    file = folder / f"{layout.method}_lm_head{layout.suffix}"
    assert read_residual_heads(file).parameters == read_residual_heads(folder).parameters
    assert residual_head_method(file) == layout.method
    assert residual_head_method(folder / "config.json") is None


def test_other_folders_contain_no_heads(tmp_path: Path) -> None:
    assert residual_head_method(tmp_path) is None
    with raises(ModelFileError, code="wrong_file"):
        read_residual_heads(tmp_path)


MEDUSA, HYDRA = Layout("medusa"), Layout("hydra", grounded=True)
PREFIX = Layout("hydra", grounded=True, prefix=True, dropouts=True)


@pytest.mark.parametrize(
    ("layout", "name", "change", "message"),
    [
        (MEDUSA, "0.0.linear.weight", None, "contains no heads"),
        (MEDUSA, "1.1.weight", None, "only one of head 0 and head 1 has an output"),
        (MEDUSA, "1.2.weight", (VOCAB, SIZE), "head 1 has 2 output matrices"),
        (MEDUSA, "0.0.linear.bias", (SIZE + 1,), "shape"),
        (MEDUSA, "0.1.weight", (VOCAB,), "shape"),
        (MEDUSA, "2.1.weight", (VOCAB - 1, SIZE), "shape"),
        (MEDUSA, "1.0.linear.weight", (SIZE, 2 * SIZE), "shape"),
        (HYDRA, "hydra_lm_head.1.weight", None, "hydra_lm_head.1.weight is missing"),
        (HYDRA, "hydra_mlp.1.0.res_connection.weight", None, "res_connection"),
        (HYDRA, "hydra_mlp.2.0.linear.weight", (SIZE, 3 * SIZE), "shape"),
        (PREFIX, "prefix_embeding_layer.norm.weight", None, "prefix_embeding_layer.norm.weight is missing"),
        (PREFIX, "prefix_embeding_layer.layers.0.self_attn.k_proj.weight", (SIZE,), "shape"),
        (PREFIX, "prefix_embeding_layer.layers.0.mlp.up_proj.weight", (SIZE, SIZE), "up_proj has shape"),
    ],
)
def test_incomplete_heads_are_refused(
    layout: Layout, name: str, change: tuple[int, ...] | None, message: str, tmp_path: Path
) -> None:
    arrays = arrays_of(layout)
    if change is None:
        del arrays[name]
    else:
        arrays[name] = np.zeros(change, np.float32)
    with raises(ModelFileError, "is damaged") as caught:
        read_residual_heads(write_heads(tmp_path / "head", layout, arrays))
    assert message in caught.value.what


def test_weights_that_are_no_floating_point_numbers_are_refused(tmp_path: Path) -> None:
    arrays = arrays_of(MEDUSA)
    folder = write_heads(tmp_path / "head", MEDUSA, arrays)
    arrays["0.0.linear.weight"] = arrays["0.0.linear.weight"].astype(np.int64)
    save_file(arrays, folder / "medusa_lm_head.safetensors")
    with raises(ModelFileError, "type I64"):
        read_residual_heads(folder)


@pytest.mark.long
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("layout", [MEDUSA, PREFIX], ids=str)
def test_weights_that_are_not_finite_are_refused(layout: Layout, value: float, tmp_path: Path) -> None:
    for name, array in arrays_of(layout).items():
        if "embed_tokens" in name:
            continue
        arrays = arrays_of(layout) | {name: array.copy()}
        arrays[name].flat[-1] = value
        heads = read_residual_heads(write_heads(tmp_path / "head", layout, arrays))
        with raises(ModelFileError, "infinite or NaN"):
            load(heads)


def load(heads: ResidualHeads) -> ResidualNetwork:
    loader = WeightLoader(heads.file, numpy_product)
    if heads.prefix:
        PrefixLayer(heads.prefix, AttentionShape(2, 1e4, 1e-5), loader)
    return ResidualNetwork(heads, loader)


def test_huge_weights_still_give_finite_logits(tmp_path: Path) -> None:
    arrays = {name: np.full_like(array, 3e38) for name, array in arrays_of(MEDUSA).items()}
    heads = read_residual_heads(write_heads(tmp_path / "head", MEDUSA, arrays))
    network = load(heads)
    assert np.isfinite(network.logits(0, STATES)).all()


@pytest.mark.parametrize("kind", ["eagle-attn", "cross-attn", 3, None])
def test_other_kinds_of_hydra_heads_are_refused(kind: object, tmp_path: Path) -> None:
    folder = write_heads(tmp_path / "head", HYDRA, arrays_of(HYDRA), hydra_head_arch=kind)
    with raises(CapabilityError, "kind", code="head_not_supported"):
        read_residual_heads(folder)


@pytest.mark.parametrize("config", ["[]", "{", "[" * 100_000, '{"hidden_state_offset": -1}', " " * 2**21])
def test_a_damaged_config_is_refused(config: str, tmp_path: Path) -> None:
    folder = write_heads(tmp_path / "head", MEDUSA, arrays_of(MEDUSA))
    (folder / "config.json").write_text(config)
    with pytest.raises(ModelFileError) as caught:
        read_residual_heads(folder)
    assert caught.value.code in ("model_file_damaged", "model_file_unreadable")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_as_config_is_not_waited_for(tmp_path: Path) -> None:
    folder = write_heads(tmp_path / "head", MEDUSA, arrays_of(MEDUSA))
    (folder / "config.json").unlink(missing_ok=True)
    os.mkfifo(folder / "config.json")
    with raises(ModelFileError, "regular file", code="model_file_unreadable"):
        read_residual_heads(folder)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_truncated_files_are_refused(layout: Layout, tmp_path: Path) -> None:
    folder = write_heads(tmp_path / "head", layout, arrays_of(layout))
    file = folder / f"{layout.method}_lm_head{layout.suffix}"
    content = file.read_bytes()
    for length in (0, 5, 100, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:length])
        with pytest.raises(ModelFileError):
            read_residual_heads(folder)


def test_a_pickle_that_calls_functions_is_refused_and_not_executed(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    program = pickled({"0.0.linear.weight": Call(Named("os", "system"), f"touch {touched}")})
    write_archive(tmp_path / "medusa_lm_head.pt", program)
    with raises(ModelFileError, "os.system", code="model_file_not_supported"):
        read_residual_heads(tmp_path)
    assert not touched.exists()


def test_the_offset_of_the_hidden_state_is_read(tmp_path: Path) -> None:
    folder = write_heads(tmp_path / "head", HYDRA, arrays_of(HYDRA), hidden_state_offset=1)
    assert read_residual_heads(folder).layers_before_last == 1
