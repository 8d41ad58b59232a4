"""Published DFlash and DSpark heads draft the same after conversion to GGUF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.backends import llamacpp
from edgespec.backends.llamacpp.dflash import DFlashHead, estimate_head
from edgespec.backends.llamacpp.model import LlamaCppModel
from edgespec.engine.tree import TokenTree
from edgespec.errors import ModelFileError
from edgespec.model.base import Head, LoadOptions
from edgespec.model.formats.head_files import head_at
from edgespec.store.heads import prepare_head
from tests.backends.dflash_reference import block_logits, markov_logits, tensors_of
from tests.backends.tiny_models import WORDS, write_llama
from tests.model.heads.published_dflash import LAYOUTS, SELECTOR, WINDOW, Layout, write_dflash_head
from tests.raising import raises

VOCAB = 259 + len(WORDS)
STATES = (0, 1, 3)
BLOCK, MASK = 6, 7
TOKENS = [*range(10, 50), 50]
DRAFT = (51, 52, 53)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("dflash") / "target.gguf", layers=3)


def converted(target: Path, folder: Path) -> Path:
    assert head_at(folder).method == "dflash"
    output = folder.with_suffix(".gguf")
    assert prepare_head(folder, target, output) == output.stat().st_size
    return output


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("draft_vocab", [None, 100])
def test_a_converted_head_drafts_what_the_published_one_does(
    target: Path, tmp_path: Path, layout: Layout, draft_vocab: int | None
) -> None:
    tensors: dict[str, Any] = write_dflash_head(
        tmp_path / "head", layout, vocab=VOCAB, draft_vocab=draft_vocab, states=STATES, block=BLOCK, mask=MASK
    )
    tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    model = llamacpp.load(str(target), "target", LoadOptions(context_tokens=256))
    assert isinstance(model, LlamaCppModel)
    log = model.log_hidden_states(STATES)
    head = model.self_draft(head_at(converted(target, tmp_path / "head")))
    assert isinstance(head, DFlashHead)
    model.prefill(TOKENS[:-1])
    head.prefill(TOKENS[:-1])
    logits, every = head.verify(TokenTree.chain(TOKENS[-1], DRAFT)), np.arange(head.facts.vocab_size)
    rows = np.array([logits.at(row, every) for row in range(len(logits))])
    own = tensors_of(target)
    block = block_logits(
        tensors,
        own["token_embd.weight"],
        tensors["lm_head.weight"] if draft_vocab else own["output.weight"],
        log.rows(0, len(TOKENS) - 1).astype(np.float64),
        [TOKENS[-1], *[MASK] * (BLOCK - 1)],
        base=1e6,
        window=WINDOW if "sliding" in layout else 0,
    )
    # In DeepSeek's layout, each token of a block predicts the next one. In other layouts, it predicts the
    # token at its own position.
    first = 0 if layout == "DeepSeek" else 1
    expected = block[first : first + len(rows)]
    if layout in ("DeepSeek", "speculators"):
        expected = expected + [markov_logits(tensors, token) for token in (TOKENS[-1], *DRAFT)]
    if draft_vocab:
        assert np.flatnonzero(np.isfinite(rows[0])).tolist() == list(range(7, 107))
        rows = rows[:, 7:107]
    assert np.abs(rows - expected).max() < 0.02 * np.abs(expected).max()
    # The plan for an unconverted head equals that for the converted one.
    before, after = (
        estimate_head(Head("dflash", tmp_path / name), target, 256) for name in ("head", "head.gguf")
    )
    for kind in ("cache", "compute", "output"):
        assert before.bytes_of(kind) == after.bytes_of(kind)
    assert before.bytes_of("weights") == pytest.approx(after.bytes_of("weights"), rel=0.15)
    head.close()
    model.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 1e400}, "DFlash"),
        ({"head_dim": 15}, "sizes"),
        ({"num_key_value_heads": 3}, "sizes"),
        ({"vocab_size": 5}, "mask token 7"),
        ({"model_type": "gemma4"}, "model_type is 'gemma4'"),
        ({"block_size": 64}, "not 64"),
        ({"block_size": 1}, "block_size"),
        ({"states": (0, 1, 4)}, "reads the layers"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "type 'longrope'"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, "mix causal"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"num_hidden_layers": 3}, "the tensor layers.2"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rms_norm_eps": -1.0}, "not -1.0"),
        ({"num_hidden_layers": 1}, "layers.1"),
        ({"intermediate_size": 32}, "has shape"),
        ({"changes": {"norm.weight": None}}, "norm.weight"),
        ({"changes": {"mask_embedding": np.zeros(32, np.float32)}}, "mask_embedding"),
        ({"changes": SELECTOR}, "head must"),
        ({"changes": {"norm.weight": np.zeros(32, np.int64)}}, "floating-point"),
        ({"changes": {"d2t": np.full(9, VOCAB)}}, "outside the vocabulary"),
        ({"dflash_config": {"mask_token_id": 7}}, "aux_hidden_state_layer_ids"),
    ],
)
def test_a_head_that_is_not_supported_is_not_converted(
    target: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    write_dflash_head(tmp_path / "head", vocab=VOCAB, **settings)
    with raises(ModelFileError, message, code="model_file_not_supported"):
        prepare_head(tmp_path / "head", target, tmp_path / "head.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_a_truncated_head_is_not_converted(target: Path, tmp_path: Path) -> None:
    write_dflash_head(tmp_path / "head", vocab=VOCAB)
    weights = tmp_path / "head" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with raises(ModelFileError, "truncated"):
        prepare_head(tmp_path / "head", target, tmp_path / "head.gguf")
