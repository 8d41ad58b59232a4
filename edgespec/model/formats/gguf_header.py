"""Read the headers of GGUF files, which contain the metadata and tensor descriptions."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.errors import ModelFileError, shorten
from edgespec.system.files import reading_model_files

# Initial and maximum number of bytes to read from a GGUF file to parse its header. Most headers take a few
# MiB, because they contain the vocabulary.
_FIRST_READ_BYTES, _MAX_READ_BYTES = 1 << 20, 1 << 29
_MAX_DIMENSIONS = 8
# Number of bytes to read for the `general` keys, which writers put before the vocabulary.
_GENERAL_BYTES = 1 << 16
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
    """Raised when the data ends before the header is complete."""


class StringArray:
    """A read-only list of the byte strings in a GGUF header. Strings are copied on access.

    A Python list of the whole vocabulary would take ten times as much memory.
    """

    def __init__(self, data: bytes, begins: array[int]) -> None:
        # Offsets of the strings in `data`, followed by the end offset of the last string.
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
    """Description of a tensor in a GGUF file.

    Attributes:
        name: Tensor name, such as `blk.0.attn_q.weight`.
        shape: Dimensions in ggml's order, with the contiguous dimension first.
        kind: Data type number (`ggml_type`).
        offset_bytes: Offset of the data from the end of the header.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset_bytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A parsed GGUF header.

    Attributes:
        metadata: Values by key. Strings are str, string arrays are `StringArray`, other arrays are NumPy
            arrays.
        tensors: The tensors in file order.
        size_bytes: Size of the header, including the padding before the first tensor.
    """

    metadata: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]
    size_bytes: int

    @property
    def architecture(self) -> str:
        """Architecture name, such as `llama`, or an empty string if the file has none."""
        name = self.metadata.get("general.architecture", "")
        return name if isinstance(name, str) else ""

    def architecture_value(self, key: str, default: Any = None) -> Any:
        """Return the metadata value of `ARCHITECTURE.key`, such as `llama.block_count`, or `default`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def architecture_number(self, key: str) -> int:
        """Return the metadata value of `ARCHITECTURE.key`, or 0 if it is not a positive integer."""
        value = self.architecture_value(key)
        return int(value) if isinstance(value, int) and value > 0 else 0


def describe_start(data: bytes) -> str:
    """Describe the first bytes of a file, as in `begins with the text 'hi'`."""
    if not data:
        return "is empty"
    text = " ".join(data.decode("utf-8", "replace").split())
    if text and text.isprintable() and "\ufffd" not in text:
        return f"begins with the text {text!r}"
    return f"begins with the bytes {data[:4].hex(' ').upper()}"


def read_header(path: Path) -> GgufHeader:
    """Read the header of a GGUF file. Raises ModelFileError if the file is unreadable or damaged."""
    try:
        with reading_model_files(path), path.open("rb") as file:
            data, size = b"", _FIRST_READ_BYTES
            while True:
                data += file.read(size - len(data))
                try:
                    return parse_header(data)
                except TruncatedHeader:
                    if len(data) < size or size >= _MAX_READ_BYTES:
                        raise
                    size *= 8
    except ValueError as error:
        raise ModelFileError(
            f"{path} is not a complete GGUF file: {shorten(error)}", "download it again"
        ) from error


def parse_header(data: bytes) -> GgufHeader:
    """Parse the header at the start of `data`.

    Raises:
        TruncatedHeader: `data` ends before the header does.
        ValueError: The data is not a valid GGUF header.
    """
    reader = _Reader(data)
    tensor_count, value_count = reader.counts()
    metadata = dict(reader.pair() for _ in range(value_count))
    tensors = tuple(reader.tensor() for _ in range(tensor_count))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError("general.alignment must be a positive integer")
    return GgufHeader(metadata, tensors, -(-reader.at // alignment) * alignment)


def write_header(path: Path, source: Path, tensors: Sequence[GgufTensor], data_bytes: int) -> None:
    """Write a sparse GGUF file: another file's metadata, new tensors, and a hole in place of their data.

    Args:
        path: The file to write.
        source: A GGUF file. Metadata that marks it as a part of a split model is omitted.
        tensors: The tensors of the new file.
        data_bytes: Size of the data of all tensors, including the padding between them.

    Raises:
        OSError: A file cannot be read or written.
        ModelFileError: `source` is damaged.
    """
    size_bytes = read_header(source).size_bytes
    with source.open("rb") as file:
        reader = _Reader(file.read(size_bytes))
    _, count = reader.counts()
    values, alignment = [], 32
    for _ in range(count):
        key, value, raw = reader.raw_pair()
        if not key.startswith("split."):
            values.append(raw)
        if key == "general.alignment":
            alignment = value
    with path.open("wb") as target:
        target.write(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(values)) + b"".join(values))
        for tensor in tensors:
            name, dimensions = tensor.name.encode(), len(tensor.shape)
            target.write(
                struct.pack(f"<Q{len(name)}sI", len(name), name, dimensions)
                + struct.pack(f"<{dimensions}QIQ", *tensor.shape, tensor.kind, tensor.offset_bytes)
            )
        target.truncate(-(-target.tell() // alignment) * alignment + data_bytes)


def read_general(path: Path) -> dict[str, str]:
    """Return the text values in the `general` part of a GGUF header, such as `general.name`.

    This is much faster than `read_header`, because it does not read the vocabulary. The result is empty if
    the file cannot be read.
    """
    found: dict[str, str] = {}
    with suppress(OSError, ValueError), path.open("rb") as file:
        # Parsing past the end of these bytes raises an error, which is suppressed. Values parsed before that
        # are kept.
        reader = _Reader(file.read(_GENERAL_BYTES))
        for _ in range(reader.counts()[1]):
            key, value = reader.pair()
            if key.startswith("general.") and isinstance(value, str):
                found[key] = value
    return found


class _Reader:
    """Sequential reader of GGUF values. Raises TruncatedHeader at the end of the data."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def counts(self) -> tuple[int, int]:
        """Read the start of the file, and return the tensor and metadata counts."""
        data = self._data
        if data[:4] != b"GGUF"[: len(data)]:
            raise ValueError(f"the file {describe_start(data[:16])} instead of 'GGUF'")
        self.at = 4
        version = self.scalar(4)
        if version not in (2, 3):
            raise ValueError(f"GGUF version {version} is not supported (only versions 2 and 3 are)")
        return self.scalar(10), self.scalar(10)

    def pair(self) -> tuple[str, Any]:
        """Read the next metadata key and its value."""
        return self.text(), self.value(self.scalar(4))

    def raw_pair(self) -> tuple[str, Any, bytes]:
        """Read the next metadata key, its value, and the bytes of both."""
        begin = self.at
        key, value = self.pair()
        return key, value, self._data[begin : self.at]

    def scalar(self, kind: int) -> Any:
        form = _SCALARS.get(kind)
        if form is None:
            raise ValueError(f"the header contains a value of unknown type {kind}")
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
        if dimensions > _MAX_DIMENSIONS:
            raise ValueError(
                f"tensor {shorten(name)} has {dimensions} dimensions,"
                f" more than the maximum of {_MAX_DIMENSIONS}"
            )
        shape = tuple(self.scalar(10) for _ in range(dimensions))
        return GgufTensor(name, shape, self.scalar(4), self.scalar(10))

    def _array(self) -> Any:
        kind, count = self.scalar(4), self.scalar(10)
        if kind == _STRING:
            return self._strings(count)
        if kind not in _DTYPES:
            raise ValueError(f"the header contains an array of unknown type {kind}")
        dtype = np.dtype(_DTYPES[kind])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _strings(self, count: int) -> StringArray:
        """Read an array of strings. Avoids a function call per string, because vocabularies are large."""
        data, begin, end = self._data, self.at + 8, len(self._data)
        length_at = _LENGTH.unpack_from
        begins = array("q", [begin])
        for _ in range(count):
            length = length_at(data, begin - 8)[0] if begin <= end else end
            if begin + length > end:
                raise TruncatedHeader("the header is truncated within an array of strings")
            begin += length + 8
            begins.append(begin)
        self.at = begin - 8
        return StringArray(data, begins)

    def _take(self, count: int) -> bytes:
        begin = self.at
        self.at += count
        if self.at > len(self._data):
            raise TruncatedHeader(f"the header is truncated after {len(self._data):,} bytes")
        return self._data[begin : self.at]
