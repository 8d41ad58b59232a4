"""Write the GGUF file of a converted head or draft model."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError, shorten
from edgespec.model.heads.layer_config import LayerConfig
from edgespec.model.heads.rotation import RopeSettings, llama3_divisors
from edgespec.system.disk_checks import explain_write_errors

__all__ = ["interleaved", "write_converted"]


def write_converted(
    output: Path,
    architecture: str,
    what: str,
    config: LayerConfig,
    tensors: Iterable[tuple[str, NDArray[Any]]],
    target_ids: NDArray[np.int64] | None,
    add_settings: Callable[[gguf.GGUFWriter], None],
) -> None:
    """Write a head or a draft model to a GGUF file, with matrices in float16.

    Args:
        output: The file to write.
        architecture: The file's `general.architecture`.
        what: Description of the head or draft model, for error messages.
        config: The configuration of its transformer layers.
        tensors: (GGUF name, values) pairs.
        target_ids: Target token id for each draft token, or None if the two vocabularies are the same.
        add_settings: Adds all other metadata to the file.

    Raises:
        ModelFileError: A setting is missing, or a setting or a weight cannot be stored.
        OSError: The file cannot be written.
    """
    writer = gguf.GGUFWriter(output, architecture)
    try:
        _add_shared_settings(writer, config)
        add_settings(writer)
        for name, values in tensors:
            writer.add_tensor(name, _converted(values, f"the {name} of {what}"))
        if target_ids is not None:
            writer.add_tensor("d2t", target_ids)
        with explain_write_errors(output):
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
    except (KeyError, ValueError, TypeError, ArithmeticError, struct.error) as error:
        raise ModelFileError(
            f"the config.json of {what} has invalid settings: {shorten(error)}",
            "download it again",
        ) from error
    finally:
        writer.close()


def interleaved(weights: NDArray[Any], head_size: int) -> NDArray[Any]:
    """Reorder the rows of each attention head, as llama.cpp's RoPE expects.

    llama.cpp rotates pairs of adjacent rows. Published weights pair each row of the first half with the
    corresponding row of the second half.
    """
    heads = weights.reshape(-1, 2, head_size // 2, weights.shape[1])
    return heads.swapaxes(1, 2).reshape(weights.shape)


def _converted(values: NDArray[Any], name: str) -> NDArray[Any]:
    """Convert a tensor to the type that the GGUF file stores.

    Raises ModelFileError if a value is not finite, or too large for the type.
    """
    with np.errstate(over="ignore"):
        converted = values.astype(np.float16 if values.ndim > 1 else np.float32)
    if not np.isfinite(converted).all():
        raise ModelFileError(
            f"{name} contains values that are not finite or exceed the range of {converted.dtype}",
            "download it again, or choose another one",
        )
    return converted


def _add_shared_settings(writer: gguf.GGUFWriter, config: LayerConfig) -> None:
    writer.add_context_length(config.context_tokens)
    writer.add_feed_forward_length(config.feed_forward_size)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_size)
    writer.add_value_length(config.head_size)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_rope(writer, config.rope, config.head_size)


def _add_rope(writer: gguf.GGUFWriter, rope: RopeSettings, head_size: int) -> None:
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(rope.theta)
    if rope.kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, head_size).astype(np.float32))
    elif rope.kind != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope.kind))
        writer.add_rope_scaling_factor(float(rope.scaling["factor"]))
        if original := rope.scaling.get("original_max_position_embeddings"):
            writer.add_rope_scaling_orig_ctx_len(int(original))
