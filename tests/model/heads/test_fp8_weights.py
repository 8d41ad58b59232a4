"""FP8 weights are read with their scales, in every published layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.model.heads.tensor_files import read_folder_tensors, read_tensor_files
from tests.safetensors_files import write_safetensors

ROWS, COLUMNS = 130, 300
# Values that FP8 and BF16 represent exactly, with their codes.
VALUES = {0x00: 0.0, 0x01: 2**-9, 0x07: 7 * 2**-9, 0x08: 2**-6, 0x38: 1.0, 0x3C: 1.5, 0x7E: 448.0, 0xB8: -1.0}


def codes(*leading: int) -> NDArray[np.uint8]:
    shape = (*leading, ROWS, COLUMNS)
    return np.random.default_rng(0).choice(np.array(list(VALUES), np.uint8), shape)


def values(stored: NDArray[np.uint8]) -> NDArray[np.float32]:
    table = np.zeros(256, np.float32)
    table[list(VALUES)] = list(VALUES.values())
    return table[stored]


def write(folder: Path, weight: NDArray[Any], scales: NDArray[Any], suffix: str = "_scale_inv") -> Path:
    tensors = {"up.weight": ("F8_E4M3", weight), f"up.weight{suffix}": ("F32", scales.astype(np.float32))}
    file = folder / "model.safetensors"
    write_safetensors(file, tensors)
    return file


@pytest.mark.parametrize("leading", [(), (2,)])
def test_each_block_has_its_scale(tmp_path: Path, leading: tuple[int, ...]) -> None:
    stored = codes(*leading)
    scales = 2.0 ** np.arange(6 * stored[..., 0, 0].size).reshape(*leading, 2, 3)
    tensors = read_tensor_files(write(tmp_path, stored, scales))
    assert set(tensors) == {"up.weight"}
    assert tensors["up.weight"].dtype == "BF16"
    read, expected = tensors["up.weight"].read(), values(stored)
    for row, column in ((0, 0), (127, 127), (128, 128), (129, 299), (5, 256)):
        factor = scales[..., row // 128, column // 128]
        np.testing.assert_array_equal(read[..., row, column], expected[..., row, column] * factor)


@pytest.mark.parametrize("shape", [(), (1,), (ROWS, 1)])
def test_scales_can_belong_to_rows_or_to_all_elements(tmp_path: Path, shape: tuple[int, ...]) -> None:
    stored, scales = codes(), np.resize([2.0, 0.5, 8.0], shape)
    read = read_tensor_files(write(tmp_path, stored, scales, "_scale"))["up.weight"].read()
    np.testing.assert_array_equal(read, values(stored) * scales)


def test_products_are_rounded_to_the_nearest_16_bit_values(tmp_path: Path) -> None:
    stored = np.full((1, 4), 0x38, np.uint8)
    for scale, rounded in ((1 + 2**-8, 1.0), (1 + 3 * 2**-8, 1 + 2**-6), (1 + 1.1 * 2**-8, 1 + 2**-7)):
        read = read_tensor_files(write(tmp_path, stored, np.array([scale])))["up.weight"].read()
        np.testing.assert_array_equal(read, np.full((1, 4), rounded, np.float32))


def test_a_weight_and_its_scales_can_be_in_different_files(tmp_path: Path) -> None:
    stored = codes()
    write_safetensors(tmp_path / "a.safetensors", {"up.weight": ("F8_E4M3", stored)})
    scales = np.full((2, 3), 2, np.float32)
    write_safetensors(tmp_path / "b.safetensors", {"up.weight_scale_inv": ("F32", scales)})
    np.testing.assert_array_equal(read_folder_tensors(tmp_path)["up.weight"].read(), 2 * values(stored))


def test_scales_of_another_shape_are_left_for_the_reader_to_refuse(tmp_path: Path) -> None:
    tensors = read_tensor_files(write(tmp_path, codes(), np.ones((3, 3))))
    assert set(tensors) == {"up.weight", "up.weight_scale_inv"}
