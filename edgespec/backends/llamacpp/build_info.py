"""Query the version and features of the installed llama.cpp without loading a model."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.backends.llamacpp.loading import default_threads
from edgespec.backends.llamacpp.native import library

__all__ = ["LlamaCppBuildInfo", "build_info"]


@dataclass(frozen=True, slots=True)
class LlamaCppBuildInfo:
    """Information about the installed llama.cpp library.

    Attributes:
        version: The version of llama-cpp-python.
        gpu_offload: Whether llama.cpp was built with GPU support.
        default_threads: The default number of CPU threads for large models.
        features: The CPU features and build options that llama.cpp reports.
    """

    version: str
    gpu_offload: bool
    default_threads: int
    features: str


def build_info() -> LlamaCppBuildInfo:
    """Return the version and features of the installed llama.cpp library.

    Raises:
        BackendMissingError: llama.cpp is not installed.
    """
    lib = library()
    return LlamaCppBuildInfo(
        version=lib.__version__,
        gpu_offload=bool(lib.llama_supports_gpu_offload()),
        default_threads=default_threads(),
        features=lib.llama_print_system_info().decode("utf-8", "replace").strip(" |"),
    )
