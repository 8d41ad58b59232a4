"""Read tensors and metadata from a GGUF model, and write parts of the model to new files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EIO
from pathlib import Path
from typing import Any

import gguf

from edgespec.backends.base import Progress
from edgespec.backends.llamacpp import layerskip_files
from edgespec.errors import CancelledError, ModelFileError

__all__ = [
    "GgufModel",
    "GgufTensor",
    "merged_file",
    "write_metadata_part",
    "write_model",
    "write_tensor_part",
]

_LAYER = re.compile(r"blk\.(\d+)\.(.*)")
# Keys of arrays that are not per layer, even if their length happens to equal the number of layers.
_NOT_PER_LAYER = ("dimension_sections", "rope.scaling", "deepstack", "target_layer")
# Keys of layer counts, which are added together when two parts of a model are merged.
_LAYER_COUNTS = ("block_count", "leading_dense_block_count")
# Metadata keys to omit, because the writer sets them or they do not apply to a part of a model.
_OMITTED = ("GGUF.", "split.", "general.architecture", "general.alignment", "edgespec.")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor and its name in the new file. The data is read from the source file when needed."""

    name: str
    source: Any

    @property
    def size_bytes(self) -> int:
        """Size of the tensor data in bytes."""
        return int(self.source.n_bytes)

    @property
    def parameters(self) -> int:
        """Number of weights in the tensor."""
        return int(self.source.n_elements)


class GgufModel:
    """A memory-mapped GGUF model.

    Args:
        parts: Paths of all parts of the model. The first one contains the metadata.

    Raises:
        ModelFileError: A part is damaged.
    """

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
        """Return the metadata value for `key`, which excludes the architecture prefix."""
        field = self._fields.get(f"{self.architecture}.{key}")
        return default if field is None else field.contents()

    def shared(self) -> list[GgufTensor]:
        """Return the tensors that do not belong to a layer."""
        return [tensor for tensor in self.tensors if not _LAYER.fullmatch(tensor.name)]

    def layers(self, begin: int, end: int, first: int = 0) -> list[GgufTensor]:
        """Return the tensors of layers [begin, end), with the layers renumbered starting at `first`."""
        chosen = []
        for tensor in self.tensors:
            match = _LAYER.fullmatch(tensor.name)
            if match and begin <= int(match[1]) < end:
                chosen.append(GgufTensor(f"blk.{int(match[1]) - begin + first}.{match[2]}", tensor.source))
        return chosen

    def metadata(self, begin: int, end: int) -> dict[str, tuple[Any, Any, Any]]:
        """Return metadata for layers [begin, end) as a dict that maps keys to (value, type, element type)."""
        metadata = {}
        for key, field in self._fields.items():
            if key.startswith(_OMITTED) or not field.types:
                continue
            value, kind = field.contents(), field.types[0]
            if kind == gguf.GGUFValueType.ARRAY:
                if not value:
                    continue
                if self._is_per_layer(key, value):
                    value = value[begin:end]
            elif key == f"{self.architecture}.block_count":
                value = end - begin
            elif key == f"{self.architecture}.leading_dense_block_count":
                value = min(end, max(begin, value)) - begin
            metadata[key] = (value, kind, field.types[-1] if len(field.types) > 1 else None)
        return metadata

    def metadata_with(self, upper: GgufModel) -> dict[str, tuple[Any, Any, Any]]:
        """Return the `metadata` for a model with these layers followed by the layers of `upper`."""
        merged = self.metadata(0, self.layer_count)
        for key, (above, kind, element) in upper.metadata(0, upper.layer_count).items():
            below = merged[key][0]
            if kind == gguf.GGUFValueType.ARRAY:
                is_merged = self._is_per_layer(key, below) and upper._is_per_layer(key, above)
            else:
                is_merged = key.removeprefix(f"{self.architecture}.") in _LAYER_COUNTS
            if is_merged:
                merged[key] = (below + above, kind, element)
        return merged

    def _is_per_layer(self, key: str, value: Sequence[Any]) -> bool:
        has_layer_length = key.startswith(f"{self.architecture}.") and len(value) == self.layer_count
        return has_layer_length and not any(name in key for name in _NOT_PER_LAYER)


def write_metadata_part(
    path: Path,
    architecture: str,
    metadata: Mapping[str, tuple[Any, Any, Any]],
    extra: Mapping[str, int | str],
    tensor_count: int,
    part_count: int,
) -> None:
    """Write the first part of a model, which contains only metadata.

    Args:
        path: File to write.
        architecture: Architecture of the model.
        metadata: Metadata as returned by `GgufModel.metadata`.
        extra: Additional metadata.
        tensor_count: Total number of tensors in the other parts.
        part_count: Number of parts.
    """
    writer = gguf.GGUFWriter(path, architecture)
    _add_metadata(writer, metadata)
    for key, extra_value in extra.items():
        if isinstance(extra_value, int):
            writer.add_uint64(key, extra_value)
        else:
            writer.add_string(key, extra_value)
    _add_part_number(writer, 0, part_count, tensor_count)
    _write_tensors(writer, (), "", None)


def write_tensor_part(
    path: Path,
    architecture: str,
    tensors: Sequence[GgufTensor],
    number: int,
    part_count: int,
    progress: Progress | None = None,
) -> None:
    """Write tensors to part `number` of a model, counting from 1.

    Raises:
        CancelledError: `progress` returned False.
    """
    writer = gguf.GGUFWriter(path, architecture)
    _add_tensor_infos(writer, tensors)
    _add_part_number(writer, number, part_count, 0)
    _write_tensors(writer, tensors, f"writing {path.name.removesuffix('.tmp')}", progress)


def write_model(
    path: Path,
    architecture: str,
    metadata: Mapping[str, tuple[Any, Any, Any]],
    tensors: Sequence[GgufTensor],
    progress: Progress | None = None,
    *,
    header_only: bool = False,
) -> None:
    """Write a model to one file.

    Args:
        path: File to write.
        architecture: Architecture of the model.
        metadata: Metadata as returned by `GgufModel.metadata`.
        tensors: All tensors to write.
        progress: Reports the fraction of bytes written so far.
        header_only: Write a sparse file with a hole of the same size in place of the tensor data.

    Raises:
        CancelledError: `progress` returned False.
    """
    writer = gguf.GGUFWriter(path, architecture)
    _add_metadata(writer, metadata)
    _add_tensor_infos(writer, tensors)
    _write_tensors(writer, () if header_only else tensors, f"writing {path.name}", progress)
    if header_only:
        ends = sum(tensor.size_bytes + writer.data_alignment for tensor in tensors) + writer.data_alignment
        os.truncate(path, path.stat().st_size + ends)


def _add_metadata(writer: Any, metadata: Mapping[str, tuple[Any, Any, Any]]) -> None:
    for key, (value, kind, element) in metadata.items():
        writer.add_key_value(key, value, kind, sub_type=element)


def _add_tensor_infos(writer: Any, tensors: Sequence[GgufTensor]) -> None:
    for tensor in tensors:
        data = tensor.source.data
        writer.add_tensor_info(
            tensor.name, data.shape, data.dtype, data.nbytes, raw_dtype=tensor.source.tensor_type
        )


def _add_part_number(writer: Any, number: int, part_count: int, tensor_count: int) -> None:
    writer.add_uint16("split.no", number)
    writer.add_uint16("split.count", part_count)
    writer.add_int32("split.tensors.count", tensor_count)


@contextmanager
def merged_file(
    folder: Path, path: Path, progress: Progress | None = None, *, header_only: bool = False
) -> Iterator[Path]:
    """Merge the lower and upper parts of a split model into a temporary file.

    The file is deleted on leaving the context.

    Args:
        folder: Folder of the split model.
        path: File to write.
        progress: Reports the fraction of bytes written so far.
        header_only: See `write_model`.

    Raises:
        ModelFileError: The split model cannot be read.
        OSError: The file cannot be written.
        CancelledError: `progress` returned False.
    """
    shared = folder / layerskip_files.SHARED
    lower = GgufModel([folder / layerskip_files.LOWER_FIRST, shared, folder / layerskip_files.LOWER])
    upper = GgufModel([folder / layerskip_files.UPPER_FIRST, shared, folder / layerskip_files.UPPER])
    lower_count, upper_count = lower.layer_count, upper.layer_count
    tensors = [
        *lower.shared(),
        *lower.layers(0, lower_count),
        *upper.layers(0, upper_count, first=lower_count),
    ]
    metadata = lower.metadata_with(upper)
    try:
        write_model(path, lower.architecture, metadata, tensors, progress, header_only=header_only)
        yield path
    finally:
        path.unlink(missing_ok=True)


def _write_tensors(writer: Any, tensors: Sequence[GgufTensor], what: str, progress: Progress | None) -> None:
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
        if error.errno is None:  # numpy does not set errno if a write is incomplete
            raise OSError(EIO, "only part of the file could be written") from error
        raise
    finally:
        writer.close()
