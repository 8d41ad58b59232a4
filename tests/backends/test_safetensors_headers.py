"""Tests of safetensors headers that contain wrong values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec.errors import ModelFileError
from edgespec.model.formats.mlx_files import read_tensors
from tests.raising import raises


@pytest.mark.parametrize("size", [float("inf"), float("nan"), "x", None, [1], {}])
def test_a_dimension_that_is_no_integer_is_rejected(size: object, tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F16", "shape": [size], "data_offsets": [0, 2]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))
    with raises(ModelFileError, "damaged"):
        read_tensors(path)
