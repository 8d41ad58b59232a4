"""Published EAGLE heads are read in every layout, and damaged ones give a clear error."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgespec.errors import ModelFileError
from edgespec.model.heads.eagle_files import read_eagle
from edgespec.model.heads.numpy_layers import RopeSettings
from edgespec.store.heads import resolve_head
from tests.model.heads.published import LAYOUTS, Layout, write_head
from tests.raising import raises

VOCAB = 200


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_layouts_give_the_same_names(tmp_path: Path, layout: Layout, pickled: bool) -> None:
    draft = None if layout == "EAGLE-1" else 50
    head = read_eagle(write_head(tmp_path / "head", layout, vocab=VOCAB, draft_vocab=draft, pickled=pickled))
    assert head.config.version == (1 if layout == "EAGLE-1" else 3)
    assert head.config.hidden_size == head.config.target_size == 32
    assert ("layer.hidden_norm.weight" in head.tensors) == (layout != "EAGLE-1")
    assert head.tensors["layer.mlp.down_proj.weight"].read().shape == (32, 64)
    assert head.draft_vocab_size == (draft or VOCAB)
    if draft:
        assert head.target_ids is not None
        assert head.target_ids.tolist() == list(range(7, 57))


@pytest.mark.parametrize("layout", ["NVIDIA", "speculators", "SafeAILab"])
def test_settings_are_found_where_each_publisher_writes_them(tmp_path: Path, layout: Layout) -> None:
    settings = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
    folder = write_head(
        tmp_path / "head", layout, vocab=VOCAB, target_hidden_size=48,
        eagle_aux_hidden_state_layer_ids=[2, 4, 6], changes={"input_norm.weight": np.ones(144, np.float32)},
        rope_parameters={"rope_theta": 5e5, "rope_type": "default"}, rope_theta=None, **settings,
    )  # fmt: skip
    config = read_eagle(folder).config
    assert config.norm_before_residual
    assert config.norm_before_fc
    assert config.norm_output
    assert (config.target_size, config.rope.theta, config.rope.kind) == (48, 5e5, "default")
    assert config.layers == (2, 4, 6)


def test_heads_of_vision_models_rotate_text_without_sections(tmp_path: Path) -> None:
    scaling = {"rope_type": "mrope", "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    folder = write_head(tmp_path / "head", vocab=VOCAB, rope_scaling=scaling, rope_theta=5e6)
    assert read_eagle(folder).config.rope == RopeSettings(5e6)


def test_layers_may_be_listed_by_their_inputs_or_outputs(tmp_path: Path) -> None:
    def choices(name: str, layout: Layout, layers: list[int] | None) -> list[tuple[int, ...]]:
        folder = write_head(tmp_path / name, layout, vocab=VOCAB, eagle_aux_hidden_state_layer_ids=layers)
        return read_eagle(folder).config.layer_choices(36)

    assert choices("default", "SafeAILab", None) == [(2, 18, 33)]
    assert choices("inputs", "speculators", [2, 18, 33]) == [(2, 18, 33), (3, 19, 34)]
    assert choices("outputs", "NVIDIA", [1, 17, 32]) == [(2, 18, 33), (1, 17, 32)]
    assert choices("last", "NVIDIA", [24, 30, 36]) == [(24, 30, 36)]
    assert choices("too high", "NVIDIA", [24, 30, 37]) == []


def test_weights_can_be_split_over_several_files(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", vocab=VOCAB)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:4]}, folder / "model-00001-of-00002.safetensors")
    with raises(ModelFileError, "is missing", code="model_file_not_supported"):
        read_eagle(folder)
    save_file({name: tensors[name] for name in names[4:]}, folder / "model-00002-of-00002.safetensors")
    head = read_eagle(folder)
    np.testing.assert_array_equal(head.tensors["fc.weight"].read(), tensors["fc.weight"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_attention_heads": 0}, ""),
        ({"hidden_size": 1e400}, ""),
        ({"hidden_size": -32}, ""),
        ({"hidden_size": None}, ""),
        ({"num_key_value_heads": 3}, "sizes"),
        ({"head_dim": 15}, "sizes"),
        ({"num_hidden_layers": 2}, "2 layers"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"vocab_size": 20}, "outside the vocabulary"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "fc.weight has"),
        ({"eagle_aux_hidden_state_layer_ids": 3}, ""),
        ({"target_hidden_size": 33}, ""),
        ({"intermediate_size": 65}, "has shape"),
        ({"norm_before_fc": True}, "input_norm.weight"),
    ],
)
def test_impossible_settings_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    folder = write_head(tmp_path / "head", vocab=VOCAB, draft_vocab=50)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    with raises(ModelFileError, message, code="model_file_not_supported"):
        read_eagle(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm.weight": None}, "norm.weight"),
        ({"fc.weight": None}, "has 0 columns"),
        ({"fc.weight": np.zeros(96, np.float32)}, "has shape"),
        ({"fc.weight": np.zeros((), np.float32)}, ""),
        ({"extra.weight": np.zeros(3, np.float32)}, "extra.weight"),
        ({"norm.weight": np.zeros(32, np.int64)}, "floating-point"),
        ({"d2t": np.full(50, 151, np.int64)}, "outside the vocabulary"),
        ({"d2t": np.full(50, -60, np.int64)}, "outside the vocabulary"),
        ({"d2t": np.zeros(50, np.float32)}, "d2t "),
        ({"d2t": np.zeros(0, np.int64)}, "outside the vocabulary"),
        ({"d2t": None}, "lm_head.weight has shape"),
    ],
)  # fmt: skip
def test_unfitting_tensors_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_head(tmp_path / "head", vocab=VOCAB, draft_vocab=50, changes=changes)
    with raises(ModelFileError, message, code="model_file_not_supported"):
        read_eagle(folder)


def test_quantised_heads_are_refused(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "fc.weight": np.zeros((32, 12), np.uint32),
        "fc.scales": np.zeros((32, 3), np.float16),
    }
    folder = write_head(tmp_path / "head", vocab=VOCAB, changes=changes)
    with raises(ModelFileError, code="model_file_not_supported"):
        read_eagle(folder)
    header = json.dumps({"a": {"dtype": "F8_E5M2", "shape": [2], "data_offsets": [0, 2]}}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(2)
    (folder / "model.safetensors").write_bytes(content)
    with raises(ModelFileError, "type F8_E5M2", code="model_file_not_supported"):
        read_eagle(folder)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", vocab=VOCAB)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    for damaged in (
        content[:-1],
        content[:100],
        b"",
        b"version https://git-lfs.github.com/spec/v1\n",
        content[:8] + b"[]",
    ):
        weights.write_bytes(damaged)
        with pytest.raises(ModelFileError):
            read_eagle(folder)
    weights.unlink()
    with raises(ModelFileError, code="model_file_incomplete"):
        read_eagle(folder)
    for text in ("[]", "{", "[" * 100_000, ""):
        (folder / "config.json").write_text(text)
        with raises(ModelFileError, "config.json"):
            read_eagle(folder)
    (folder / "config.json").unlink()
    for without in (folder, tmp_path / "missing"):
        with raises(ModelFileError, code="model_file_incomplete"):
            read_eagle(without)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", vocab=VOCAB)
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with raises(ModelFileError, "regular file", code="model_file_unreadable"):
        read_eagle(folder)
    with raises(ModelFileError, "head", code="model_file_incomplete"):
        resolve_head(str(folder))


def test_positions_must_be_whole_numbers(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", vocab=VOCAB)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["norm.weight"]["data_offsets"] = [float(each) for each in header["norm.weight"]["data_offsets"]]
    changed = json.dumps(header).encode()
    weights.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + length :])
    with raises(ModelFileError, "damaged"):
        read_eagle(folder)
