"""GGUF models run by llama.cpp. This package is the only one that imports llama_cpp or uses ctypes for it."""

from edgespec.backends.llamacpp.model import load

__all__ = ["load"]
