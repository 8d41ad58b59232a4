"""Prepare low-bit copies of a GGUF model, or of the blocks that it streams (QSpec, SubSpec)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import TYPE_CHECKING, Any

from edgespec.errors import EdgespecError, ModelFileError, OptionError
from edgespec.methods.lowbit.drafter import (
    COPY_FILE,
    DEFAULT_TYPE,
    KIND,
    SUBSTITUTES_FILE,
    Substitutes,
    can_save_time,
    find_lowbit,
    is_valid,
)
from edgespec.model.base import Progress
from edgespec.model.formats.gguf_files import gguf_files
from edgespec.model.registry import format_at
from edgespec.model.trial_load import TrialModel, check_loadable
from edgespec.store.prepared_builder import BuildFolder, build
from edgespec.store.prepared_files import (
    PreparedModel,
    check_prepared,
    model_files,
    read_prepared,
)
from edgespec.system.files import error_reason, format_bytes, write_advice

if TYPE_CHECKING:
    from edgespec.backends.llamacpp.quantise import QuantisedSize
    from edgespec.loading.prepare.gguf_parts import GgufParts, Tensors

# Name of the temporary file that contains both parts of a split model.
_MERGED = "whole.gguf"
# The type with the fewest bits that does not need an importance matrix.
_SMALLEST_TYPE = "Q2_K"
# Extra disk space in bytes for the header of a low-bit copy, and for the headers of both files with blocks.
_HEADER_BYTES, _BLOCK_HEADER_BYTES = 1 << 20, 32 << 20
# Name of the temporary file that contains the blocks before they are quantised.
_BLOCKS = "blocks.gguf"


def prepare_lowbit(
    path: Path,
    type_name: str | None = None,
    *,
    to: Path | None = None,
    progress: Progress | None = None,
) -> PreparedModel:
    """Create a copy of a model with fewer bits per weight, or return an existing valid copy.

    The copy drafts for the model and shares its KV cache, as in QSpec (arXiv 2410.11305).

    Args:
        path: A GGUF file, or a folder prepared for early exit. For such a folder, the copy is made from the
            original file. If that file no longer exists, the lower and upper parts are merged into a
            temporary file first.
        type_name: Quantisation type for the copy, by default Q4_0.
        to: Folder to create. Defaults to a folder in the store.
        progress: Reports progress while reading and writing.

    Returns:
        The copy. Its facts are `type`, `source_weight_bytes`, `weight_bytes` and `saved_bytes`.

    Raises:
        OptionError: The type is unknown, or would not make the model smaller.
        CapabilityError: The type needs an importance matrix, or the copy cannot share the model's KV cache.
        ModelFileError: The model cannot be read, or there is not enough disk space.
        BackendError: llama.cpp failed.
        CancelledError: `progress` returned False.
    """
    from edgespec.backends.llamacpp.lowbit import check_can_share_cache
    from edgespec.backends.llamacpp.quantise import parse_quantisation_type, quantise

    type_name = parse_quantisation_type(type_name or DEFAULT_TYPE)
    if path.is_dir():
        existing = find_lowbit(path, type_name)
        if to is None and existing is not None and is_valid(existing, path):
            return existing
        split_model = read_prepared(path)
        check_prepared(split_model)
        if is_valid(split_model, split_model.source):
            path = split_model.source
    source_bytes = sum(part.stat().st_size for part in model_files(path))
    if not path.is_dir():
        check_loadable([TrialModel(path.name, path, format_at(path), runs=False)], progress)
        check_can_share_cache(path)
    size = _size(path, type_name)
    facts: Mapping[str, Any] = {
        "type": type_name,
        "source_weight_bytes": size.source_bytes,
        "weight_bytes": size.copy_bytes,
        "saved_bytes": size.source_bytes - size.copy_bytes,
    }

    def write_files(build_folder: BuildFolder) -> Mapping[str, Any]:
        def write_copy(path: Path) -> None:
            with _single_file(build_folder.source, build_folder.folder, progress) as single_file:
                quantise(single_file, path, type_name, progress)

        build_folder.file(COPY_FILE, write_copy)
        return facts

    # The GGUF header of the quantised file is about as large as the original header.
    header_bytes = max(0, source_bytes - size.source_bytes) + _HEADER_BYTES
    needed_bytes = size.copy_bytes + header_bytes + (source_bytes if path.is_dir() else 0)
    settings = {"type": type_name}
    return build("lowbit", path, settings, write_files, needed_bytes=needed_bytes, to=to, progress=progress)


def useful_copy_type(path: Path) -> str | None:
    """Return the quantisation type of a low-bit copy that can save time, or None if there is none.

    The default type is preferred. If this cannot be checked, `prepare_lowbit` reports the problem.

    Args:
        path: A GGUF file, or a folder prepared for early exit.
    """
    try:
        with _temporary_folder() as folder, _single_file(path, folder, header_only=True) as header:
            for type_name in (DEFAULT_TYPE, _SMALLEST_TYPE):
                size = _quantised_size(header, type_name)
                if can_save_time(size.copy_bytes, size.source_bytes):
                    return type_name
    except EdgespecError:
        return DEFAULT_TYPE
    return None


def _size(path: Path, type_name: str) -> QuantisedSize:
    with _temporary_folder() as folder, _single_file(path, folder, header_only=True) as header:
        size = _quantised_size(header, type_name)
        smallest = _quantised_size(header, _SMALLEST_TYPE)
    advice = (
        f"choose a lower-bit --type, such as {_SMALLEST_TYPE}"
        if can_save_time(smallest.copy_bytes, smallest.source_bytes)
        else "choose another method, because this model already uses few bits per weight"
    )
    if size.copy_bytes >= size.source_bytes:
        raise OptionError(
            f"a {type_name} copy would take {format_bytes(size.copy_bytes)}, which is no smaller than the"
            f" model itself ({format_bytes(size.source_bytes)})",
            advice,
        )
    if not can_save_time(size.copy_bytes, size.source_bytes):
        raise OptionError(
            f"a {type_name} copy would not help: it reads {format_bytes(size.copy_bytes)} for each token,"
            f" and the model itself reads {format_bytes(size.source_bytes)}, so drafting would cost more"
            " time than it saves",
            advice,
        )
    return size


def _single_file(
    source: Path, folder: Path, progress: Progress | None = None, *, header_only: bool = False
) -> AbstractContextManager[Path]:
    """Return the model as a single GGUF file. A split model is first merged into a file in `folder`."""
    if not source.is_dir():
        return nullcontext(source)
    from edgespec.loading.prepare.gguf_parts import merged_file

    return merged_file(source, folder / _MERGED, progress, header_only=header_only)


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """Yield a temporary folder. Errors from writing to it become ModelFileErrors."""
    try:
        with TemporaryDirectory() as folder:
            yield Path(folder)
    except OSError as error:
        raise ModelFileError(
            f"a temporary file cannot be written: {error_reason(error)}",
            write_advice(error, Path(gettempdir()), "TMPDIR"),
            code="file_not_written",
        ) from error


def _quantised_size(header: Path, type_name: str) -> QuantisedSize:
    """Return the size of a quantised copy. Raises CapabilityError if the type needs an importance matrix."""
    from edgespec.backends.llamacpp.quantise import importance_matrix_error, quantised_size

    size = quantised_size(header, type_name)
    if size.needs_importance_matrix:
        raise importance_matrix_error(type_name)
    return size


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
    from edgespec.loading.prepare.gguf_parts import GgufParts, write_gguf

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
    needed_bytes = 2 * streamed_bytes + _BLOCK_HEADER_BYTES
    return build(KIND, path, settings, write_files, needed_bytes=needed_bytes, to=to, progress=progress)


def estimate_substitutes(path: Path, layers: Sequence[int], type_name: str) -> Substitutes:
    """Estimate the sizes of the layers' low-bit copies by extrapolating from the first layer's copy.

    Raises:
        OptionError: A copy would not be smaller.
        CapabilityError: The type needs an importance matrix.
    """
    from edgespec.loading.prepare.gguf_parts import GgufParts, write_gguf

    model = GgufParts(gguf_files(path))
    first = _blocks(model, layers[:1])
    with _temporary_folder() as folder:
        header = folder / _BLOCKS
        write_gguf(header, model.architecture, _metadata(model), first, header_only=True)
        size = _quantised_size(header, type_name)
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
