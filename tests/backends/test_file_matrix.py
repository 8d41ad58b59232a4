"""Matrices of GGUF files are read without loading the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.backends.llamacpp.matrices import FileMatrix
from edgespec.errors import ModelFileError
from tests.raising import raises


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
