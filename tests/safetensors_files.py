"""Writes safetensors files with data types that NumPy lacks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray


def write_safetensors(file: Path, tensors: Mapping[str, tuple[str, NDArray[Any]]]) -> None:
    """Write each tensor's data type and array. The array's bytes are written unchanged."""
    header, end = {}, 0
    for name, (dtype, array) in tensors.items():
        span = [end, end + array.nbytes]
        header[name], end = {"dtype": dtype, "shape": array.shape, "data_offsets": span}, span[1]
    start = json.dumps(header).encode()
    start += b" " * (-len(start) % 8)
    data = b"".join(array.tobytes() for _, array in tensors.values())
    file.write_bytes(len(start).to_bytes(8, "little") + start + data)
