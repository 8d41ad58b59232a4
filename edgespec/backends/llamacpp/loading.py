"""Load GGUF files with llama.cpp, translate its errors, and describe loaded models."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from edgespec.backends.llamacpp.context_plan import ContextPlan, choose_kv_types
from edgespec.backends.llamacpp.devices import Paths, keep_experts_in_memory, model_files
from edgespec.backends.llamacpp.expert_stream import ExpertStream, expert_table
from edgespec.backends.llamacpp.header_validation import check_headers
from edgespec.backends.llamacpp.metadata import metadata, vocabulary_size
from edgespec.backends.llamacpp.mtp_files import unloaded_bytes
from edgespec.backends.llamacpp.native import captured_log, library, recent_errors
from edgespec.backends.llamacpp.probe import ProbeResult
from edgespec.backends.llamacpp.weight_layouts import choose_layouts, layout_names
from edgespec.backends.llamacpp.weight_stream import (
    WeightStream,
    can_stream,
    choose_streamed,
    file_mappings,
    saved_bytes,
    streamable_layers,
    unloaded_ranges,
)
from edgespec.errors import CancelledError, CapabilityError, EdgespecError, MemoryBudgetError, ModelFileError
from edgespec.model.base import LoadOptions, Progress, Vocabulary
from edgespec.model.formats.file_quirks import explain_refusal
from edgespec.model.formats.gguf_files import gguf_files
from edgespec.model.formats.gguf_header import GgufHeader, read_header
from edgespec.model.formats.gguf_metadata import file_type_name
from edgespec.model.memory_estimate import check_weights_fit
from edgespec.model.model_facts import ModelFacts
from edgespec.system.cores import usable_cores
from edgespec.system.disks import stores_holes
from edgespec.system.files import cache_folder, file_state, make_private_folder

__all__ = [
    "check_file",
    "check_vocabulary",
    "default_threads",
    "describe",
    "free_weights",
    "load_all",
    "load_files",
    "load_skeleton",
    "load_vocabulary",
    "load_weights",
    "model_params",
    "named_layouts",
    "repacks_weights",
    "threads_for",
    "with_more_memory",
]

# Models with fewer weight bytes than this run on one CPU thread by default, because more threads would spend
# most of their time waiting for each other. Only toy models are that small.
_SMALL_MODEL_BYTES = 64 * 2**20
_LARGE_MODEL_BYTES = 1 << 40
# The flag that llama.cpp adds to a file type that it had to guess (LLAMA_FTYPE_GUESSED).
_GUESSED = 1024


def check_file(path: str) -> int:
    """Return the total size of a GGUF model's files in bytes. Raises ModelFileError if one is missing."""
    return sum(part.stat().st_size for part in gguf_files(Path(path)))


def _loaded_bytes(path: str, options: LoadOptions) -> int:
    return check_file(path) - (0 if options.own_head else unloaded_bytes(Path(path)))


def load_weights(path: str, name: str, options: LoadOptions, progress: Progress | None) -> Any:
    """Load the weights of a GGUF model.

    If llama.cpp repacks the weights for this CPU, the file is not memory-mapped, because the mapped pages
    would only waste memory.

    Returns:
        A llama_model handle, which the caller must free.

    Raises:
        ModelFileError: The file is damaged or unsupported.
        MemoryBudgetError: The weights exceed the memory budget or cannot be allocated.
        CancelledError: `progress` returned False.
    """
    check_weights_fit(name, _loaded_bytes(path, options), options)
    if options.mmap and options.repack and repacks_weights(path, options.gpu_layers, options.experts):
        options = replace(options, mmap=False)
    return load_files(path, name, options, progress)


def load_all(
    path: str, name: str, options: LoadOptions, progress: Progress | None
) -> tuple[Any, WeightStream | None]:
    """Load the weights of a GGUF model, except those of layers and experts that are to be streamed.

    Returns:
        A llama_model handle, and the stream that reads these layers. The caller must release both with
        `free_weights`. The stream is None if no layers are streamed.

    Raises:
        CapabilityError: The model cannot be streamed.
        MemoryBudgetError: The weights to keep exceed the memory budget.
        EdgespecError: See `load_weights` for the other errors.
    """
    # Report an invalid `--kv-type` before loading the model, which can take minutes.
    choose_kv_types(options)
    if not options.streamed_layers:
        weights = load_weights(path, name, options, progress)
        check_vocabulary(weights, path)
        return weights, None
    files = gguf_files(Path(path))
    states = _states(files)
    streamed = choose_streamed(streamable_layers(Path(path)), options)
    table = expert_table(Path(path), options)
    if not can_stream(options.gpu_layers) or not streamed:
        raise CapabilityError(f"{name} cannot run from disk on this machine", "choose a smaller model")
    saved = table.saved_bytes(options) if table else saved_bytes(streamed)
    check_weights_fit(name, _loaded_bytes(path, options) - saved, options)
    with _without_weights(files) as copies:
        before = file_mappings(copies)
        mapped = replace(options, mmap=True, mlock=False, repack=False, gpu_layers=0)
        weights = load_files([str(copy) for copy in copies], name, mapped, progress, named=files)
        found = sorted(file_mappings(copies) - before)
    check_vocabulary(weights, path)
    stream: WeightStream | None = None
    try:
        unloaded = [] if options.own_head or not unloaded_bytes(Path(path)) else unloaded_ranges(Path(path))
        stream = (
            ExpertStream(files, found, table, options, progress, unloaded)
            if table
            else WeightStream(files, found, streamed, progress, unloaded)
        )
        if _states(files) != states:
            # Fail, because the header and the weights may come from different versions of the file.
            raise ModelFileError(
                f"{path} was replaced or changed while it was being loaded", "load the model again"
            )
        return weights, stream
    except BaseException:
        free_weights(weights, stream)
        raise


def check_vocabulary(weights: Any, path: str) -> None:
    """Free a model's weights and raise ModelFileError if it has no vocabulary."""
    if not vocabulary_size(weights):
        library().llama_model_free(weights)
        raise ModelFileError(
            f"{path} has no vocabulary", "choose a complete language model", code="model_file_incomplete"
        )


def _states(files: Sequence[Path]) -> list[str]:
    with suppress(OSError):
        return [*map(file_state, files)]
    return []


def free_weights(weights: Any, stream: WeightStream | None) -> None:
    """Free the weights and the stream that `load_all` returned."""
    if stream:
        stream.close()
    library().llama_model_free(weights)


def with_more_memory(path: str, options: LoadOptions, stream: WeightStream | None) -> LoadOptions:
    """Raise the memory limit by the size of weights that llama.cpp counts although they are not in memory.

    These are streamed weights, and multi-token prediction layers that were not loaded.
    """
    if options.memory_bytes is None:
        return options
    more_bytes = check_file(path) - _loaded_bytes(path, options) + (stream.saved_bytes if stream else 0)
    return replace(options, memory_bytes=options.memory_bytes + more_bytes)


@contextmanager
def _without_weights(files: Sequence[Path]) -> Iterator[Sequence[Path]]:
    """Yield sparse copies of GGUF files without their weights, or the files themselves on failure.

    llama.cpp reads the whole file when mapping it, which is slow if the file is larger than memory.
    """
    with ExitStack() as undo:
        copies: Sequence[Path] = files
        with suppress(OSError):
            make_private_folder(cache_folder())
            folder = Path(undo.enter_context(TemporaryDirectory(dir=cache_folder())))
            empty = [_without_data(file, folder / f"{number}.gguf") for number, file in enumerate(files)]
            # On tmpfs, mapped holes would take up as much memory as the model.
            copies = files if any(map(stores_holes, empty)) else empty
        yield copies


def _without_data(file: Path, copy: Path) -> Path:
    with file.open("rb") as source, copy.open("wb") as target:
        target.write(source.read(read_header(file).size_bytes))
        target.truncate(file.stat().st_size)
    return copy


def load_files(
    paths: Paths,
    name: str,
    options: LoadOptions,
    progress: Progress | None,
    *,
    repack: bool = True,
    place: Callable[[Any], None] | None = None,
    named: Sequence[Path] | None = None,
) -> Any:
    """Load a model's weights like `load_weights`, but without first checking that they fit in memory.

    If `repack` or `options.repack` is False, llama.cpp does not repack the weights for this CPU, so they can
    be memory-mapped. `place` sets the devices in llama.cpp's parameters. If `paths` are copies, `named` lists
    the original files, which errors then name instead.
    """
    params = model_params(options.gpu_layers)
    keep_experts_in_memory(params, paths, options.experts or 0)
    if place is not None:
        place(params)
    params.use_extra_bufts &= repack and options.repack
    params.load_mtp = options.own_head
    lib = library()
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
    try:
        return _open(paths, params, named)
    except EdgespecError:
        if cancelled:
            raise CancelledError(f"loading {name} was cancelled") from None
        raise


def repacks_weights(paths: Paths, gpu_layers: int | None, experts: int | None = None) -> bool:
    """Return whether llama.cpp would repack the weights in these files for this CPU.

    See `LoadOptions` for `gpu_layers` and `experts`.
    """
    every = (paths,) if isinstance(paths, str) else tuple(paths)
    with suppress(EdgespecError, OSError):
        states = tuple(map(file_state, model_files(paths)))
        return _repacks_weights(every, gpu_layers, experts or 0, states)
    return False


@lru_cache(maxsize=64)  # Opening a model is slow, so check each version of its files once.
def _repacks_weights(
    paths: tuple[str, ...], gpu_layers: int | None, experts: int, _file_states: tuple[str, ...]
) -> bool:
    with captured_log() as lines:
        skeleton = load_skeleton(paths[0] if len(paths) == 1 else paths, gpu_layers, experts)
        library().llama_model_free(skeleton)
    return bool(named_layouts(lines))


def named_layouts(lines: Sequence[str]) -> frozenset[str]:
    """Return the layouts that llama.cpp chose for weights, given the lines that it logged meanwhile.

    It reports its buffers only in its log.
    """
    return frozenset(
        layout for layout in layout_names() if any(f" {layout} model buffer" in line for line in lines)
    )


def load_skeleton(paths: Paths, gpu_layers: int | None, experts: int = 0) -> Any:
    """Open a GGUF model without loading its weights. See `LoadOptions` for `gpu_layers` and `experts`.

    Returns:
        A llama_model handle with the size and device of each tensor.
    """
    params = model_params(gpu_layers)
    keep_experts_in_memory(params, paths, experts)
    params.no_alloc = True
    params.load_mode = library().LLAMA_LOAD_MODE_NONE
    return _open(paths, params)


def load_vocabulary(path: str) -> Any:
    """Load only the metadata and vocabulary of a GGUF file, and return a llama_model handle."""
    params = library().llama_model_default_params()
    params.vocab_only = True
    return _open(path, params)


def model_params(gpu_layers: int | None = None) -> Any:
    """Return llama.cpp's parameters for loading a model. By default, all layers run on the GPU."""
    lib = library()
    params = lib.llama_model_default_params()
    params.n_gpu_layers = -1 if gpu_layers is None else gpu_layers  # A negative number offloads all layers.
    if gpu_layers == 0:
        # Use no GPU at all. Otherwise, llama.cpp would still run long prompts on it, with different rounding
        # errors than on the CPU, and would not repack the weights for this CPU.
        params.split_mode, params.main_gpu = lib.LLAMA_SPLIT_MODE_NONE, -1
    # llama.cpp reads its layouts when it loads the model.
    choose_layouts()
    return params


def _open(paths: Paths, params: Any, named: Sequence[Path] | None = None) -> Any:
    """Open a GGUF model with llama.cpp. Errors name the files in `named`, which defaults to `paths`."""
    every = model_files(paths)
    named = named or every
    check_headers(named)
    size_bytes = sum(file.stat().st_size for file in every)
    lib = library()
    recent_errors(clear=True)
    if len(every) == 1:
        weights = lib.llama_model_load_from_file(os.fsencode(every[0]), params)
    else:
        # Pass the paths of all parts, because llama.cpp finds other parts on its own only if they have
        # standard names.
        names = (ctypes.c_char_p * len(every))(*map(os.fsencode, every))
        weights = lib.llama_model_load_from_splits(names, len(every), params)
    if not weights:
        raise _load_error(named, size_bytes, recent_errors())
    return weights


def _load_error(files: Sequence[Path], size: int, lines: list[str]) -> ModelFileError | MemoryBudgetError:
    """Convert the errors that llama.cpp logged while loading a model into an exception."""
    text, path = " ".join(lines), files[0]
    if re.search(
        r"not within the file bounds|corrupted or incomplete|failed to read|unexpectedly reached end", text
    ):
        return ModelFileError(f"{path} is incomplete or damaged ({size:,} bytes)", "download it again")
    if re.search(
        r"failed to allocate|unable to allocate|cannot allocate|out of memory|cudaMalloc failed",
        text,
        re.IGNORECASE,
    ):
        return MemoryBudgetError(
            f"{size:,} bytes of memory for {path} cannot be allocated",
            "close other programs, choose a smaller quantisation, or reduce --gpu-layers",
            code="out_of_memory",
        )
    headers: list[GgufHeader] = []
    with suppress(ModelFileError):
        headers += map(read_header, files)
    if refusal := explain_refusal(text, headers):
        return ModelFileError(f"{path} {refusal.what}", refusal.next_step, code="model_file_not_supported")
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
    file_bytes: int | None = None,
) -> ModelFacts:
    """Return a loaded model's name, sizes, capabilities and other facts.

    `file_bytes` is the total size of the model's files. By default, it is read from the files at `path`.
    """
    lib = library()
    buffer = ctypes.create_string_buffer(256)
    lib.llama_model_desc(weights, buffer, len(buffer))
    trained: int = lib.llama_model_n_ctx_train(weights)
    notice = ""
    if plan.tokens > trained:
        notice = (
            f"{name} was trained for a context of {trained:,} tokens; replies may get worse beyond that, so"
            f" consider --context {trained}"
        )
    return ModelFacts(
        name=name,
        path=path,
        architecture=metadata(weights, "general.architecture") or "unknown",
        description=buffer.value.decode("utf-8", "replace"),
        parameters=lib.llama_model_n_params(weights),
        file_bytes=check_file(path) if file_bytes is None else file_bytes,
        weight_bytes=lib.llama_model_size(weights),
        kv_bytes=plan.kv_bytes,
        quantisation=file_type_name(lib.llama_model_ftype(weights) & ~_GUESSED),
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
    """Return `options.threads` if set, or else the default number of CPU threads for this model."""
    return options.threads or default_threads(library().llama_model_size(weights))


def default_threads(weight_bytes: int = _LARGE_MODEL_BYTES) -> int:
    """Return the default number of CPU threads: the number of usable physical cores, or 1 for a small model.

    Hyper-threads share a core, so using them would only add synchronisation overhead. In a small model,
    threads spend more time waiting for each other than computing, especially if another program occupies one
    of the cores.
    """
    if weight_bytes < _SMALL_MODEL_BYTES:
        return 1
    return usable_cores()
