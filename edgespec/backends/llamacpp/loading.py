"""GGUF files: what they are, whether they fit, and loading them with errors a person can act on."""

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
from edgespec.heap import large_buffers_apart

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

_SMALL_MODEL_BYTES = 64 * 2**20


def check_file(path: str) -> int:
    """The size of a GGUF model in bytes, all its parts counted. Raises ModelFileError for anything else."""
    return sum(part.stat().st_size for part in gguf_files(Path(path)))


def load_weights(path: str, name: str, options: LoadOptions, progress: Progress | None) -> Any:
    """A llama_model.

    Weights that llama.cpp arranges anew for this processor are not mapped: the file's pages would never be
    read again, and stay in memory beside them.
    Raises ModelFileError, MemoryBudgetError, and CancelledError when `progress` returns False.
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
    """Does llama.cpp give weights of these files another order in memory? Found out without reading them.

    paths: as for `load_skeleton`.
    """
    with captured_log() as lines, large_buffers_apart():
        weights = _from_files(paths, _simulation(gpu_layers))
    if weights:
        library().llama_model_free(weights)
    return any("_REPACK model buffer" in line for line in lines)


def load_skeleton(paths: str | Sequence[str], name: str, gpu_layers: int | None) -> Any:
    """A llama_model whose weights have their sizes and places and are not there. Raises ModelFileError.

    paths: a file, or files that are its parts, whatever they are called.
    """
    if isinstance(paths, str):
        size, first = check_file(paths), paths
    else:
        size, first = sum(map(check_file, paths)), paths[0]
    return _loaded(
        lambda _: _from_files(paths, _simulation(gpu_layers)), first, name, size, LoadOptions(), None
    )


def _from_files(paths: str | Sequence[str], params: Any) -> Any:
    """What the library makes of a file, or of files that are its parts; null where it makes nothing."""
    lib = library()
    if isinstance(paths, str):
        return lib.llama_model_load_from_file(os.fsencode(paths), params)
    parts = (ctypes.c_char_p * len(paths))(*map(os.fsencode, paths))
    return lib.llama_model_load_from_splits(parts, len(paths), params)


def _simulation(gpu_layers: int | None) -> Any:
    params = library().llama_model_default_params()
    params.no_alloc = True
    params.load_mode = library().LLAMA_LOAD_MODE_NONE
    params.n_gpu_layers = -1 if gpu_layers is None else gpu_layers
    return params


def _gpu_layers(options: LoadOptions) -> int:
    """llama.cpp reads any negative number as all layers."""
    return -1 if options.gpu_layers is None else options.gpu_layers


def load_vocabulary(path: str, name: str) -> Any:
    """A llama_model without weights, to be asked about its kind and its tokens. Raises ModelFileError."""
    lib = library()

    def load(params: Any) -> Any:
        params.vocab_only = True
        return lib.llama_model_load_from_file(os.fsencode(path), params)

    return _loaded(load, path, name, check_file(path), LoadOptions(), None)


def load_parts(paths: Sequence[str], name: str, options: LoadOptions, progress: Progress | None) -> Any:
    """A llama_model of files that are its parts, whatever they are called; see `load_weights`."""
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
    params.n_gpu_layers = _gpu_layers(options)
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
    with large_buffers_apart():
        weights = load(params)
    if weights:
        return weights
    if cancelled:
        raise CancelledError(f"loading {name} was cancelled")
    raise _translated(path, size, recent_errors())


def _translated(path: str, size: int, lines: list[str]) -> ModelFileError | MemoryBudgetError:
    text = " ".join(lines)
    if match := re.search(r"unknown model architecture: '([^']*)'", text):
        return ModelFileError(
            f"{path} has the architecture {match[1]!r}, which this llama.cpp does not know",
            "update llama-cpp-python or choose another model",
        )
    if re.search(
        r"not within the file bounds|corrupted or incomplete|failed to read|unexpectedly reached end", text
    ):
        return ModelFileError(
            f"{path} is incomplete or damaged ({size:,} bytes)", "download it again and compare its size"
        )
    if re.search(
        r"failed to allocate|unable to allocate|out of memory|cudaMalloc failed", text, re.IGNORECASE
    ):
        return MemoryBudgetError(
            f"there is no memory for the {size:,} bytes of {path}",
            "close other programs, choose a smaller quantisation, or use fewer --gpu-layers",
        )
    detail = lines[0] if lines else "llama.cpp gave no reason"
    return ModelFileError(
        f"{path} ({size:,} bytes) could not be loaded: {detail}", "check or replace the file"
    )


def describe(
    weights: Any,
    path: str,
    name: str,
    plan: ContextPlan,
    vocabulary: Vocabulary,
    found: ProbeResult,
) -> ModelFacts:
    """What is known about a loaded model whose context is made by `plan`, and is never to be larger."""
    lib = library()
    buffer = ctypes.create_string_buffer(256)
    lib.llama_model_desc(weights, buffer, len(buffer))
    trained: int = lib.llama_model_n_ctx_train(weights)
    notice = ""
    if plan.tokens > trained:
        notice = f"{name} was trained for {trained} tokens of context; beyond them it may ramble"
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
        capabilities=found.capabilities,
        notice=notice,
        rollback=found.rollback,
        requested_context_tokens=plan.tokens,
        requested_kv_bytes=plan.kv_bytes,
    )


def threads_for(weights: Any, options: LoadOptions) -> int:
    """How many threads compute with these weights."""
    return options.threads or default_threads(library().llama_model_size(weights))


def default_threads(weight_bytes: int = 1 << 40) -> int:
    """Physical cores this process may use: more threads than cores only wait for each other.

    One for a model so small that threads would wait for each other longer than they work; when another
    program holds a core, that waiting costs a thousand times the work.
    """
    if weight_bytes < _SMALL_MODEL_BYTES:
        return 1
    return usable_cores()
