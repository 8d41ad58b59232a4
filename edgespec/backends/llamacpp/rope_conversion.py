"""Write a head's rotary embedding (RoPE) settings to a GGUF file."""

from __future__ import annotations

import gguf
import numpy as np
from numpy.typing import NDArray

from edgespec.heads.dflash_config import DFlashConfig
from edgespec.heads.eagle_config import EagleConfig

__all__ = ["ROPE_TYPES", "add_rope"]

# Values of `rope_type` that can be converted.
ROPE_TYPES = ("default", "llama3", "linear", "yarn")


def add_rope(writer: gguf.GGUFWriter, config: EagleConfig | DFlashConfig) -> None:
    """Add the RoPE metadata, and for RoPE of type `llama3`, the tensor with the frequency factors.

    Raises:
        KeyError, ValueError, TypeError, ArithmeticError: A setting is missing or invalid.
    """
    writer.add_rope_dimension_count(config.head_size)
    writer.add_rope_freq_base(config.rope_theta)
    if config.rope_type == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config))
    elif config.rope is not None and config.rope_type != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(config.rope_type))
        writer.add_rope_scaling_factor(float(config.rope["factor"]))
        if original := config.rope.get("original_max_position_embeddings"):
            writer.add_rope_scaling_orig_ctx_len(int(original))


def _llama3_factors(config: EagleConfig | DFlashConfig) -> NDArray[np.float32]:
    """Return the divisors [head_size / 2] that Llama 3 applies to the RoPE frequencies.

    High frequencies are unchanged, low frequencies are divided by `factor`, and frequencies in between are
    interpolated.
    """
    assert config.rope is not None
    factor, low, high, original = (
        float(config.rope[key])
        for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    frequencies = config.rope_theta ** -(np.arange(0, config.head_size, 2) / config.head_size)
    turns = original * frequencies / (2 * np.pi)
    share = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - share) / factor + share)).astype(np.float32)
