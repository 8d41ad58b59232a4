"""Write MLX checkpoints with random weights, 30 to 150 MB each, one for each kind of memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

_ATTENTION = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "head_dim": 64}
# Settings that make these models larger than the test models.
MLX_KINDS: dict[str, dict[str, Any]] = {
    "llama": {**_ATTENTION, "num_key_value_heads": 8, "num_hidden_layers": 8},
    "qwen3": {**_ATTENTION, "num_hidden_layers": 8},
    "qwen3_moe": {**_ATTENTION, "num_hidden_layers": 4, "num_experts": 8, "moe_intermediate_size": 1024},
    "gemma3": {**_ATTENTION, "num_hidden_layers": 8, "sliding_window": 512},
    "lfm2": {**_ATTENTION, "num_hidden_layers": 3, "block_dim": 512, "block_ff_dim": 8192},
    "jamba": {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_hidden_layers": 8,
    },
    "mamba2": {"hidden_size": 1024, "num_hidden_layers": 8, "num_heads": 32, "head_dim": 64},
}


def write_mlx(folder: Path, kind: str, type_name: str, *, tiny: bool = False) -> Path:
    """Write a checkpoint of the given kind and return its folder.

    Args:
        folder: the folder to write.
        kind: a key of `MLX_KINDS`.
        type_name: `float32`, `float16`, or the bits of quantised weights, as in `4`.
        tiny: use the small sizes of the test models.
    """
    sys.path.append(str(Path(__file__).parents[2]))
    from tests.backends.mlx.tiny_checkpoints import write_checkpoint

    bits = None if type_name.startswith("float") else ("affine", int(type_name), 64)
    dtype = "float16" if bits else type_name
    larger = {} if tiny else {**MLX_KINDS[kind], "max_position_embeddings": 1 << 17}
    return write_checkpoint(folder, kind, dtype=dtype, quantisation=bits, config=larger)
