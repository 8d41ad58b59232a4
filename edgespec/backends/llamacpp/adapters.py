"""LoRA adapters of a GGUF model."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgespec.backends.llamacpp.native import library, recent_errors
from edgespec.errors import BackendError, ModelFileError
from edgespec.model.model_facts import Adapter

__all__ = ["LoraAdapters", "adapter_bytes"]


def adapter_bytes(adapters: Sequence[Adapter]) -> int:
    """Estimate the memory of loaded adapters in bytes, which is about the size of their files."""
    return sum(Path(adapter.path).stat().st_size for adapter in adapters)


class LoraAdapters:
    """The adapters loaded for a model. llama.cpp frees them together with the model.

    Args:
        model: The llama_model handle.
        adapters: The adapters to load.

    Attributes:
        scales: The scale of each adapter. 0 disables an adapter.

    Raises:
        ModelFileError: llama.cpp cannot load an adapter, for example because it belongs to a different model.
    """

    def __init__(self, model: Any, adapters: Sequence[Adapter]) -> None:
        self.scales = tuple(adapter.scale for adapter in adapters)
        self._handles = [_load(model, Path(adapter.path)) for adapter in adapters]

    def apply(self, context: Any) -> None:
        """Apply the adapters with their current scales to a llama_context, starting with its next pass.

        Raises:
            BackendError: llama.cpp rejected the adapters.
        """
        if not self._handles:
            return
        lib, count = library(), len(self._handles)
        handles = (lib.llama_adapter_lora_p_ctypes * count)(*self._handles)
        if lib.llama_set_adapters_lora(context, handles, count, (ctypes.c_float * count)(*self.scales)):
            raise BackendError(
                "llama.cpp could not apply the adapters",
                "load the model without --adapter",
                code="adapter_unusable",
            )


def _load(model: Any, path: Path) -> Any:
    recent_errors(clear=True)
    handle = library().llama_adapter_lora_init(model, os.fsencode(path))
    if not handle:
        detail = (recent_errors() or ["llama.cpp reported no reason"])[0]
        raise ModelFileError(
            f"the adapter {path} could not be loaded: {detail}",
            "use an adapter that was trained for this model, or download it again",
            code="adapter_unusable",
        )
    return handle
