"""The header of a GGUF file: what it says of its model and of its tensors, read without the weights."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.errors import ModelFileError

__all__ = ["GgufHeader", "GgufTensor", "Texts", "TruncatedHeader", "parse_header", "read_header"]

# Headers hold a vocabulary: some megabytes, hardly ever more than 32.
_FIRST_BYTES, _MOST_BYTES = 1 << 20, 1 << 29
_MOST_DIMENSIONS = 8
_STRING, _ARRAY = 8, 9
_SCALARS = {
    kind: struct.Struct(f"<{code}")
    for kind, code in {
        0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
    }.items()
}  # fmt: skip
_DTYPES = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_LENGTH = struct.Struct("<Q")


class TruncatedHeader(ValueError):
    """The bytes end before the header does."""


class Texts:
    """A list of texts as it lies in the file; each is made when it is asked for.

    Made all at once, those of a vocabulary take ten times as much, and leave holes in Python's memory.
    """

    def __init__(self, data: bytes, begins: array[int]) -> None:
        """begins: where each text begins in `data`, and where another one after the last would."""
        self._data, self._begins = data, begins

    def __len__(self) -> int:
        return len(self._begins) - 1

    def __getitem__(self, index: int) -> bytes:
        index = range(len(self))[index]
        return self._data[self._begins[index] : self._begins[index + 1] - _LENGTH.size]

    def __iter__(self) -> Iterator[bytes]:
        data = self._data
        return (data[begin : following - _LENGTH.size] for begin, following in pairwise(self._begins))


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor. shape: the fastest dimension first, as in the file. kind: its type, a number of ggml's.

    offset_bytes: from the end of the header.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset_bytes: int

    @property
    def elements(self) -> int:
        """How many weights it has."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A whole header. Texts are str, lists of texts `Texts`, lists of numbers numpy arrays.

    size_bytes: what the header takes in the file, with the padding before the first tensor.
    """

    metadata: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]
    size_bytes: int

    @property
    def architecture(self) -> str:
        """Such as `llama`; empty where the file does not say."""
        said = self.metadata.get("general.architecture", "")
        return said if isinstance(said, str) else ""

    def architecture_value(self, key: str, default: Any = None) -> Any:
        """The value of `ARCHITECTURE.key`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def read_header(path: Path) -> GgufHeader:
    """The header of a file. Raises ModelFileError where it is none, or is cut short."""
    try:
        with path.open("rb") as file:
            data, wanted = b"", _FIRST_BYTES
            while True:
                data += file.read(wanted - len(data))
                try:
                    return parse_header(data)
                except TruncatedHeader:
                    # Few headers are this long, and to parse one again from the front takes little.
                    if len(data) < wanted or wanted >= _MOST_BYTES:
                        raise
                    wanted *= 8
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}", "check the path") from error
    except ValueError as error:
        raise ModelFileError(f"{path} is no whole GGUF file: {error}", "download it again") from error


def parse_header(data: bytes) -> GgufHeader:
    """The header that `data` begins with.

    Raises TruncatedHeader where more bytes are needed, ValueError where they would not help.
    """
    reader = _Reader(data)
    if data[:4] != b"GGUF"[: len(data)]:
        raise ValueError(f"it begins with {data[:4]!r}")
    reader.at = 4
    version = reader.scalar(4)
    if version not in (2, 3):
        raise ValueError(f"it is of version {version}, and 2 and 3 are known")
    tensor_count, value_count = reader.scalar(10), reader.scalar(10)
    metadata = {}
    for _ in range(value_count):
        key = reader.text()
        metadata[key] = reader.value(reader.scalar(4))
    tensors = tuple(reader.tensor() for _ in range(tensor_count))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"its alignment is {alignment!r}")
    return GgufHeader(metadata, tensors, -(-reader.at // alignment) * alignment)


class _Reader:
    """Takes values off the front of some bytes. Raises TruncatedHeader where they end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def scalar(self, kind: int) -> Any:
        form = _SCALARS.get(kind)
        if form is None:
            raise ValueError(f"it has a value of type {kind}")
        return form.unpack(self._take(form.size))[0]

    def raw_text(self) -> bytes:
        return self._take(_LENGTH.unpack(self._take(8))[0])

    def text(self) -> str:
        return self.raw_text().decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        return self._array() if kind == _ARRAY else self.scalar(kind)

    def tensor(self) -> GgufTensor:
        name, dimensions = self.text(), self.scalar(4)
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"{name} has {dimensions} dimensions")
        shape = tuple(self.scalar(10) for _ in range(dimensions))
        return GgufTensor(name, shape, self.scalar(4), self.scalar(10))

    def _array(self) -> Any:
        kind, count = self.scalar(4), self.scalar(10)
        if kind == _STRING:
            return self._texts(count)
        if kind not in _DTYPES:
            raise ValueError(f"it has a list of type {kind}")
        dtype = np.dtype(_DTYPES[kind])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _texts(self, count: int) -> Texts:
        """A vocabulary's worth of texts: the one loop here that runs often enough to be written out."""
        data, begin, end = self._data, self.at + 8, len(self._data)
        length_at = _LENGTH.unpack_from
        begins = array("q", [begin])
        for _ in range(count):
            length = length_at(data, begin - 8)[0] if begin <= end else end
            if begin + length > end:
                raise TruncatedHeader("it ends in a list of texts")
            begin += length + 8
            begins.append(begin)
        self.at = begin - 8
        return Texts(data, begins)

    def _take(self, count: int) -> bytes:
        begin = self.at
        self.at += count
        if self.at > len(self._data):
            raise TruncatedHeader(f"it ends after {len(self._data):,} bytes")
        return self._data[begin : self.at]
