"""What the installed llama.cpp can do, without loading a model."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.backends.llamacpp.loading import default_threads
from edgespec.backends.llamacpp.native import library

__all__ = ["LlamaCppFacts", "about"]


@dataclass(frozen=True, slots=True)
class LlamaCppFacts:
    """The installed library. `features`: what it was built with and found in the processor."""

    version: str
    gpu_offload: bool
    default_threads: int
    features: str


def about() -> LlamaCppFacts:
    """The facts of the installed library. Raises BackendMissingError."""
    lib = library()
    return LlamaCppFacts(
        version=lib.__version__,
        gpu_offload=bool(lib.llama_supports_gpu_offload()),
        default_threads=default_threads(),
        features=lib.llama_print_system_info().decode("utf-8", "replace").strip(" |"),
    )
