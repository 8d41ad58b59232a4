"""Find the libraries that scripts/setup builds next to llama-cpp-python, and load the one for GPUs."""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

__all__ = ["GpuLibrary", "library_path", "load_gpu_library"]

# The libraries in the order in which they are tried. CUDA is faster than Vulkan on NVIDIA's GPUs.
_GPU_LIBRARIES = ("cuda", "vulkan")


@dataclass(frozen=True, slots=True)
class GpuLibrary:
    """The library that makes llama.cpp use GPUs. It may find none.

    Attributes:
        name: `cuda` or `vulkan`. Empty if none is built, or if llama-cpp-python itself was built for GPUs.
        problem: Why it cannot be loaded, or an empty string if it is loaded.
    """

    name: str = ""
    problem: str = ""


def library_path(llama_cpp: ModuleType, name: str) -> Path:
    """Return the path of an extra library, such as `rpc`, for this version of llama-cpp-python."""
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return Path(str(llama_cpp.__file__)).parent / "lib" / f"libggml-{name}-{llama_cpp.__version__}.{suffix}"


@cache
def load_gpu_library(llama_cpp: ModuleType) -> GpuLibrary:
    """Load the first library that finds a GPU, unless llama-cpp-python itself was built for GPUs.

    Only one library may find GPUs, because each of them would list the same ones.
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
