"""Run GGUF models with llama.cpp. No other package imports llama_cpp or calls it through ctypes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgespec.backends.llamacpp.model import load

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    """Import `load` on first use, so that a worker's RPC server can start without the model code."""
    if name == "load":
        from edgespec.backends.llamacpp.model import load

        return load
    raise AttributeError(f"module 'edgespec.backends.llamacpp' has no attribute {name!r}")
