"""MTP layers in FP8, as in the files that DeepSeek publishes, draft like their rounded weights in 16 bits."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree

import numpy as np
import pytest

from edgespec.backends.mlx.model_skeleton import read_skeleton
from edgespec.backends.mlx.mtp import estimate_head
from edgespec.errors import ModelFileError
from edgespec.model.base import Head, LoadOptions
from edgespec.model.formats.mlx_metadata import read_mlx_info
from edgespec.model.heads.tensor_files import read_tensor_files
from tests.backends.mlx.mtp_layers import write_fp8_model
from tests.backends.mlx.test_mtp import check_plan, check_replies
from tests.backends.mlx.test_mtp_sidecars import drafts, head_of, load
from tests.raising import raises
from tests.safetensors_files import write_safetensors


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fp8_model(tmp_path_factory.mktemp("fp8") / "model", "deepseek_v3", dequantised=False)


@pytest.fixture(scope="module")
def dequantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fp8_model(tmp_path_factory.mktemp("bf16") / "model", "deepseek_v3", dequantised=True)


def test_drafts_equal_those_of_the_rounded_weights(fp8: Path, dequantised: Path) -> None:
    assert read_mlx_info(fp8).heads == ("MTP",)
    np.testing.assert_array_equal(drafts(fp8), drafts(dequantised))


@pytest.mark.long
def test_drafting_changes_no_reply(fp8: Path) -> None:
    check_replies(fp8)


def test_the_plan_counts_the_weights_in_16_bits(fp8: Path, dequantised: Path) -> None:
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
