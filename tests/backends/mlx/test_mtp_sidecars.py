"""Models with several or quantised MTP layers, as in the files that MTPLX publishes with MLX models.

Layers in FP8, as in the files that DeepSeek publishes, draft like their rounded weights in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from edgespec.backends.mlx import mtp
from edgespec.backends.mlx.eagle import EagleHead
from edgespec.backends.mlx.model_skeleton import read_skeleton
from edgespec.backends.mlx.mtp import estimate_head
from edgespec.engine.tree import TokenTree
from edgespec.errors import ModelFileError
from edgespec.model.base import Head, LoadOptions
from edgespec.model.formats.mlx_metadata import read_mlx_info
from edgespec.model.heads.tensor_files import read_tensor_files
from tests.backends.head_histories import ROUNDS, Round, check_history
from tests.backends.mlx.mtp_layers import (
    dequantise_mtp,
    quantise_mtp,
    repeat_layer,
    write_fp8_model,
    write_mtp_layer,
    write_numbered_mtp_layer,
)
from tests.backends.mlx.test_mtp import check_plan, check_replies, head_of, load
from tests.backends.mlx.tiny_checkpoints import configuration, write_checkpoint
from tests.cases import covering, first
from tests.raising import raises
from tests.safetensors_files import write_safetensors

# An MLX quantisation mode, the bits per weight, and the group size.
QUANTISATIONS = [("affine", 4, 32), ("affine", 8, 64), ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
TOKENS = (60, 70, 80, 90, 61, 71, 81)
# The parents of these tokens in a tree whose nodes are at depths 0 to 4.
PARENTS = (-1, 0, 0, 1, 2, 3, 5)


def first_with(chained: bool) -> Callable[[Any, Iterable[EagleHead], Path], EagleHead]:
    """Return a replacement for `load_most_accurate` that picks the first head with one or several networks.

    The heads in these tests have random weights, so a trial could pick any of them.
    """

    def choose(_target: Any, choices: Iterable[EagleHead], _folder: Path) -> EagleHead:
        heads = list(choices)
        chosen = next(head for head in heads if (len(head.networks) > 1) == chained)
        for head in heads:
            if head is not chosen:
                head.close()
        return chosen

    return choose


def drafts(folder: Path, chained: bool = False) -> NDArray[np.float64]:
    """Return a head's logits for all nodes of a draft, run one level at a time after five tokens.

    The draft is a chain if the target cannot verify trees.

    Args:
        folder: The model.
        chained: Whether to run a head with several networks, if the model can be loaded with both.
    """
    target = load(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mtp, "load_most_accurate", first_with(chained))
        head = head_of(target)
    parents = PARENTS if target.facts.capabilities.tree else tuple(range(-1, len(TOKENS) - 1))
    tree = TokenTree(TOKENS, parents, (None,) * len(TOKENS))
    target.prefill([5, 6, 7, 8, 9])
    head.start_at(1)
    head.prefill([6, 7, 8, 9])
    rows, vocab, first = [], np.arange(target.facts.vocab_size), 0
    for depth in range(max(tree.depths) + 1):
        width = sum(one <= depth for one in tree.depths)
        logits = head.verify(tree.subtree(range(width)), first)
        rows += [logits.at(row, vocab) for row in range(width - first)]
        first = width
    target.close()
    return np.array(rows)


def qwen(folder: Path) -> Path:
    return write_mtp_layer(write_checkpoint(folder, "qwen3_next"))


def qwen35(folder: Path) -> Path:
    """Write a model of the family for which most files of this kind are published."""
    inner = {**configuration("qwen3_next"), "model_type": "qwen3_5_moe_text"}
    return write_mtp_layer(
        write_checkpoint(folder, "qwen3_next", config={"model_type": "qwen3_5_moe", "text_config": inner})
    )


@pytest.mark.long
@pytest.mark.parametrize(("quantisation", "stacked"), covering(QUANTISATIONS, (False, True), count=3))
def test_a_quantised_layer_drafts_like_its_rounded_weights(
    tmp_path: Path, quantisation: tuple[str, int, int], stacked: bool
) -> None:
    folder = quantise_mtp(qwen(tmp_path / "model"), *quantisation, stacked=stacked)
    assert read_mlx_info(folder).heads == ("MTP",)
    check_plan(folder)
    quantised = drafts(folder)
    np.testing.assert_allclose(quantised, drafts(dequantise_mtp(folder, *quantisation)), atol=2e-3)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", first(["mtp/weights.safetensors", "model-mtp.safetensors", "optiq/mtp.safetensors"])
)
def test_a_quantised_layer_in_any_file_changes_no_reply(tmp_path: Path, name: str) -> None:
    folder = quantise_mtp(qwen35(tmp_path / "model"), "affine", 4, 32, stacked=True)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / "mtp.safetensors").rename(folder / name)
    assert read_mlx_info(folder).heads == ("MTP",)
    check_replies(folder)


def test_a_quantised_layer_of_another_family_drafts_like_its_rounded_weights(tmp_path: Path) -> None:
    folder = write_numbered_mtp_layer(tmp_path / "model", "mimo")
    folder = quantise_mtp(folder, "affine", 8, 32, stacked=False)
    quantised = drafts(folder)
    np.testing.assert_allclose(quantised, drafts(dequantise_mtp(folder, "affine", 8, 32)), atol=2e-3)


def test_an_unknown_quantisation_is_refused(tmp_path: Path) -> None:
    folder = quantise_mtp(qwen(tmp_path / "model"), "affine", 4, 64, stacked=True)
    stored = load_file(folder / "mtp.safetensors")
    save_file({name: one for name, one in stored.items() if "biases" not in name}, folder / "mtp.safetensors")
    target = load(folder)
    with raises(ModelFileError):
        head_of(target)
    target.close()


def test_layers_of_one_module_run_one_after_another(tmp_path: Path) -> None:
    folder = qwen(tmp_path / "model")
    alone = drafts(folder)
    repeat_layer(folder, "mtp.layers.", 2, neutral=True)
    np.testing.assert_allclose(drafts(folder), alone, atol=1e-4)
    check_plan(folder)


def test_layers_of_one_module_can_each_predict_one_token(tmp_path: Path) -> None:
    folder = qwen(tmp_path / "model")
    alone = drafts(folder)
    repeat_layer(folder, "mtp.layers.", 2)
    np.testing.assert_allclose(drafts(folder, chained=True), alone, atol=1e-4)
    check_plan(folder)


@pytest.fixture(scope="module", params=["deepseek_v3", "mimo"])
def modules(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with three different MTP modules."""
    folder = write_numbered_mtp_layer(tmp_path_factory.mktemp("modules") / "model", request.param)
    prefix = "model.mtp_layers." if request.param == "mimo" else "model.layers."
    repeat_layer(folder, prefix, 2)
    random, stored = np.random.default_rng(7), load_file(folder / "mtp.safetensors")
    changed = {
        name: tensor + 0.05 * random.normal(size=tensor.shape).astype(np.float32)
        for name, tensor in stored.items()
    }
    save_file(changed, folder / "mtp.safetensors")
    return folder


def test_equal_modules_draft_like_one(tmp_path: Path) -> None:
    folder = write_numbered_mtp_layer(tmp_path / "model", "mimo")
    alone = drafts(folder)
    repeat_layer(folder, "model.mtp_layers.", 2)
    np.testing.assert_allclose(drafts(folder, chained=True), alone, atol=1e-4)


@pytest.mark.long
def test_different_modules_draft_differently_from_the_second_token_on(modules: Path, tmp_path: Path) -> None:
    alone = copytree(modules, tmp_path / "one")
    stored = load_file(modules / "mtp.safetensors")
    names = sorted({name.split(".")[2] for name in stored})
    first = {name: one for name, one in stored.items() if name.split(".")[2] == names[0]}
    save_file(first, alone / "mtp.safetensors")
    chained, single = drafts(modules, chained=True), drafts(alone)
    np.testing.assert_allclose(chained[0], single[0], atol=1e-4)
    assert np.abs(chained[1:] - single[1:]).max(axis=1).min() > 1e-3


@pytest.mark.long
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rounds=st.lists(ROUNDS, min_size=1, max_size=6), seed=st.integers(0, 1 << 16))
def test_modules_follow_their_target(modules: Path, rounds: list[Round], seed: int) -> None:
    check_history(lambda: load(modules), head_of, rounds, seed, depth=4)


@pytest.mark.long
def test_modules_change_no_reply_and_their_memory_is_planned(modules: Path) -> None:
    check_replies(modules)
    check_plan(modules)


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fp8_model(tmp_path_factory.mktemp("fp8") / "model", "deepseek_v3", dequantised=False)


@pytest.fixture(scope="module")
def dequantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fp8_model(tmp_path_factory.mktemp("bf16") / "model", "deepseek_v3", dequantised=True)


def test_fp8_layers_draft_like_their_rounded_weights(fp8: Path, dequantised: Path) -> None:
    assert read_mlx_info(fp8).heads == ("MTP",)
    np.testing.assert_array_equal(drafts(fp8), drafts(dequantised))


@pytest.mark.long
def test_fp8_layers_change_no_reply(fp8: Path) -> None:
    check_replies(fp8)


def test_the_plan_counts_fp8_weights_in_16_bits(fp8: Path, dequantised: Path) -> None:
    sizes = [read_skeleton(str(path), "model", LoadOptions()).sizes for path in (fp8, dequantised)]
    assert sizes[0] == sizes[1]
    assert sizes[0].half_bytes > sizes[0].tensor_bytes // 3
    check_plan(fp8)
    assert estimate_head(Head("mtp"), fp8, 512) == estimate_head(Head("mtp"), dequantised, 512)


def test_scales_of_another_shape_are_refused(fp8: Path, tmp_path: Path) -> None:
    folder = copytree(fp8, tmp_path / "model")
    # The other weights are dequantised.
    stored = {name: ("F32", one.read()) for name, one in read_tensor_files(fp8 / "mtp.safetensors").items()}
    name = "model.layers.2.self_attn.o_proj.weight"
    stored[name] = ("F8_E4M3", np.zeros((64, 64), np.uint8))
    stored[f"{name}_scale_inv"] = ("F32", np.ones((3, 1), np.float32))
    write_safetensors(folder / "mtp.safetensors", stored)
    target = load(folder)
    with raises(ModelFileError, "o_proj.weight", code="model_file_not_supported"):
        head_of(target)
    target.close()
