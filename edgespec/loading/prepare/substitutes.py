"""Write low-bit copies of the blocks that a GGUF model streams, for self-drafting (SubSpec)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from edgespec.errors import ModelFileError, OptionError
from edgespec.loading.prepare.gguf_parts import GgufParts, Tensors, write_gguf
from edgespec.methods.lowbit.drafter import KIND, SUBSTITUTES_FILE, Substitutes
from edgespec.model.base import Progress
from edgespec.model.formats.gguf_files import gguf_files
from edgespec.store.prepared.builder import BuildFolder, build
from edgespec.store.prepared.prepared_files import PreparedModel
from edgespec.system.files import error_reason, write_advice

__all__ = ["estimate_substitutes", "write_substitutes"]

# Name of the temporary file that contains the blocks before they are quantised.
_BLOCKS = "blocks.gguf"
# Extra disk space in bytes for the headers of both files.
_HEADER_BYTES = 32 << 20


def write_substitutes(
    path: Path,
    layers: Sequence[int],
    facts: Mapping[str, Any],
    type_name: str,
    *,
    to: Path | None = None,
    progress: Progress | None = None,
) -> PreparedModel:
    """Write low-bit copies of the feed-forward weights of some layers, or return existing valid copies.

    Args:
        path: A GGUF file.
        layers: Indices of the layers.
        facts: Additional facts about the copies.
        type_name: Quantisation type for the copies, such as Q4_0.
        to: Folder to create. Defaults to a folder in the store.
        progress: Reports progress while reading and writing.

    Returns:
        The copies. Besides `facts`, their facts are `type`, `streamed_bytes`, `weight_bytes` and
        `layer_bytes`.

    Raises:
        ModelFileError: The model cannot be read, or there is not enough disk space.
        OptionError, CancelledError: See `build`.
        BackendError: llama.cpp failed.
    """
    from edgespec.backends.llamacpp.quantise import quantise
    from edgespec.backends.llamacpp.substitutes import substitute_bytes

    model = GgufParts(gguf_files(path))
    blocks = _blocks(model, layers)
    streamed_bytes = sum(int(tensor.n_bytes) for tensor in blocks.values())

    def write_files(build_folder: BuildFolder) -> Mapping[str, Any]:
        def write_copies(file: Path) -> None:
            source = build_folder.folder / _BLOCKS
            try:
                write_gguf(source, model.architecture, _metadata(model), blocks, progress)
                quantise(source, file, type_name, progress)
            finally:
                source.unlink(missing_ok=True)

        sizes = substitute_bytes(build_folder.file(SUBSTITUTES_FILE, write_copies))
        return {
            **facts,
            "type": type_name,
            "streamed_bytes": streamed_bytes,
            "weight_bytes": sum(sizes.values()),
            "layer_bytes": {str(layer): size for layer, size in sizes.items()},
        }

    settings = {"type": type_name, "layers": ",".join(map(str, layers))}
    needed_bytes = 2 * streamed_bytes + _HEADER_BYTES
    return build(KIND, path, settings, write_files, needed_bytes=needed_bytes, to=to, progress=progress)


def estimate_substitutes(path: Path, layers: Sequence[int], type_name: str) -> Substitutes:
    """Estimate the sizes of the layers' low-bit copies by extrapolating from the first layer's copy.

    Raises:
        OptionError: A copy would not be smaller.
        CapabilityError: The type needs an importance matrix.
    """
    from edgespec.backends.llamacpp.quantise import importance_matrix_error, quantised_size

    model = GgufParts(gguf_files(path))
    first = _blocks(model, layers[:1])
    try:
        with TemporaryDirectory() as folder:
            header = Path(folder) / _BLOCKS
            write_gguf(header, model.architecture, _metadata(model), first, header_only=True)
            size = quantised_size(header, type_name)
    except OSError as error:
        raise ModelFileError(
            f"a temporary file cannot be written: {error_reason(error)}",
            write_advice(error, Path(gettempdir()), "TMPDIR"),
            code="file_not_written",
        ) from error
    if size.needs_importance_matrix:
        raise importance_matrix_error(type_name)
    if size.copy_bytes >= size.source_bytes:
        raise OptionError(
            f"{type_name} copies of the model's layers would be no smaller than the layers themselves",
            "choose a lower-bit --type, or another method",
        )
    share = size.copy_bytes / _elements(first)
    return Substitutes(Path(), {layer: int(share * _elements(_blocks(model, [layer]))) for layer in layers})


def _elements(tensors: Tensors) -> int:
    return sum(int(tensor.n_elements) for tensor in tensors.values())


def _blocks(model: GgufParts, layers: Sequence[int]) -> Tensors:
    """Return the feed-forward weights of the given layers, keyed by name."""
    from edgespec.backends.llamacpp.weight_stream import FEED_FORWARD

    found = ((name, FEED_FORWARD.fullmatch(name)) for name in model.tensors)
    return {name: model.tensors[name] for name, match in found if match and int(match[1]) in layers}


def _metadata(model: GgufParts) -> Any:
    return model.metadata(0, model.layer_count)
