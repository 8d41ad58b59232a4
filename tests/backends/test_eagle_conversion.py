"""Published EAGLE heads are converted to GGUF, or refused if llama.cpp cannot run them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from edgespec.backends import llamacpp
from edgespec.backends.llamacpp.head import PairHead
from edgespec.backends.llamacpp.model import LlamaCppModel
from edgespec.errors import EdgespecError, ModelFileError
from edgespec.methods.draft_cache import HeadCache
from edgespec.model.base import Head, LoadOptions
from edgespec.store.heads import prepare_head
from tests.backends.head_histories import first_logits
from tests.backends.published_heads import write_published
from tests.backends.tiny_models import write_llama
from tests.model.heads import residual_files
from tests.model.heads.published import Layout
from tests.raising import raises


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the target for which the heads were trained."""
    return write_llama(tmp_path_factory.mktemp("target") / "target.gguf", layers=3)


@pytest.fixture
def target(target_path: Path) -> Iterator[LlamaCppModel]:
    model = llamacpp.load(str(target_path), "target", LoadOptions(context_tokens=512))
    assert isinstance(model, LlamaCppModel)
    yield model
    model.close()


def logits_of(target: LlamaCppModel, head_path: Path, tokens: list[int]) -> NDArray[np.float64]:
    head = target.self_draft(Head("eagle", head_path))
    assert isinstance(head, PairHead)
    target.truncate(0)
    target.prefill(tokens[:-1])
    logits = first_logits(head, HeadCache(head), tokens)
    head.close()
    return logits


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("layout", ["SafeAILab", "NVIDIA", "speculators"])
def test_a_published_head_is_converted(
    target_path: Path, target: LlamaCppModel, tmp_path: Path, layout: Layout, pickled: bool
) -> None:
    output = tmp_path / "head.gguf"
    folder = write_published(tmp_path / "published", layout, pickled=pickled)
    assert prepare_head(folder, target_path, output) == output.stat().st_size
    logits = logits_of(target, output, list(range(10, 30)))
    # It drafts the tokens of its own vocabulary.
    assert np.flatnonzero(np.isfinite(logits)).tolist() == list(range(7, 107))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0, "head_dim": None},
        {"hidden_size": 1e400},
        {"vocab_size": 50},
        {"eagle_aux_hidden_state_layer_ids": "abc"},
        {"rms_norm_eps": "x"},
        {"rms_norm_eps": float("nan")},
        {"rms_norm_eps": -1.0},
        {"head_dim": 15},
    ],
)
def test_an_impossible_config_is_not_converted(
    target_path: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    folder = write_published(tmp_path / "published", **changes)
    with raises(ModelFileError, code="model_file_not_supported"):
        prepare_head(folder, target_path, tmp_path / "head.gguf")


def test_a_head_that_runs_as_published_is_not_converted(target_path: Path, tmp_path: Path) -> None:
    layout = residual_files.Layout("medusa")
    arrays = residual_files.random_arrays(layout, 32, 40)
    folder = residual_files.write_heads(tmp_path / "published", layout, arrays)
    with raises(ModelFileError, str(folder), code="wrong_file"):
        prepare_head(folder, target_path, tmp_path / "head.gguf")


def test_a_folder_that_is_no_head_is_not_converted(target_path: Path, tmp_path: Path) -> None:
    folder = write_published(tmp_path / "published")
    output = tmp_path / "head.gguf"
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "model.safetensors").rename(folder / "moved")
    with pytest.raises(EdgespecError):
        prepare_head(folder, target_path, output)
    save_file({"fc.weight": np.zeros((2, 2), np.float32)}, folder / "model.safetensors")
    with raises(ModelFileError, "is missing", code="model_file_not_supported"):
        prepare_head(folder, target_path, output)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelFileError):
        prepare_head(folder, target_path, output)
    assert not output.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["published"]


_ROPES: list[dict[str, Any]] = [
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0},
]


@pytest.mark.parametrize("rope", _ROPES)
def test_the_scaling_of_rotary_embeddings_is_converted(
    target_path: Path, target: LlamaCppModel, tmp_path: Path, rope: dict[str, Any]
) -> None:
    plain = write_published(tmp_path / "plain")
    scaling = {**rope, "original_max_position_embeddings": 32}
    scaled = write_published(tmp_path / "scaled", rope_scaling=scaling)
    found = []
    for folder in (plain, scaled):
        prepare_head(folder, target_path, output := folder.with_suffix(".gguf"))
        logits = logits_of(target, output, list(range(10, 60)))
        found.append(logits[np.isfinite(logits)])
    assert np.abs(found[0] - found[1]).max() > 1e-3


def test_a_head_that_lists_layers_by_their_outputs_is_converted(target_path: Path, tmp_path: Path) -> None:
    folder = write_published(tmp_path / "published", eagle_aux_hidden_state_layer_ids=[1, 0, 1])
    prepare_head(folder, target_path, tmp_path / "head.gguf")
    field = gguf.GGUFReader(tmp_path / "head.gguf").fields["eagle3.target_layers"]
    assert field.contents() == [2, 1, 2]


@pytest.mark.filterwarnings("error")
def test_what_llama_cpp_does_not_support_is_not_converted(target_path: Path, tmp_path: Path) -> None:
    llama3 = {**_ROPES[0], "original_max_position_embeddings": 32}
    for number, (changes, message) in enumerate(
        [
            ({"rope_scaling": {"type": "longrope"}}, "'longrope'"),
            ({"norm_output": True}, "norm_output"),
            ({"eagle_aux_hidden_state_layer_ids": [7, 8, 9]}, "layers"),
            ({"rope_scaling": {"type": "linear"}}, "'factor'"),
            ({"rope_scaling": {"type": "linear", "factor": 0}}, "not 0"),
            ({"rope_scaling": {"type": "yarn", "factor": float("nan")}}, "not nan"),
            ({"rope_scaling": llama3 | {"factor": 0.0}}, "not 0.0"),
            ({"rope_scaling": llama3 | {"low_freq_factor": 4.0}}, "differ"),
            ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "both"),
            ({"rope_theta": -1.0}, "rope_theta "),
        ]
    ):
        folder = write_published(tmp_path / str(number), **changes)  # type: ignore[arg-type]
        code = "" if message == "'factor'" else "model_file_not_supported"
        with raises(ModelFileError, message, code=code):
            prepare_head(folder, target_path, tmp_path / "head.gguf")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])
def test_weights_that_float16_cannot_hold_are_not_converted(
    target_path: Path, tmp_path: Path, value: float
) -> None:
    matrix = np.full((32, 64), value, np.float32)
    folder = write_published(tmp_path / "published", changes={"layer.mlp.down_proj.weight": matrix})
    with raises(ModelFileError, "float16") as caught:
        prepare_head(folder, target_path, tmp_path / "head.gguf")
    assert str(folder) in caught.value.what
    assert [path.name for path in tmp_path.iterdir()] == ["published"]


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 1e300},
        {"rope_theta": 1e300},
        {"max_position_embeddings": -5},
        {"max_position_embeddings": 10**30},
    ],
)
def test_settings_that_gguf_cannot_store_are_refused(
    target_path: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    folder = write_published(tmp_path / "published", **changes)
    with raises(ModelFileError, "invalid settings"):
        prepare_head(folder, target_path, tmp_path / "head.gguf")
