"""Run GGUF models with llama.cpp. No other package imports llama_cpp or calls it through ctypes."""

from edgespec.backends.llamacpp.model import load

__all__ = ["load"]
