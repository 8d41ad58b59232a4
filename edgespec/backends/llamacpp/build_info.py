"""Report the version and features of the installed llama.cpp without loading a model."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgespec.backends.llamacpp.devices import Gpu, gpus
from edgespec.backends.llamacpp.loading import default_threads
from edgespec.backends.llamacpp.native import GpuLibrary, library, library_identity, load_gpu_library
from edgespec.backends.llamacpp.weight_layouts import choose_layouts
from edgespec.errors import BackendMissingError

__all__ = ["LlamaCppInfo", "build_identity", "build_info"]


@dataclass(frozen=True, slots=True)
class LlamaCppInfo:
    """The version and features of the installed llama.cpp library.

    Attributes:
        version: The version of llama-cpp-python.
        gpu_offload: Whether llama.cpp can use a GPU.
        gpus: The GPUs that llama.cpp can use.
        gpu_library: The extra library that adds GPU support to llama-cpp-python.
        default_threads: The default number of CPU threads for large models.
        features: The CPU features and build options reported by llama.cpp.
        amx_problem: Why edgespec does not use AMX although this CPU and llama.cpp have it. Empty otherwise.
        problem: Why llama.cpp cannot be loaded, or an empty string if it can. If set, the other attributes
            keep their default values.
    """

    version: str = ""
    gpu_offload: bool = False
    gpus: tuple[Gpu, ...] = ()
    gpu_library: GpuLibrary = field(default_factory=GpuLibrary)
    default_threads: int = 0
    features: str = ""
    amx_problem: str = ""
    problem: str = ""


def build_info() -> LlamaCppInfo:
    """Return the version and features of the installed llama.cpp library."""
    try:
        lib = library()
    except BackendMissingError as error:
        return LlamaCppInfo(problem=str(error))
    return LlamaCppInfo(
        version=lib.__version__,
        gpu_offload=bool(lib.llama_supports_gpu_offload()),
        gpus=gpus(),
        gpu_library=load_gpu_library(lib),
        default_threads=default_threads(),
        features=lib.llama_print_system_info().decode("utf-8", "replace").strip(" |"),
        amx_problem=choose_layouts(),
    )


def build_identity() -> str:
    """Return a string that identifies the llama.cpp build, this processor, and the devices in use."""
    files, features = library_identity()
    parts: tuple[object, ...] = files, features, [(gpu.name, gpu.description) for gpu in gpus()]
    if "AMX_INT8 = 1" in features:
        parts += (f"AMX: {choose_layouts() or 'on'}",)
    return repr(parts)
