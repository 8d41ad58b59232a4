"""Write GGUF models with random weights for benchmarking llama.cpp's quantisation types on this machine."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llamacpp.native import ggml
from edgespec.model.model_facts import PassWeights

__all__ = ["write_benchmark_model"]

# Layer dimensions of a 1B Llama model.
_EMBEDDING, _FEED_FORWARD, _HEADS = 2048, 5632, 16
# Layer dimensions and layer count of a model whose weights take almost no time to read, used to measure the
# fixed cost of a layer.
_SMALL_EMBEDDING, _SMALL_FEED_FORWARD, _SMALL_LAYERS = 256, 256, 24
# Number of random rows per matrix. They are repeated to fill the matrix, because generating random numbers is
# slow.
_RANDOM_ROWS = 64
_CONTROL, _BYTE = 3, 6


def write_benchmark_model(path: Path, type_name: str, size_bytes: int) -> PassWeights:
    """Write a Llama model with random weights.

    Args:
        path: The file to write.
        type_name: The ggml type of the weights, such as `Q4_K`.
        size_bytes: Approximate size of the weights, or 0 for a model with many small layers.

    Returns:
        The weights of the model.

    Raises:
        OSError: The file cannot be written.
    """
    kind = gguf.GGMLQuantizationType[type_name]
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    embedding, feed_forward = _EMBEDDING, _FEED_FORWARD
    layer_elements = 4 * embedding**2 + 3 * embedding * feed_forward
    layers = max(1, round(size_bytes / (layer_elements * block_bytes / block_elements)))
    if not size_bytes:
        embedding, feed_forward, layers = _SMALL_EMBEDDING, _SMALL_FEED_FORWARD, _SMALL_LAYERS
    writer = gguf.GGUFWriter(path, "llama")
    _add_metadata(writer, embedding, feed_forward, layers)
    writer.add_tensor("token_embd.weight", np.zeros((_vocabulary_size(), embedding), np.float16))
    writer.add_tensor("output_norm.weight", np.ones(embedding, np.float32))
    shapes = {
        **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (embedding, embedding)),
        **dict.fromkeys(("ffn_gate", "ffn_up"), (feed_forward, embedding)),
        "ffn_down": (embedding, feed_forward),
    }
    matrices = {name: _matrix(kind, *shape) for name, shape in shapes.items()}
    for layer in range(layers):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(embedding, np.float32))
        for name, data in matrices.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", data, raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    return PassWeights({type_name: layers * sum(data.nbytes for data in matrices.values())}, layers)


def _vocabulary_size() -> int:
    return 3 + 256


def _add_metadata(writer: gguf.GGUFWriter, embedding: int, feed_forward: int, layers: int) -> None:
    writer.add_context_length(4096)
    writer.add_embedding_length(embedding)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(embedding // _HEADS)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))])
    writer.add_token_scores([0.0] * _vocabulary_size())
    writer.add_token_types([_CONTROL] * 3 + [_BYTE] * 256)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


@cache
def _random_rows(columns: int) -> NDArray[np.float32]:
    rows = np.random.default_rng(0).standard_normal((_RANDOM_ROWS, columns), np.float32)
    return rows / np.float32(np.sqrt(columns))


def _matrix(kind: gguf.GGMLQuantizationType, rows: int, columns: int) -> NDArray[np.uint8]:
    """Return the bytes of a random matrix quantised to the type `kind`."""
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    weights = _random_rows(columns)
    quantised = np.empty((_RANDOM_ROWS, columns // block_elements * block_bytes), np.uint8)
    ggml().ggml_quantize_chunk(
        int(kind), weights.ctypes.data, quantised.ctypes.data, 0, _RANDOM_ROWS, columns, ctypes.c_void_p()
    )
    return np.tile(quantised, (rows // _RANDOM_ROWS, 1))
