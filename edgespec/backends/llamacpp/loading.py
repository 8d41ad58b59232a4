"""Load GGUF files with llama.cpp, translate its errors, and describe loaded models."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.backends.base import LoadOptions, ModelFacts, Progress, Vocabulary
from edgespec.backends.gguf_files import gguf_files
from edgespec.backends.llamacpp.context import ContextPlan
from edgespec.backends.llamacpp.header_validation import check_header
from edgespec.backends.llamacpp.metadata import metadata
from edgespec.backends.llamacpp.native import captured_log, library, recent_errors
from edgespec.backends.llamacpp.probe import ProbeResult
from edgespec.backends.memory_check import check_weights_fit
from edgespec.cores import usable_cores
from edgespec.errors import CancelledError, MemoryBudgetError, ModelFileError

__all__ = [
    "check_file",
    "default_threads",
    "describe",
    "load_parts",
    "load_skeleton",
    "load_vocabulary",
    "load_weights",
    "repacks_weights",
    "threads_for",
]

# Models smaller than this run on one CPU thread by default. See `default_threads`.
_SMALL_MODEL_BYTES = 64 * 2**20
# The default argument of `default_threads`. Any size above `_SMALL_MODEL_BYTES` gives the same result.
_LARGE_MODEL_BYTES = 1 << 40


def check_file(path: str) -> int:
    """Return the total size in bytes of all of a GGUF model's files.

    Raises:
        ModelFileError: The file is missing or is not a GGUF file.
    """
    return sum(part.stat().st_size for part in gguf_files(Path(path)))


def load_weights(path: str, name: str, options: LoadOptions, progress: Progress | None) -> Any:
    """Load the weights of a GGUF model.

    If llama.cpp repacks the weights for this CPU, the file is read instead of memory-mapped. Otherwise the
    mapped pages would occupy memory next to the repacked copy although they are never used again.

    Args:
        path: The GGUF file, or the first file of a model in several parts.
        name: The model's name, used in progress reports and error messages.
        options: The load options.
        progress: Called repeatedly while the weights are loaded. Returns False to cancel.

    Returns:
        A llama_model handle, which the caller must free.

    Raises:
        ModelFileError: The file is damaged or unsupported.
        MemoryBudgetError: The weights exceed the memory budget or cannot be allocated.
        CancelledError: `progress` returned False.
    """
    size = check_file(path)
    check_header(Path(path))
    check_weights_fit(name, size, options)
    lib = library()
    if options.mmap and repacks_weights(path, options.gpu_layers):
        options = replace(options, mmap=False)
    return _loaded(
        lambda params: lib.llama_model_load_from_file(os.fsencode(path), params),
        path,
        name,
        size,
        options,
        progress,
    )


def repacks_weights(paths: str | Sequence[str], gpu_layers: int | None) -> bool:
    """Return whether llama.cpp would repack the weights in these files for this CPU.

    The weights themselves are not read.

    Args:
        paths: The GGUF files, as for `load_skeleton`.
        gpu_layers: The number of layers to offload. Defaults to all layers if None.
    """
    with captured_log() as lines:
        weights = _from_files(paths, _skeleton_params(gpu_layers))
    if weights:
        library().llama_model_free(weights)
    return any("_REPACK model buffer" in line for line in lines)


def load_skeleton(paths: str | Sequence[str], name: str, gpu_layers: int | None) -> Any:
    """Return a llama_model handle with the size and device of each tensor, but without allocated weights.

    Args:
        paths: A GGUF file, or all of a model's files, which may have any names.
        name: The model's name, used in error messages.
        gpu_layers: The number of layers to offload. Defaults to all layers if None.

    Raises:
        ModelFileError: The file is damaged or unsupported.
    """
    if isinstance(paths, str):
        size, first = check_file(paths), paths
    else:
        size, first = sum(map(check_file, paths)), paths[0]
    return _loaded(
        lambda _: _from_files(paths, _skeleton_params(gpu_layers)), first, name, size, LoadOptions(), None
    )


def _from_files(paths: str | Sequence[str], params: Any) -> Any:
    """Load a model from one file or a list of files. Return a llama_model, or a null pointer on failure."""
    lib = library()
    if isinstance(paths, str):
        return lib.llama_model_load_from_file(os.fsencode(paths), params)
    parts = (ctypes.c_char_p * len(paths))(*map(os.fsencode, paths))
    return lib.llama_model_load_from_splits(parts, len(paths), params)


def _skeleton_params(gpu_layers: int | None) -> Any:
    params = library().llama_model_default_params()
    params.no_alloc = True
    params.load_mode = library().LLAMA_LOAD_MODE_NONE
    params.n_gpu_layers = _native_gpu_layers(gpu_layers)
    return params


def _native_gpu_layers(gpu_layers: int | None) -> int:
    """Return the value for llama.cpp's `n_gpu_layers`, where any negative number means all layers."""
    return -1 if gpu_layers is None else gpu_layers


def load_vocabulary(path: str, name: str) -> Any:
    """Return a llama_model handle with only the metadata and the vocabulary.

    Raises:
        ModelFileError: The file is damaged or unsupported.
    """
    lib = library()

    def load(params: Any) -> Any:
        params.vocab_only = True
        return lib.llama_model_load_from_file(os.fsencode(path), params)

    return _loaded(load, path, name, check_file(path), LoadOptions(), None)


def load_parts(paths: Sequence[str], name: str, options: LoadOptions, progress: Progress | None) -> Any:
    """Load a model from a list of files with any names. See `load_weights` for arguments and errors."""
    size = sum(map(check_file, paths))
    return _loaded(lambda params: _from_files(paths, params), paths[0], name, size, options, progress)


def _loaded(
    load: Callable[[Any], Any],
    path: str,
    name: str,
    size: int,
    options: LoadOptions,
    progress: Progress | None,
) -> Any:
    check_header(Path(path))
    lib = library()
    params = lib.llama_model_default_params()
    params.n_gpu_layers = _native_gpu_layers(options.gpu_layers)
    params.load_mode = {
        (False, False): lib.LLAMA_LOAD_MODE_NONE,
        (True, False): lib.LLAMA_LOAD_MODE_MMAP,
        (False, True): lib.LLAMA_LOAD_MODE_MLOCK,
        (True, True): lib.LLAMA_LOAD_MODE_MMAP_MLOCK,
    }[options.mmap, options.mlock]
    cancelled = False

    def on_progress(fraction: float, _user_data: object) -> bool:
        nonlocal cancelled
        cancelled = progress is not None and not progress(f"loading {name}", fraction)
        return not cancelled

    callback = lib.llama_progress_callback(on_progress)
    params.progress_callback = callback
    recent_errors(clear=True)
    weights = load(params)
    if weights:
        return weights
    if cancelled:
        raise CancelledError(f"loading {name} was cancelled")
    raise _load_error(path, size, recent_errors())


def _load_error(path: str, size: int, lines: list[str]) -> ModelFileError | MemoryBudgetError:
    """Return an exception for the error messages that llama.cpp logged when loading failed."""
    text = " ".join(lines)
    if match := re.search(r"unknown model architecture: '([^']*)'", text):
        return ModelFileError(
            f"{path} has the architecture {match[1]!r}, which the installed llama.cpp does not support",
            "update llama-cpp-python or choose another model",
        )
    if re.search(
        r"not within the file bounds|corrupted or incomplete|failed to read|unexpectedly reached end", text
    ):
        return ModelFileError(f"{path} is incomplete or damaged ({size:,} bytes)", "download it again")
    if re.search(
        r"failed to allocate|unable to allocate|out of memory|cudaMalloc failed", text, re.IGNORECASE
    ):
        return MemoryBudgetError(
            f"{size:,} bytes of memory for {path} cannot be allocated",
            "close other programs, choose a smaller quantisation, or reduce --gpu-layers",
        )
    detail = lines[0] if lines else "llama.cpp reported no reason"
    return ModelFileError(
        f"{path} ({size:,} bytes) could not be loaded: {detail}", "check the file or download it again"
    )


def describe(
    weights: Any,
    path: str,
    name: str,
    plan: ContextPlan,
    vocabulary: Vocabulary,
    probe_result: ProbeResult,
) -> ModelFacts:
    """Return a description of a loaded model.

    Args:
        weights: The llama_model handle.
        path: The model's GGUF file.
        name: The model's name.
        plan: The context plan at its maximum size.
        vocabulary: The model's vocabulary.
        probe_result: The capabilities measured by `probe`.
    """
    lib = library()
    buffer = ctypes.create_string_buffer(256)
    lib.llama_model_desc(weights, buffer, len(buffer))
    trained: int = lib.llama_model_n_ctx_train(weights)
    notice = ""
    if plan.tokens > trained:
        notice = (
            f"{name} was trained for a context of {trained} tokens;"
            f" replies may be worse in longer contexts, so consider --context {trained}"
        )
    return ModelFacts(
        name=name,
        path=path,
        architecture=metadata(weights, "general.architecture") or "unknown",
        description=buffer.value.decode("utf-8", "replace"),
        parameters=lib.llama_model_n_params(weights),
        file_bytes=check_file(path),
        weight_bytes=lib.llama_model_size(weights),
        kv_bytes=plan.kv_bytes,
        quantisation=lib.llama_ftype_name(lib.llama_model_ftype(weights)).decode(),
        trained_context_tokens=trained,
        context_tokens=plan.tokens,
        vocab_size=vocabulary.size,
        chat_template=vocabulary.chat_template is not None,
        capabilities=probe_result.capabilities,
        notice=notice,
        rollback=probe_result.rollback,
        requested_context_tokens=plan.tokens,
        requested_kv_bytes=plan.kv_bytes,
    )


def threads_for(weights: Any, options: LoadOptions) -> int:
    """Return `options.threads`, or the default number of CPU threads for the model's size."""
    return options.threads or default_threads(library().llama_model_size(weights))


def default_threads(weight_bytes: int = _LARGE_MODEL_BYTES) -> int:
    """Return the default number of CPU threads: the number of usable physical cores, or 1 for a small model.

    Hyper-threads are not used, because they share a core and only add synchronisation. In a small model,
    threads spend more time waiting for each other than computing, especially if another program occupies one
    of the cores.
    """
    if weight_bytes < _SMALL_MODEL_BYTES:
        return 1
    return usable_cores()
