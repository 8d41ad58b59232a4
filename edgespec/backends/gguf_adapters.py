"""Check LoRA adapters for GGUF models, before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgespec.backends.gguf_files import check_is_gguf
from edgespec.backends.gguf_header import read_header
from edgespec.backends.model_facts import Adapter
from edgespec.errors import ModelFileError

__all__ = ["check_gguf_adapters"]


def check_gguf_adapters(adapters: Sequence[Adapter], model: Path) -> None:
    """Check that files contain LoRA adapters for the architecture of a GGUF model.

    Raises:
        ModelFileError: A file is missing or damaged, or contains no adapter for this architecture.
    """
    architecture = read_header(model).architecture
    for adapter in adapters:
        path = Path(adapter.path)
        if path.is_dir():
            raise ModelFileError(
                f"the adapter {path} is a folder, but {model.name} needs an adapter in a .gguf file",
                "convert it with llama.cpp's convert_lora_to_gguf.py",
            )
        check_is_gguf(path, "LoRA adapter")
        header = read_header(path)
        kinds = header.metadata.get("general.type"), header.metadata.get("adapter.type")
        if kinds != ("adapter", "lora"):
            raise ModelFileError(f"{path} is not a LoRA adapter", "pass a GGUF file with a LoRA adapter")
        if header.architecture != architecture:
            raise ModelFileError(
                f"the adapter {path} is for models of the architecture {header.architecture[:40]!r}, but"
                f" {model.name} has the architecture {architecture!r}",
                "use an adapter that was trained for this model",
            )
        if "adapter.alora.invocation_tokens" in header.metadata:
            raise ModelFileError(
                f"{path} is an activated LoRA adapter, which takes effect only after certain words",
                "use an ordinary LoRA adapter",
            )
