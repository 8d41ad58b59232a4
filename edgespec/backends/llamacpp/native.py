"""Load llama_cpp and its GPU library on first use, write its log to a file, and interrupt its passes."""

from __future__ import annotations

import _thread
import ctypes
import logging
import os
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import ModuleType
from typing import Any

from edgespec.errors import BackendError, BackendMissingError, ConfigurationError
from edgespec.system.files import (
    file_state,
    log_folder,
    make_private_folder,
    regular_file_bytes,
    touch_private,
)
from edgespec.system.installation import package_version, setup_command

__all__ = [
    "ContextParams",
    "DeviceProperties",
    "GpuLibrary",
    "Interrupt",
    "captured_log",
    "cpu_kernels",
    "ggml",
    "library",
    "library_identity",
    "library_path",
    "load_gpu_library",
    "recent_errors",
    "take_lost_interrupt",
    "use_threads",
]

_LOG = logging.getLogger("edgespec.llamacpp")
# The values of GGML_LOG_LEVEL_DEBUG, GGML_LOG_LEVEL_WARN and GGML_LOG_LEVEL_ERROR.
_DEBUG, _WARN, _ERROR = 1, 3, 4
# Seconds to wait before resending a Ctrl-C that was lost because it arrived during a Python callback from C.
_RESEND_SECONDS = 0.02
# IDs of the threads that lost a Ctrl-C in a callback. See `take_lost_interrupt`.
_lost_interrupts: set[int] = set()
_errors: deque[str] = deque(maxlen=20)
_captures: list[list[str]] = []
# Callbacks that C code may still call. ctypes does not keep them alive.
_callbacks: list[Any] = []
# llama.cpp's functions that the CPU kernels call, in the order of their arguments.
_CALLED_BY_KERNELS = (
    "llamafile_sgemm",
    "ggml_barrier",
    "ggml_threadpool_chunk_set",
    "ggml_threadpool_chunk_add",
)
# GPU libraries, in order of preference. CUDA is faster than Vulkan on NVIDIA GPUs.
_GPU_LIBRARIES = ("cuda", "vulkan")


@cache
def library() -> ModuleType:
    """Import, initialise and return the llama_cpp module. Raises BackendMissingError if that fails."""
    kernels = cpu_kernels()
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as error:
        raise BackendMissingError(
            f"llama-cpp-python, which runs GGUF models, cannot be imported: {error}",
            f"install it with `{setup_command()}`, which needs a C++ compiler",
        ) from error
    if kernels is not None:
        _connect_kernels(kernels)
    _open_log()
    _resend_interrupts_in_callbacks()
    callback = llama_cpp.llama_log_callback(_on_line)
    _callbacks.append(callback)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    load_gpu_library(llama_cpp)
    llama_cpp.llama_backend_init()
    return llama_cpp


@cache
def cpu_kernels() -> ctypes.CDLL | None:
    """Return the library that replaces some of llama.cpp's CPU kernels, or None if they are not in use.

    With it, products with some types of weights are the same for a token alone as among others. It has no
    effect unless it is loaded before llama.cpp, so `library` calls this first. See scripts/cpu_kernels.cpp.
    """
    package, version = find_spec("llama_cpp"), package_version("llama-cpp-python")
    for folder in (package and package.submodule_search_locations) or ():
        path = Path(folder) / "lib" / f"libedgespec-kernels-{version}.so"
        if path.is_file() and "llama_cpp" in sys.modules:
            warnings.warn(
                "llama_cpp was imported before edgespec loaded a model, so edgespec's faster CPU kernels are"
                " not used, and replies can differ by rounding; import llama_cpp later",
                RuntimeWarning,
                stacklevel=2,
            )
        elif path.is_file():
            with suppress(OSError):
                return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    return None


def _connect_kernels(kernels: ctypes.CDLL) -> None:
    """Pass the kernels llama.cpp's functions that they call, as far as llama.cpp was built with them."""
    from llama_cpp.llama_cpp import _lib

    functions: Iterator[Any] = (getattr(_lib, name, None) for name in _CALLED_BY_KERNELS)
    kernels.edgespec_set_functions(*(ctypes.cast(function, ctypes.c_void_p) for function in functions))


@cache
def mtmd() -> ModuleType:
    """Import and return llama_cpp's bindings for libmtmd, which encodes images.

    Raises:
        BackendMissingError: The bindings cannot be imported.
    """
    library()
    try:
        from llama_cpp import mtmd_cpp
    except (ImportError, OSError, RuntimeError) as error:
        raise BackendMissingError(
            f"llama-cpp-python was installed without libmtmd, which reads images: {error}",
            f"install it with `{setup_command()}`, which needs a C++ compiler",
        ) from error
    mtmd_cpp.mtmd_helper_log_set(_callbacks[0], ctypes.c_void_p(0))
    return mtmd_cpp


def use_threads() -> None:
    """Prepare for multi-threaded passes. Raises BackendError if any ran before this process was forked.

    After a fork, OpenMP would wait forever for threads that exist only in the parent.
    """
    if _first_threads_process() != os.getpid():
        raise BackendError(
            "llama.cpp cannot use several threads in this process, because it was forked from process"
            f" {_first_threads_process()}, which had already used several threads",
            "start the child process before you load a model, use multiprocessing's `spawn` method, or load"
            " the model with threads=1",
            code="process_forked",
        )


@cache
def _first_threads_process() -> int:
    """Return the ID of the first process that ran multi-threaded passes."""
    return os.getpid()


class ContextParams(ctypes.Structure):
    """ggml's `ggml_init_params`.

    Attributes:
        mem_size: Size in bytes of the memory for tensor and graph metadata.
        mem_buffer: Address of that memory. If None, ggml allocates it.
        no_alloc: Whether tensor data is allocated elsewhere.
    """

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class DeviceProperties(ctypes.Structure):
    """ggml's `ggml_backend_dev_props`, with the same field names."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("memory_free", ctypes.c_size_t),
        ("memory_total", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("device_id", ctypes.c_char_p),
        # Room for the capabilities, and for fields that later versions may add.
        ("others", ctypes.c_byte * 256),
    )


@cache
def ggml() -> Any:
    """Return the ggml library, with declarations of the C functions that llama_cpp does not declare.

    This is the copy of ggml that llama.cpp itself uses. `llama_cpp._ggml` can load a second copy, which does
    not know about the GPUs that `load_gpu_library` adds.
    """
    library()  # It must load the CPU kernels before anything imports llama_cpp.
    from llama_cpp.llama_cpp import _lib as libggml

    size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int64
    for name, result, arguments in (
        ("ggml_backend_dev_count", size, []),
        ("ggml_backend_dev_get", pointer, [size]),
        ("ggml_backend_dev_by_type", pointer, [ctypes.c_int]),
        ("ggml_backend_dev_type", ctypes.c_int, [pointer]),
        ("ggml_backend_dev_name", ctypes.c_char_p, [pointer]),
        ("ggml_backend_dev_description", ctypes.c_char_p, [pointer]),
        ("ggml_backend_dev_memory", None, [pointer, *[ctypes.POINTER(size)] * 2]),
        ("ggml_backend_dev_get_props", None, [pointer, ctypes.POINTER(DeviceProperties)]),
        ("ggml_backend_dev_backend_reg", pointer, [pointer]),
        ("ggml_backend_reg_get_proc_address", pointer, [pointer, ctypes.c_char_p]),
        ("ggml_backend_reg_dev_count", size, [pointer]),
        ("ggml_backend_reg_dev_get", pointer, [pointer, size]),
        ("ggml_backend_init_by_type", pointer, [ctypes.c_int, ctypes.c_char_p]),
        ("ggml_backend_free", None, [pointer]),
        ("ggml_backend_get_device", pointer, [pointer]),
        ("ggml_backend_get_default_buffer_type", pointer, [pointer]),
        ("ggml_backend_cpu_buffer_type", pointer, []),
        ("ggml_backend_buft_name", ctypes.c_char_p, [pointer]),
        ("ggml_backend_alloc_ctx_tensors", pointer, [pointer, pointer]),
        ("ggml_backend_alloc_ctx_tensors_from_buft", pointer, [pointer, pointer]),
        ("ggml_backend_buffer_free", None, [pointer]),
        ("ggml_backend_tensor_set", None, [pointer, pointer, size, size]),
        ("ggml_backend_tensor_get", None, [pointer, pointer, size, size]),
        ("ggml_backend_graph_compute", ctypes.c_int, [pointer, pointer]),
        ("ggml_gallocr_new", pointer, [pointer]),
        ("ggml_gallocr_alloc_graph", ctypes.c_bool, [pointer, pointer]),
        ("ggml_gallocr_free", None, [pointer]),
        ("ggml_init", pointer, [ContextParams]),
        ("ggml_free", None, [pointer]),
        ("ggml_new_tensor_2d", pointer, [pointer, ctypes.c_int, number, number]),
        ("ggml_mul_mat", pointer, [pointer, pointer, pointer]),
        ("ggml_set_input", None, [pointer]),
        ("ggml_set_output", None, [pointer]),
        ("ggml_new_graph_custom", pointer, [pointer, size, ctypes.c_bool]),
        ("ggml_build_forward_expand", None, [pointer, pointer]),
        ("ggml_get_name", ctypes.c_char_p, [pointer]),
        ("ggml_tensor_overhead", size, []),
        ("ggml_nbytes", size, [pointer]),
        ("ggml_nelements", number, [pointer]),
        ("ggml_nrows", number, [pointer]),
        ("ggml_get_data", pointer, [pointer]),
        ("ggml_row_size", size, [ctypes.c_int, number]),
        ("ggml_quantize_chunk", size, [ctypes.c_int, pointer, pointer, number, number, number, pointer]),
    ):
        function = getattr(libggml, name)
        function.restype, function.argtypes = result, arguments
    return libggml


class _PrivateLog(RotatingFileHandler):
    """A rotating log file that only its owner can read. Write errors are ignored."""

    def _open(self) -> TextIOWrapper:
        touch_private(Path(self.baseFilename))
        return super()._open()

    def shouldRollover(self, record: logging.LogRecord) -> bool:  # noqa: N802
        """Return whether the file is full.

        Unlike the standard library's version, this does not format the line first.
        """
        stream = self.stream
        return bool(stream and os.fstat(stream.fileno()).st_size + len(record.msg) >= self.maxBytes)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Ignore errors such as a full disk, which `logging` would print over the chat's UI."""


def _open_log() -> None:
    _LOG.propagate = False
    _LOG.setLevel(logging.INFO)
    handler: logging.Handler = logging.NullHandler()
    with suppress(ConfigurationError, OSError):
        log = log_folder() / "llamacpp.log"
        make_private_folder(log.parent)
        for file in (log, log.with_name(f"{log.name}.1")):
            if file.exists():
                regular_file_bytes(file)  # Raise OSError for a pipe, because opening it would block.
                file.chmod(0o600)
        handler = _PrivateLog(log, maxBytes=1_000_000, backupCount=1, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    _LOG.addHandler(handler)


def _resend_interrupts_in_callbacks() -> None:
    """Resend a Ctrl-C that arrives in a Python callback from C, where ctypes would discard it."""
    default_hook = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        module = getattr(unraisable.object, "__module__", None) or ""
        if issubclass(unraisable.exc_type, KeyboardInterrupt) and module.startswith("edgespec."):
            _lost_interrupts.add(threading.get_ident())
            timer = threading.Timer(_RESEND_SECONDS, _interrupt_main_thread)
            timer.daemon = True
            timer.start()
        else:
            default_hook(unraisable)

    sys.unraisablehook = hook


def take_lost_interrupt() -> bool:
    """Return whether a Ctrl-C has ended a callback on this thread since the last call.

    If so, the C code continued as if the callback had returned 0.
    """
    lost = threading.get_ident() in _lost_interrupts
    _lost_interrupts.discard(threading.get_ident())
    return lost


def _interrupt_main_thread() -> None:
    main = threading.main_thread().ident
    if sys.platform != "win32" and main is not None:
        signal.pthread_kill(main, signal.SIGINT)
    else:
        _thread.interrupt_main()


def _on_line(level: int, text: bytes, _user_data: object) -> None:
    if level == _DEBUG and not _captures:
        # Loading a model logs thousands of debug lines, which would slow it down and fill the log file.
        return
    line = text.decode("utf-8", "replace").strip()
    if not line or set(line) == {"."}:
        return
    if level == _ERROR:
        _errors.append(line)
    for lines in _captures:
        lines.append(line)
    if level == _DEBUG:
        return
    # Ignore logging errors, such as a full disk, because they must not interrupt a reply.
    logging.raiseExceptions = False
    severity = logging.WARNING if level in (_WARN, _ERROR) else logging.INFO
    # Do not use `Logger.log`, which would walk the stack to find the caller of each line. Loading a model
    # logs several hundred lines.
    _LOG.handle(logging.LogRecord(_LOG.name, severity, "", 0, line, None, None))


def recent_errors(clear: bool = False) -> list[str]:
    """Return the last 20 errors that llama.cpp logged, oldest first, and optionally clear the list."""
    lines = list(_errors)
    if clear:
        _errors.clear()
    return lines


@contextmanager
def captured_log() -> Iterator[list[str]]:
    """Collect all lines that llama.cpp logs during the `with` block, in any thread."""
    lines: list[str] = []
    _captures.append(lines)
    try:
        yield lines
    finally:
        _captures[:] = [capture for capture in _captures if capture is not lines]


class Interrupt:
    """A flag that stops a running forward pass. Any thread may set it.

    llama.cpp calls the abort callback hundreds of times per pass, and a Python callback would acquire the GIL
    each time. The callback is therefore C's `strlen` on a two-byte buffer. It returns 0 (continue) while the
    first byte is zero, and 1 (abort) after the byte is set.
    """

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(2)

    @property
    def requested(self) -> bool:
        return self._buffer.raw[0] != 0

    @requested.setter
    def requested(self, value: bool) -> None:
        self._buffer[0] = b"\x01" if value else b"\x00"

    def attach(self, context: Any) -> None:
        """Make this flag stop the forward passes of a llama_context."""
        lib = library()
        strlen = ctypes.cast(ctypes.CDLL(None).strlen, lib.ggml_abort_callback)
        lib.llama_set_abort_callback(context, strlen, ctypes.addressof(self._buffer))


@dataclass(frozen=True, slots=True)
class GpuLibrary:
    """The library that lets llama.cpp use GPUs. It may not find any GPU.

    Attributes:
        name: `cuda` or `vulkan`. Empty if neither library is built, or if llama-cpp-python itself was
            built for GPUs.
        problem: Why the library cannot be loaded, or an empty string if it is loaded.
    """

    name: str = ""
    problem: str = ""


def library_path(llama_cpp: ModuleType, name: str) -> Path:
    """Return the path of an extra library, such as `rpc`, for this version of llama-cpp-python."""
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return Path(str(llama_cpp.__file__)).parent / "lib" / f"libggml-{name}-{llama_cpp.__version__}.{suffix}"


def library_identity() -> tuple[list[str], str]:
    """Return values that identify the llama.cpp build: its files, CPU features and kernels."""
    lib = library()
    folder = Path(lib.__file__ or "").parent / "lib"
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    features = lib.llama_print_system_info().decode("utf-8", "replace")
    features += " with edgespec's kernels" if cpu_kernels() else ""
    return [file_state(file) for file in files if file.is_file()], features


@cache
def load_gpu_library(llama_cpp: ModuleType) -> GpuLibrary:
    """Load the first library that finds a GPU, unless llama-cpp-python itself was built for GPUs.

    At most one library is used, because a second one would list the same GPUs again.
    """
    result = GpuLibrary()
    if llama_cpp.llama_supports_gpu_offload():
        return result
    from llama_cpp.llama_cpp import _lib

    load = _lib.ggml_backend_load
    load.restype, load.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    for name in _GPU_LIBRARIES:
        path = library_path(llama_cpp, name)
        if not path.is_file():
            continue
        try:
            ctypes.CDLL(str(path))  # Unlike `ggml_backend_load`, this says why it fails.
        except OSError as error:
            result = GpuLibrary(name, str(error))
            continue
        registered = load(os.fsencode(path))
        result = GpuLibrary(name, "" if registered else "its driver cannot be used")
        if llama_cpp.llama_supports_gpu_offload():
            break
    return result
