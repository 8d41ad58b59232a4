"""Matrices of GGUF files are read without loading the model.

ggml's products equal those of NumPy, up to the rounding of the weights' type.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from edgespec.backends.llamacpp.matrices import FileMatrix, GgmlProducts, product_bytes
from edgespec.errors import ModelFileError, OutOfMemoryError
from tests.raising import raises

RANDOM = np.random.default_rng(0)
MATRIX = (RANDOM.normal(size=(50, 64)) / 8).astype(np.float32)
ROWS = RANDOM.normal(size=(300, 64)).astype(np.float32)


@pytest.mark.parametrize(("dtype", "error"), [("F32", 1e-5), ("F16", 5e-3), ("BF16", 4e-2), ("F64", 1e-5)])
def test_matrices_of_heads(dtype: str, error: float) -> None:
    products = GgmlProducts(lambda: 2)
    matrix: NDArray[Any] = MATRIX.astype(np.float16) if dtype == "F16" else MATRIX
    product = products.product(matrix, dtype)
    # The buffer of the last product is reused, whether the next result is larger or smaller.
    for count in (1, 300, 2):
        result = product(ROWS[:count])
        assert result.dtype == np.float32
        np.testing.assert_allclose(result, ROWS[:count] @ MATRIX.T, rtol=0, atol=error)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q6_K"])
def test_matrices_of_gguf_files(kind: str) -> None:
    of_kind = gguf.GGMLQuantizationType[kind]
    rows = np.tile(ROWS, (1, 4))
    if kind == "Q6_K":  # The gguf package does not quantise to this type, but any bytes are weights.
        stored = RANDOM.integers(0, 256, (50, 210), np.uint8)
        stored[:, 208:] = np.full(1, 0.001, np.float16).view(np.uint8)
    else:
        stored = gguf.quants.quantize(np.tile(MATRIX, (1, 4)), of_kind)
    expected = rows @ gguf.quants.dequantize(stored, of_kind).T
    result = GgmlProducts(lambda: 1).stored_product(stored, of_kind, 50, 256)(rows)
    np.testing.assert_allclose(result, expected, rtol=0, atol=0.02 * np.abs(expected).max())


def test_several_matrices_share_a_buffer_for_results() -> None:
    products = GgmlProducts(lambda: 1)
    first, second = (products.product(matrix, "F32") for matrix in (MATRIX, -MATRIX))
    result = first(ROWS)
    assert np.array_equal(second(ROWS), -result)
    assert np.array_equal(first(ROWS), result)


def test_the_memory_of_matrices_is_freed() -> None:
    def used_bytes() -> int:
        gc.collect()
        return int(psutil.Process().memory_info().rss)

    matrix = np.ones((4096, 4096), np.float16)
    assert product_bytes("F16") * matrix.size == matrix.nbytes
    before = used_bytes()
    for _ in range(4):
        product = GgmlProducts(lambda: 1).product(matrix, "F16")
        assert product(np.ones((1, 4096), np.float32))[0, 0] == 4096
        del product
    assert used_bytes() - before < matrix.nbytes


def test_a_matrix_that_does_not_fit_in_memory_is_one_clear_error() -> None:
    products = GgmlProducts(lambda: 1)
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (1,), (1,))
    with raises(OutOfMemoryError, "head's"):
        products.stored_product(huge, gguf.GGMLQuantizationType.F32, 1 << 22, 1 << 22)
    assert products.product(MATRIX, "F32")(ROWS).any()


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0"])
def test_matrices_are_read_from_the_file(tmp_path: Path, kind: str) -> None:
    of_kind = gguf.GGMLQuantizationType[kind]
    table = np.random.default_rng(3).normal(size=(40, 32)).astype(np.float32)
    quantised = gguf.quants.quantize(table, of_kind)
    path = write_matrix(tmp_path / "model.gguf", "token_embd.weight", quantised, of_kind)
    matrix = FileMatrix(path, "output.weight", "token_embd.weight")
    expected = gguf.quants.dequantize(quantised, of_kind)
    assert np.array_equal(matrix.rows([0, 7, len(table) - 1, 7]), expected[[0, 7, -1, 7]])
    assert np.array_equal(matrix.stored(), quantised.view(np.uint8))
    assert matrix.stored_bytes == quantised.nbytes
    np.testing.assert_allclose(expected, table, rtol=0, atol=1.0)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)
    with raises(ModelFileError, "truncated", code="model_file_unreadable"):
        matrix.stored()


def test_a_file_without_the_matrix_is_refused(tmp_path: Path) -> None:
    path = write_matrix(tmp_path / "model.gguf", "output_norm.weight", np.ones(5, np.float32))
    with raises(ModelFileError, "token_embd.weight"):
        FileMatrix(path, "token_embd.weight")


def write_matrix(
    path: Path, name: str, data: NDArray[Any], kind: gguf.GGMLQuantizationType | None = None
) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
