"""Draft models converted to GGUF give the same logits as the original MLX models, except for rounding."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from shutil import copytree
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

import edgespec
from edgespec.backends import llamacpp, mlx
from edgespec.backends.llamacpp.gguf_conversion import convert_draft_model
from edgespec.engine.tree import TokenTree
from edgespec.errors import ModelFileError, OptionError
from edgespec.loading.prepare.draft import prepare_draft
from edgespec.model.base import LoadOptions
from edgespec.store.catalogue import models_folder
from tests.backends.mlx.tiny_checkpoints import ROWS, write_checkpoint
from tests.raising import raises

TARGET = models_folder() / "demo-target-q8_0.gguf"
DRAFT = models_folder() / "demo-mlx-draft"
TEXT = "List all files in the folder, then count the lines of each file that ends in .py."


def logits(backend: Any, path: Path, tokens: Sequence[int]) -> NDArray[np.float64]:
    """Return the logits after each token."""
    model = backend.load(str(path), "draft", LoadOptions(context_tokens=256))
    rows = model.verify(TokenTree.chain(tokens[0], tokens[1:]))
    found = np.array([rows.at(row, np.arange(model.facts.vocab_size)) for row in range(len(tokens))])
    model.close()
    return found


def difference(found: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """Return the relative difference, which is not 0 because llama.cpp rounds to float16."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def tokenizer(size: int) -> dict[str, tuple[Any, Any, Any]]:
    """Return the metadata of a tokenizer for tests that print no text."""
    kinds = gguf.GGUFValueType
    return {
        "tokenizer.ggml.model": ("gpt2", kinds.STRING, None),
        "tokenizer.ggml.pre": ("gpt-2", kinds.STRING, None),
        "tokenizer.ggml.tokens": ([f"t{i}" for i in range(size)], kinds.ARRAY, kinds.STRING),
        "tokenizer.ggml.token_type": ([1] * size, kinds.ARRAY, kinds.INT32),
        "tokenizer.ggml.merges": (["t 1"], kinds.ARRAY, kinds.STRING),
        "tokenizer.ggml.eos_token_id": (0, kinds.UINT32, None),
    }


def test_a_trained_draft_model_gives_the_same_logits_and_replies(tmp_path: Path) -> None:
    output = tmp_path / "draft.gguf"
    assert prepare_draft(DRAFT, TARGET, output) == output.stat().st_size
    model = mlx.load(str(DRAFT), "draft", LoadOptions(context_tokens=256))
    tokens = model.vocabulary.tokenize(TEXT, special=False, start=False)
    model.close()
    expected, converted = logits(mlx, DRAFT, tokens), logits(llamacpp, output, tokens)
    assert converted.shape == expected.shape
    assert difference(converted, expected) < 0.01
    assert (converted.argmax(axis=1) == expected.argmax(axis=1)).mean() > 0.9
    asked: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "seed": 5}
    with edgespec.load(str(TARGET), str(output), method="model") as drafting:
        reply = drafting.generate(TEXT, **asked)
        assert reply.stats.accepted_tokens
        assert reply.tokens == drafting.generate(TEXT, method="none", **asked).tokens


@pytest.mark.long
@pytest.mark.parametrize("quantisation", [None, ("affine", 3, 32), ("affine", 4, 64), ("affine", 8, 32)])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_every_supported_architecture_gives_the_same_logits(
    tmp_path: Path, kind: str, quantisation: tuple[str, int, int] | None
) -> None:
    folder = write_checkpoint(tmp_path / "model", kind, quantisation=quantisation)
    convert_draft_model(folder, tokenizer(ROWS), tmp_path / "model.gguf")
    tokens = [5, 6, 7, 40, 41, 9, 60, 61]
    expected = logits(mlx, folder, tokens)
    assert difference(logits(llamacpp, tmp_path / "model.gguf", tokens), expected) < 0.01


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, "'gemma2'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "'dynamic'"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding window"),
        ({"quantization": {"bits": 7, "group_size": 32}}, "the quantisation"),
        ({"num_hidden_layers": 1}, "model.layers.1"),
        ({"hidden_size": "?"}, "config.json are"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = copytree(DRAFT, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with raises(ModelFileError, message, code="model_file_not_supported"):
        convert_draft_model(folder, {}, tmp_path / "model.gguf")


def test_other_vocabularies_and_targets_are_refused(tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", "llama")
    with raises(OptionError, code="vocabulary_mismatch"):
        prepare_draft(other, TARGET, tmp_path / "draft.gguf")
    with raises(OptionError, code="wrong_file"):
        prepare_draft(DRAFT, DRAFT, tmp_path / "draft.gguf")
    assert not list(tmp_path.glob("*.gguf"))
