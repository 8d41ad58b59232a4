"""GGUF models run by llama.cpp. The only place that imports llama_cpp; all of ctypes stays in this folder."""

from edgespec.backends.llamacpp.model import load

__all__ = ["load"]
