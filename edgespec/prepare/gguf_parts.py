"""A GGUF model's tensors and metadata, and writing some or all of them into files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from errno import EIO
from pathlib import Path
from typing import Any

import gguf

from edgespec.backends.base import Progress
from edgespec.errors import CancelledError, ModelFileError

__all__ = ["GgufModel", "GgufTensor", "write_metadata_part", "write_model", "write_tensor_part"]

_LAYER = re.compile(r"blk\.(\d+)\.(.*)")
# Arrays that are not of layers, however long they are.
_NOT_OF_LAYERS = ("dimension_sections", "rope.scaling", "deepstack", "target_layer")
# Numbers that count layers.
_OF_LAYERS = ("block_count", "leading_dense_block_count")
_LEFT_OUT = ("GGUF.", "split.", "general.architecture", "general.alignment", "edgespec.")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor under the name it is to have; its bytes stay in the file it comes from."""

    name: str
    source: Any

    @property
    def size_bytes(self) -> int:
        """What it takes."""
        return int(self.source.n_bytes)

    @property
    def parameters(self) -> int:
        """How many weights it has."""
        return int(self.source.n_elements)


class GgufModel:
    """A GGUF model on disk, mapped into memory and never read whole. Raises ModelFileError."""

    def __init__(self, parts: Sequence[Path]) -> None:
        try:
            readers = [gguf.GGUFReader(part) for part in parts]
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise ModelFileError(
                f"{parts[0]} is incomplete or damaged: {error}", "download it again and compare its size"
            ) from error
        self._fields = readers[0].fields
        self.tensors = [
            GgufTensor(str(tensor.name), tensor) for reader in readers for tensor in reader.tensors
        ]
        self.header_bytes = sum(int(reader.data_offset) for reader in readers)
        self.architecture = str(self._fields["general.architecture"].contents())
        self.layer_count = int(self.value("block_count", 0))

    def value(self, key: str, default: Any) -> Any:
        """The metadata `key` of the architecture."""
        field = self._fields.get(f"{self.architecture}.{key}")
        return default if field is None else field.contents()

    def shared(self) -> list[GgufTensor]:
        """The tensors that belong to no layer."""
        return [tensor for tensor in self.tensors if not _LAYER.fullmatch(tensor.name)]

    def layers(self, begin: int, end: int, first: int = 0) -> list[GgufTensor]:
        """The tensors of layers [begin, end), renumbered from `first`."""
        chosen = []
        for tensor in self.tensors:
            match = _LAYER.fullmatch(tensor.name)
            if match and begin <= int(match[1]) < end:
                chosen.append(GgufTensor(f"blk.{int(match[1]) - begin + first}.{match[2]}", tensor.source))
        return chosen

    def metadata(self, begin: int, end: int) -> dict[str, tuple[Any, Any, Any]]:
        """The metadata of a model that has layers [begin, end) only: value, type, type of elements."""
        kept = {}
        for key, field in self._fields.items():
            if key.startswith(_LEFT_OUT) or not field.types:
                continue
            value, kind = field.contents(), field.types[0]
            if kind == gguf.GGUFValueType.ARRAY:
                if not value:
                    continue
                if self._is_of_layers(key, value):
                    value = value[begin:end]
            elif key == f"{self.architecture}.block_count":
                value = end - begin
            elif key == f"{self.architecture}.leading_dense_block_count":
                value = min(end, max(begin, value)) - begin
            kept[key] = (value, kind, field.types[-1] if len(field.types) > 1 else None)
        return kept

    def metadata_with(self, upper: GgufModel) -> dict[str, tuple[Any, Any, Any]]:
        """The metadata of a model that has these layers and then those of `upper`; see `metadata`."""
        whole = self.metadata(0, self.layer_count)
        for key, (above, kind, element) in upper.metadata(0, upper.layer_count).items():
            below = whole[key][0]
            if kind == gguf.GGUFValueType.ARRAY:
                together = self._is_of_layers(key, below) and upper._is_of_layers(key, above)
            else:
                together = key.removeprefix(f"{self.architecture}.") in _OF_LAYERS
            if together:
                whole[key] = (below + above, kind, element)
        return whole

    def _is_of_layers(self, key: str, value: Sequence[Any]) -> bool:
        of_model = key.startswith(f"{self.architecture}.") and len(value) == self.layer_count
        return of_model and not any(name in key for name in _NOT_OF_LAYERS)


def write_metadata_part(
    path: Path,
    architecture: str,
    metadata: Mapping[str, tuple[Any, Any, Any]],
    extra: Mapping[str, int | str],
    tensor_count: int,
    part_count: int,
) -> None:
    """Write the first part of a model whose tensors are all in the others."""
    writer = gguf.GGUFWriter(path, architecture)
    _add_metadata(writer, metadata)
    for key, extra_value in extra.items():
        if isinstance(extra_value, int):
            writer.add_uint64(key, extra_value)
        else:
            writer.add_string(key, extra_value)
    _number(writer, 0, part_count, tensor_count)
    _finish(writer, (), "", None)


def write_tensor_part(
    path: Path,
    architecture: str,
    tensors: Sequence[GgufTensor],
    number: int,
    part_count: int,
    progress: Progress | None = None,
) -> None:
    """Write tensors into part `number` (from 1) of a model, one after another. Raises CancelledError."""
    writer = gguf.GGUFWriter(path, architecture)
    _announce(writer, tensors)
    _number(writer, number, part_count, 0)
    _finish(writer, tensors, f"writing {path.name.removesuffix('.tmp')}", progress)


def write_model(
    path: Path,
    architecture: str,
    metadata: Mapping[str, tuple[Any, Any, Any]],
    tensors: Sequence[GgufTensor],
    progress: Progress | None = None,
    *,
    header_only: bool = False,
) -> None:
    """Write a model into one file. header_only: as large, but with nothing where the tensors are to be.

    Raises CancelledError.
    """
    writer = gguf.GGUFWriter(path, architecture)
    _add_metadata(writer, metadata)
    _announce(writer, tensors)
    _finish(writer, () if header_only else tensors, f"writing {path.name}", progress)
    if header_only:
        ends = sum(tensor.size_bytes + writer.data_alignment for tensor in tensors) + writer.data_alignment
        os.truncate(path, path.stat().st_size + ends)


def _add_metadata(writer: Any, metadata: Mapping[str, tuple[Any, Any, Any]]) -> None:
    for key, (value, kind, element) in metadata.items():
        writer.add_key_value(key, value, kind, sub_type=element)


def _announce(writer: Any, tensors: Sequence[GgufTensor]) -> None:
    for tensor in tensors:
        data = tensor.source.data
        writer.add_tensor_info(
            tensor.name, data.shape, data.dtype, data.nbytes, raw_dtype=tensor.source.tensor_type
        )


def _number(writer: Any, number: int, part_count: int, tensor_count: int) -> None:
    writer.add_uint16("split.no", number)
    writer.add_uint16("split.count", part_count)
    writer.add_int32("split.tensors.count", tensor_count)


def _finish(writer: Any, tensors: Sequence[GgufTensor], what: str, progress: Progress | None) -> None:
    total, done = sum(tensor.size_bytes for tensor in tensors), 0
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(tensor.source.data)
            done += tensor.size_bytes
            if progress and not progress(what, done / total):
                raise CancelledError(f"{what} was cancelled")
    except OSError as error:
        if error.errno is None:  # numpy says how many items it wrote, and not why no more
            raise OSError(EIO, "only a part of a file could be written") from error
        raise
    finally:
        writer.close()
