"""Writes random LoRA adapters for GGUF models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFWriter

__all__ = ["write_gguf_adapter"]

_RANK = 4
_ADAPTED = ("attn_q.weight", "attn_v.weight", "ffn_down.weight")


def write_gguf_adapter(
    path: Path, model: Path, *, seed: int = 0, size: float = 1.0, architecture: str = "", kind: str = "lora"
) -> Path:
    """Write an adapter for attention and feed-forward weights of all layers of a model."""
    reader, random = GGUFReader(model), np.random.default_rng(seed)
    own = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(path, architecture or own)
    writer.add_type("adapter")
    writer.add_string("adapter.type", kind)
    writer.add_float32("adapter.lora.alpha", float(_RANK))
    for tensor in reader.tensors:
        if tensor.name.endswith(_ADAPTED):
            inputs, outputs = (int(length) for length in tensor.shape)
            lower = random.normal(size=(_RANK, inputs)) / inputs**0.5
            upper = size * random.normal(size=(outputs, _RANK)) / _RANK**0.5
            writer.add_tensor(f"{tensor.name}.lora_a", lower.astype(np.float32))
            writer.add_tensor(f"{tensor.name}.lora_b", upper.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
