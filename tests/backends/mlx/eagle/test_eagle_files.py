"""Files of EAGLE heads for MLX targets: which are rejected, and that damage changes no reply."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.backends import mlx
from edgespec.backends.mlx.eagle import estimate_head
from edgespec.backends.mlx.model import MlxModel
from edgespec.errors import CapabilityError, MemoryBudgetError, ModelFileError
from edgespec.model.base import Head, LoadOptions
from tests.backends.head_histories import check_same_replies
from tests.backends.mlx.eagle.targets import CONTEXT, SIZE, STATES, Files, head_of
from tests.backends.mlx.tiny_checkpoints import ROWS
from tests.model.heads.published import write_head
from tests.raising import raises


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 32}, "hidden states of size 32"),
        ({"vocab": ROWS + 1}, "a vocabulary of size"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, "reads the layers"),
    ],
)
def test_a_head_for_another_target_is_refused(
    target: MlxModel, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    path = write_head(
        tmp_path / "head",
        **{"size": SIZE, "vocab": ROWS, "eagle_aux_hidden_state_layer_ids": STATES, **options},
    )
    with raises(CapabilityError, code="head_mismatch") as caught:
        target.self_draft(Head("eagle", path))
    assert message in caught.value.what


def test_a_gguf_head_is_refused(target: MlxModel, tmp_path: Path) -> None:
    (tmp_path / "head.gguf").write_bytes(b"GGUF")
    with raises(CapabilityError, code="wrong_file"):
        target.self_draft(Head("eagle", tmp_path / "head.gguf"))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_head_whose_logits_are_not_finite_is_refused(
    target: MlxModel, tmp_path: Path, value: float
) -> None:
    changes = {"layer.mlp.down_proj.weight": np.full((SIZE, 64), value, np.float32)}
    path = write_head(
        tmp_path / "head",
        size=SIZE,
        vocab=ROWS,
        changes=dict(changes),
        eagle_aux_hidden_state_layer_ids=STATES,
    )
    with raises(ModelFileError, "not finite"):
        target.self_draft(Head("eagle", path))
    # Nothing is left open.
    assert target._runner.recorder is not None
    assert not target._runner.recorder.states


@pytest.mark.parametrize(
    "rope",
    [
        {"type": "linear"},
        {"type": "unknown"},
        {"type": "yarn", "factor": "x"},
        {"type": "linear", "factor": 0},
        {
            "rope_type": "llama3",
            "factor": 0,
            "low_freq_factor": 1,
            "high_freq_factor": 4,
            "original_max_position_embeddings": 64,
        },
        {"type": "longrope", "factor": 2},
    ],
)
def test_an_invalid_rotary_embedding_is_refused(
    files: Files, target: MlxModel, tmp_path: Path, rope: Any
) -> None:
    path = write_head(
        tmp_path / "head", size=SIZE, vocab=ROWS, rope_scaling=rope, eagle_aux_hidden_state_layer_ids=STATES
    )
    with pytest.raises(ModelFileError) as caught:
        target.self_draft(Head("eagle", path))
    assert caught.value.code in ("model_file_damaged", "model_file_not_supported")


@pytest.mark.long
def test_a_head_with_huge_weights_changes_no_reply(files: Files, tmp_path: Path) -> None:
    changes = {"layer.mlp.down_proj.weight": np.full((SIZE, 64), 1e30, np.float32)}
    head = write_head(
        tmp_path / "head",
        size=SIZE,
        vocab=ROWS,
        changes=dict(changes),
        eagle_aux_hidden_state_layer_ids=STATES,
    )
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
