"""EAGLE-1 and EAGLE-2 head files: which are rejected, the memory plan, and that damage changes no reply."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError, CapabilityError, MemoryBudgetError, ModelFileError
from edgespec.methods.draft_cache import HeadCache
from edgespec.model.base import Head, LanguageModel
from edgespec.model.formats.head_files import head_at, head_info
from edgespec.model.registry import format_at
from edgespec.store.heads import prepare_head
from tests.backends.damaged_heads import check_same_replies
from tests.backends.eagle1.targets import CONTEXT, SIZE, YARN, head_of, load, write_eagle1
from tests.backends.head_histories import first_logits
from tests.backends.published_heads import VOCAB
from tests.model.heads.published import write_head
from tests.raising import raises


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"size": 64}, CapabilityError, "hidden states of size 64"),
        ({"vocab": VOCAB + 1}, CapabilityError, "a vocabulary of size"),
        ({"target_hidden_size": 64}, CapabilityError, "hidden states of size 64"),
        ({"rope_scaling": {"type": "linear"}}, ModelFileError, "invalid settings"),
        ({"rope_scaling": {"type": "unknown"}}, ModelFileError, "invalid settings"),
        ({"rope_scaling": {"type": "yarn", "factor": "x"}}, ModelFileError, "factor "),
        ({"rope_scaling": YARN | {"beta_fast": 0}}, ModelFileError, "invalid settings"),
        ({"num_attention_heads": 0}, ModelFileError, "not an EAGLE head that edgespec supports"),
        ({"rms_norm_eps": "x"}, ModelFileError, "not an EAGLE head that edgespec supports"),
        ({"hidden_act": "gelu"}, ModelFileError, "hidden_act is 'gelu'"),
        ({"num_hidden_layers": 2}, ModelFileError, "the head has 2 layers"),
        ({"draft_vocab": 9}, ModelFileError, "has a tensor d2t, but no LM head of its own"),
        ({"changes": {"fc.weight": None}}, ModelFileError, "fc.weight is missing"),
        ({"changes": {"fc.weight": np.zeros((SIZE, SIZE), np.float32)}}, ModelFileError, "has shape"),
        ({"changes": {"fc.weight": np.zeros((SIZE, 2 * SIZE), np.int64)}}, ModelFileError, "type I64"),
        ({"changes": {"more": np.zeros(3, np.float32)}}, ModelFileError, "tensor more "),
        ({"changes": {"fc.bias": np.full(SIZE, np.nan, np.float32)}}, ModelFileError, "not finite|NaN"),
        ({"changes": {"fc.bias": np.full(SIZE, 3e38, np.float32)}}, ModelFileError, "not finite|NaN"),
        ({"changes": {"embed_tokens.weight": np.full((VOCAB, SIZE), np.inf, np.float32)}}, ModelFileError,
         "not finite|NaN"),
    ],
)  # fmt: skip
def test_damaged_heads_and_heads_for_other_targets_are_refused(
    target: LanguageModel,
    mlx_target: LanguageModel,
    tmp_path: Path,
    options: dict[str, Any],
    error: type,
    message: str,
) -> None:
    path = write_eagle1(tmp_path / "head", **options)
    for model in (target, mlx_target):
        with pytest.raises(error, match=message):
            model.self_draft(Head("eagle", path))
    # No hidden states are kept for the refused head.
    assert not cast(Any, target).logs.states


def test_a_truncated_head_is_refused(target: LanguageModel, tmp_path: Path) -> None:
    path = write_eagle1(tmp_path / "head")
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with raises(ModelFileError, "truncated"):
        head_of(target, path)


def test_a_head_with_huge_weights_changes_no_reply(folder: Path, tmp_path: Path) -> None:
    changes = {"layer.mlp.down_proj.weight": np.full((SIZE, 64), 1e30, np.float32)}
    head = write_eagle1(tmp_path / "head", changes=changes)
    check_same_replies(folder / "llama.gguf", "eagle", head, draft_branches=(2, 2))


def test_a_head_that_does_not_fit_in_memory_is_refused(folder: Path, target: LanguageModel) -> None:
    without = target.facts.weight_bytes + target.facts.max_kv_bytes
    limited = load(folder / "llama.gguf", memory_bytes=without + 10_000)
    with raises(MemoryBudgetError, "of target"):
        head_of(limited, folder / "head")
    limited.close()


def test_the_plan_counts_what_a_head_needs(folder: Path, target: LanguageModel) -> None:
    path = folder / "llama.gguf"
    planned = format_at(path).estimate_head(head_at(folder / "head"), path, CONTEXT)
    head = head_of(target, folder / "head")
    assert planned.bytes_of("weights") == head.facts.weight_bytes
    assert planned.bytes_of("cache") == head.facts.kv_bytes
    target.resize(256)
    assert 2 * head.facts.kv_bytes == planned.bytes_of("cache")


def test_interrupting_and_closing(folder: Path, target: LanguageModel) -> None:
    head = head_of(target, folder / "head")
    target.prefill([5, 6, 7])
    head.interrupt(True)
    for call in (lambda: head.verify(TokenTree.chain(8)), lambda: head.prefill([6])):
        with pytest.raises(CancelledError):
            call()
    head.interrupt(False)
    assert np.isfinite(first_logits(head, HeadCache(head), [5, 6, 7, 8])).all()
    with raises(CapabilityError, "limit of 64 ", code="draft_too_wide"):
        head.verify(TokenTree.chain(5, [6] * 64))
    head.close()
    head.close()
    target.prefill([8])


def test_a_head_is_recognised_and_needs_no_conversion(
    folder: Path, target: LanguageModel, tmp_path: Path
) -> None:
    head = folder / "head"
    assert head_info(head).heads == ("EAGLE-1",)
    with raises(ModelFileError, code="wrong_file") as caught:
        prepare_head(head, folder / "llama.gguf", tmp_path / "head.gguf")
    assert f"--head {head}" in (caught.value.next_step or "")
    eagle3 = write_head(tmp_path / "eagle3", size=SIZE, vocab=VOCAB)
    with raises(CapabilityError, code="head_not_supported"):
        head_of(target, eagle3)
