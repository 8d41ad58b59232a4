"""DFlash and DSpark head files: which are rejected, the memory plan, and that damage changes no reply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings

from edgespec.backends import llamacpp
from edgespec.backends.llamacpp.dflash import MarkovHead, estimate_head
from edgespec.backends.llamacpp.model import LlamaCppModel
from edgespec.backends.llamacpp.native import captured_log
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError, ModelFileError
from edgespec.model.base import Head, LoadOptions
from edgespec.model.heads.dflash_files import MAX_BLOCK_TOKENS
from edgespec.model.hidden_states import MAX_LOGGED_TOKENS
from tests.backends.damaged_heads import BYTE_CHANGES, check_changed_bytes
from tests.backends.dflash.targets import (
    CONTEXT,
    KINDS,
    LAYERS,
    VOCAB,
    Files,
    changed,
    head_of,
    write_head,
)
from tests.backends.tiny_models import write_llama
from tests.cases import first
from tests.raising import raises


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 16}, "tensor 'fc.weight' of shape"),
        ({"vocab": VOCAB + 1}, "a vocabulary of size"),
        ({"layers": (0, 1, 4)}, "reads the layers"),
        ({"layers": (0, -1)}, "reads the layers"),
        ({"mask": None}, "mask token has the ID -1"),
        ({"mask": VOCAB}, f"mask token has the ID {VOCAB}"),
        ({"block": 1}, "block_size must be .*, not 1;"),
        ({"block": MAX_BLOCK_TOKENS + 1}, "block_size must be .*, not 33;"),
        ({"rank": 8, "block": 1 << 31}, "block_size must be .*, not 2147483648;"),
        ({"block_size": "6"}, "could not be loaded|block_size"),
        ({"sections": (-1, 0, 0, 0)}, "dimension_sections"),
        ({"sections": (1 << 30, 1 << 30, 1 << 30, 1 << 30)}, "dimension_sections"),
        ({"rope__dimension_count": 3}, "rope.dimension_count must be .*, not 3;"),
        ({"rope__dimension_count": 0}, "rope.dimension_count must be .*, not 0;"),
        ({"hyper_connection_count": 4}, "is a DeepSeek-V4 DSpark head, which edgespec cannot run"),
        ({"candidates": 6}, "could not be loaded"),
        ({"candidates": 4, "rank": 8}, "cannot have a Markov head"),
        ({"candidates": 4, "sample_from_anchor": True}, "cannot have a Markov head or draft"),
    ],
)
def test_an_unsuitable_head_is_refused(
    target: LlamaCppModel, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    path = write_head(tmp_path / "head.gguf", **options)
    with pytest.raises((CapabilityError, ModelFileError), match=message):
        target.self_draft(Head("dflash", path))
    # The target still works, without the overhead of logging hidden states.
    target.prefill([1, 2, 3])
    assert target.verify(TokenTree.chain(4)).at(0, np.arange(VOCAB)).any()


@pytest.mark.parametrize(("kv_heads", "value_size"), [(1, 8), (3, 16)])
def test_keys_and_values_that_do_not_fit_the_queries_are_refused(
    target: LlamaCppModel, tmp_path: Path, kv_heads: int, value_size: int
) -> None:
    """They would make llama.cpp end the process."""
    path = write_head(tmp_path / "head.gguf", kv_heads=kv_heads, value_size=value_size)
    with raises(ModelFileError, "attention heads" if value_size > 8 else "its keys"):
        target.self_draft(Head("dflash", path))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_head_whose_logits_are_not_finite_is_refused(
    target: LlamaCppModel, tmp_path: Path, value: float
) -> None:
    path = changed(write_head(tmp_path / "head.gguf"), "blk.0.ffn_down.weight", value)
    with raises(ModelFileError, "not finite"):
        target.self_draft(Head("dflash", path))


@pytest.mark.parametrize("token", [-1, VOCAB, 1 << 40])
def test_a_head_that_drafts_unknown_tokens_is_refused(
    target: LlamaCppModel, tmp_path: Path, token: int
) -> None:
    path = changed(write_head(tmp_path / "head.gguf", drafted=100), "d2t", np.int64(token))
    with raises(ModelFileError, "outside"):
        target.self_draft(Head("dflash", path))


def test_a_truncated_head_is_refused(target: LlamaCppModel, files: Files, tmp_path: Path) -> None:
    path = tmp_path / "head.gguf"
    path.write_bytes(files.heads["dspark"].read_bytes()[:-100])
    with raises(ModelFileError, "incomplete"):
        target.self_draft(Head("dflash", path))


def test_a_model_is_no_head(target: LlamaCppModel, files: Files) -> None:
    with raises(CapabilityError, "a DFlash head", code="wrong_file"):
        target.self_draft(Head("dflash", files.target))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
@pytest.mark.parametrize("temperature", first([0.8, 0.0]))
def test_a_head_with_huge_weights_changes_no_reply(
    files: Files, tmp_path: Path, kind: str, temperature: float
) -> None:
    head = changed(write_head(tmp_path / "head.gguf", **KINDS[kind]), "blk.0.ffn_down.weight", 1e30)
    assert files.reply(temperature, method="dflash", head=head).tokens == files.plain_tokens(temperature)


@settings(max_examples=5, deadline=None)
@given(BYTE_CHANGES)
def test_random_bytes_in_a_head_give_an_error_or_the_same_reply(
    files: Files, changes: list[tuple[int, int]]
) -> None:
    check_changed_bytes(files.target, "dflash", files.heads["dspark"], changes, 3000)


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [{}, {"rank": 8}, {"rank": 8, "block": 16}, {"drafted": 20_000}, {"window": 8}, {"candidates": 4}],
)
def test_the_estimate_covers_what_llama_cpp_allocates(tmp_path: Path, options: dict[str, Any]) -> None:
    # A vocabulary that is large enough to matter.
    words = tuple(f"w{i}" for i in range(20_000))
    path = write_llama(tmp_path / "target.gguf", layers=3, words=words)
    head_path = write_head(tmp_path / "head.gguf", vocab=259 + len(words), **options)
    target = llamacpp.load(str(path), "target", LoadOptions(context_tokens=CONTEXT))
    with captured_log() as lines:
        head = head_of(target, head_path)
    # The last entries belong to the head. Before them, the target is reallocated to read its hidden states.
    sizes = {
        kind: [float(line.split()[-2]) * 2**20 for line in lines if f"{kind} buffer size" in line]
        for kind in ("KV", "compute", "output")
    }
    estimate = estimate_head(Head("dflash", head_path), head_path, CONTEXT)
    assert estimate.bytes_of("cache") == head.facts.kv_bytes
    caches = 2 if "window" in options else 1
    assert sum(sizes["KV"][-caches:]) == pytest.approx(estimate.bytes_of("cache"), abs=6000 * caches)
    log_bytes = MAX_LOGGED_TOKENS * len(LAYERS) * 32 * 4
    assert estimate.bytes_of("compute") - log_bytes == pytest.approx(sizes["compute"][-1], rel=0.1)
    assert sizes["output"][-1] <= estimate.bytes_of("output")
    head.close()
    target.close()


@pytest.mark.long
@pytest.mark.parametrize("options", [{"block": 2}, {"block": 2, "rank": 8}, {"block": MAX_BLOCK_TOKENS}])
def test_heads_with_small_and_large_blocks_draft(
    files: Files, tmp_path: Path, options: dict[str, Any]
) -> None:
    path = write_head(tmp_path / "head.gguf", **options)
    reply = files.reply(0.0, method="dflash", head=path, draft_length=16)
    assert reply.tokens == files.plain_tokens(0.0)
    assert reply.stats.drafted_tokens


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("draft_vocab", [VOCAB, 40])
def test_the_markov_head_reads_quantised_matrices(tmp_path: Path, kind: str, draft_vocab: int) -> None:
    random = np.random.default_rng(1)
    first, second = (random.normal(size=(count, 32)).astype(np.float32) for count in (VOCAB, draft_vocab))
    quantisation = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(tmp_path / "head.gguf", "dflash")
    for name, matrix in (("markov_w1", first), ("markov_w2", second)):
        data = gguf.quants.quantize(matrix, quantisation)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=quantisation)
    if draft_vocab < VOCAB:
        writer.add_tensor("d2t", np.arange(draft_vocab) + 5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    logits, expected = MarkovHead(tmp_path / "head.gguf", VOCAB).logits(9), second @ first[9]
    if draft_vocab < VOCAB:
        assert not logits[:5].any()
        assert not logits[45:].any()
        logits = logits[5:45]
    assert np.abs(logits - expected).max() < (4 if kind == "Q4_0" else 0.3)
    assert np.corrcoef(logits, expected)[0, 1] > 0.98
