"""Read tensors and metadata from a GGUF model, and write parts of the model to new files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import gguf

from edgespec.errors import CancelledError, ModelFileError
from edgespec.model.base import Progress
from edgespec.model.formats import layerskip_files
from edgespec.system.disks import explain_write_errors

Metadata: TypeAlias = dict[str, tuple[Any, Any, Any]]
"""Maps each key to its value, the type of the value, and the type of its elements."""
Tensors: TypeAlias = dict[str, Any]
"""Maps names to `gguf.GGUFReader` tensors, which read their data from the source file when needed."""

_LAYER = re.compile(r"blk\.(\d+)\.(.*)")
# Metadata arrays with these keys never contain one value per layer, even if their length suggests it.
_NOT_PER_LAYER = ("dimension_sections", "rope.scaling", "deepstack", "target_layer")
_LAYER_COUNTS = ("block_count", "leading_dense_block_count")
# Prefixes of metadata keys that are not copied to a new file, because the GGUF writer sets them or because
# they do not apply to the new file.
_OMITTED = ("GGUF.", "split.", "general.architecture", "general.alignment", "edgespec.")


class GgufParts:
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
                f"{parts[0]} is incomplete or damaged: {error}", "download it again, and check its size"
            ) from error
        self._fields = readers[0].fields
        self.tensors: Tensors = {str(one.name): one for reader in readers for one in reader.tensors}
        self.header_bytes = sum(int(reader.data_offset) for reader in readers)
        self.architecture = str(self._fields["general.architecture"].contents())
        self.layer_count = int(self.value("block_count", 0))

    def value(self, key: str, default: Any) -> Any:
        """Return a metadata value, given its key without the architecture prefix, such as `block_count`."""
        field = self._fields.get(f"{self.architecture}.{key}")
        return default if field is None else field.contents()

    def shared(self) -> Tensors:
        """Return the tensors that do not belong to any layer, such as the embedding."""
        return {name: tensor for name, tensor in self.tensors.items() if not _LAYER.fullmatch(name)}

    def output_head(self) -> Any:
        """Return the tensor of the output head (the embedding if tied), or None if it is missing."""
        return self.tensors.get("output.weight", self.tensors.get("token_embd.weight"))

    def layers(self, begin: int, end: int, first: int = 0) -> Tensors:
        """Return the tensors of layers [begin, end), with the layers renumbered starting at `first`."""
        chosen = {}
        for name, tensor in self.tensors.items():
            match = _LAYER.fullmatch(name)
            if match and begin <= int(match[1]) < end:
                chosen[f"blk.{int(match[1]) - begin + first}.{match[2]}"] = tensor
        return chosen

    def metadata(self, begin: int, end: int) -> Metadata:
        """Return the metadata of a model that consists of layers [begin, end)."""
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

    def metadata_with(self, upper: GgufParts) -> Metadata:
        """Return the metadata of a model with this model's layers followed by those of `upper`."""
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


def split_metadata(number: int, part_count: int, tensor_count: int) -> Metadata:
    """Return the metadata that marks a file as part `number` of a split model, counting from 0.

    `tensor_count` is the number of tensors in all parts. Only the first part needs it.
    """
    return {
        "split.no": (number, gguf.GGUFValueType.UINT16, None),
        "split.count": (part_count, gguf.GGUFValueType.UINT16, None),
        "split.tensors.count": (tensor_count, gguf.GGUFValueType.INT32, None),
    }


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Metadata,
    tensors: Tensors,
    progress: Progress | None = None,
    *,
    header_only: bool = False,
) -> None:
    """Write a GGUF file.

    Args:
        path: File to write.
        architecture: Architecture of the model.
        metadata: Metadata of the model, as returned by `GgufParts.metadata`.
        tensors: Tensors to write, keyed by their names in the new file.
        progress: Reports the fraction of bytes written so far.
        header_only: Whether to write a sparse file with a hole in place of the tensor data.

    Raises:
        OSError: The file cannot be written.
        CancelledError: `progress` returned False.
    """
    what = f"writing {path.name.removesuffix('.tmp')}"
    total_bytes, done_bytes = sum(tensor.n_bytes for tensor in tensors.values()), 0
    writer = gguf.GGUFWriter(path, architecture)
    for key, (value, kind, element) in metadata.items():
        writer.add_key_value(key, value, kind, sub_type=element)
    for name, tensor in tensors.items():
        data = tensor.data
        writer.add_tensor_info(name, data.shape, data.dtype, data.nbytes, raw_dtype=tensor.tensor_type)
    try:
        with explain_write_errors(path):
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor in () if header_only else tensors.values():
                writer.write_tensor_data(tensor.data)
                done_bytes += tensor.n_bytes
                if progress and not progress(what, done_bytes / total_bytes):
                    raise CancelledError(f"{what} was cancelled")
    finally:
        writer.close()
    if header_only:
        padding_bytes = (len(tensors) + 1) * writer.data_alignment
        os.truncate(path, path.stat().st_size + total_bytes + padding_bytes)


@contextmanager
def merged_file(
    folder: Path, path: Path, progress: Progress | None = None, *, header_only: bool = False
) -> Iterator[Path]:
    """Merge the lower and upper parts of a split model into a temporary file.

    The file is deleted at the end of the `with` block.

    Args:
        folder: Folder of the split model.
        path: File to write.
        progress: Reports the fraction of bytes written so far.
        header_only: See `write_gguf`.

    Raises:
        ModelFileError: The split model cannot be read.
        OSError: The file cannot be written.
        CancelledError: `progress` returned False.
    """
    shared = folder / layerskip_files.SHARED
    lower = GgufParts([folder / layerskip_files.LOWER_FIRST, shared, folder / layerskip_files.LOWER])
    upper = GgufParts([folder / layerskip_files.UPPER_FIRST, shared, folder / layerskip_files.UPPER])
    tensors = lower.tensors | upper.layers(0, upper.layer_count, first=lower.layer_count)
    metadata = lower.metadata_with(upper)
    try:
        write_gguf(path, lower.architecture, metadata, tensors, progress, header_only=header_only)
        yield path
    finally:
        path.unlink(missing_ok=True)
