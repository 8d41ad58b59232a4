"""Convert a draft model from the MLX or Hugging Face layout to GGUF."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llamacpp.gguf_conversion import interleaved, write_converted
from edgespec.errors import ModelFileError, shorten
from edgespec.model.heads.layer_config import LayerConfig, layer_settings, read_config
from edgespec.model.heads.rotation import ROPE_KINDS
from edgespec.model.heads.stored_tensor import StoredTensor
from edgespec.model.heads.tensor_files import read_folder_tensors

__all__ = ["convert_draft_model"]

# Architectures that can be converted, by `model_type` in config.json.
_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
# Name endings of the Llama tensors whose outputs get rotary position embeddings.
_ROTATED = ("q_proj.weight", "k_proj.weight")
# The numbers of bits per weight that MLX's quantisation supports.
_BITS = (2, 3, 4, 5, 6, 8)
# Maximum number of bits to unpack at once from a quantised matrix. Limits the memory for unpacking.
_UNPACKED_BITS = 2**26


def convert_draft_model(folder: Path, tokenizer: Mapping[str, tuple[Any, Any, Any]], output: Path) -> None:
    """Convert the model in a folder to a GGUF file. Its matrices become float16.

    Args:
        folder: Folder with `config.json` and the weights, which may be quantised by MLX.
        tokenizer: The tokenizer metadata from the target's GGUF file: (value, type, element type) by key.
        output: The GGUF file to write.

    Raises:
        ModelFileError: The model is damaged, or its architecture cannot be converted.
        OSError: A file cannot be read or written.
    """
    settings, stored = read_config(folder), read_folder_tensors(folder)
    try:
        config = LayerConfig(**layer_settings(settings))
        layers, size = int(settings["num_hidden_layers"]), int(settings["hidden_size"])
    except (KeyError, ValueError, TypeError, ArithmeticError) as error:
        raise _unusable(folder, f"the settings in config.json are invalid: {shorten(error)}") from error
    if problem := _problem(settings, config, stored):
        raise _unusable(folder, problem)
    kind = _ARCHITECTURES[settings["model_type"]]
    names = gguf.get_tensor_name_map(kind, layers)
    tensors = _tensors(folder, stored, settings, config, names)

    def add_settings(writer: gguf.GGUFWriter) -> None:
        writer.add_block_count(layers)
        writer.add_embedding_length(size)
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
        for key, (value, value_type, element) in tokenizer.items():
            writer.add_key_value(key, value, value_type, sub_type=element)

    write_converted(
        output, gguf.MODEL_ARCH_NAMES[kind], f"the model in {folder}", config, tensors, None, add_settings
    )


def _unusable(folder: Path, problem: str) -> ModelFileError:
    return ModelFileError(
        f"the model in {folder} cannot be converted: {problem}",
        "use the folder itself with --draft, or llama.cpp's convert_hf_to_gguf.py",
        code="model_file_not_supported",
    )


def _problem(settings: Mapping[str, Any], config: LayerConfig, stored: Mapping[str, StoredTensor]) -> str:
    kind, biases = settings.get("model_type"), {name for name in stored if name.endswith(".bias")}
    if kind not in _ARCHITECTURES:
        return f"the architecture is {shorten(kind)!r}, not one of {', '.join(_ARCHITECTURES)}"
    if config.rope.kind not in ROPE_KINDS:
        return f"llama.cpp does not support rope_scaling of type {shorten(config.rope.kind)!r}"
    if kind == "llama" and biases:
        return f"llama.cpp does not support the bias {min(biases)} in Llama models"
    if settings.get("use_sliding_window") or "sliding_attention" in (settings.get("layer_types") or ()):
        return "layers with a sliding window are not supported"
    return ""


def _tensors(
    folder: Path,
    stored: Mapping[str, StoredTensor],
    settings: Mapping[str, Any],
    config: LayerConfig,
    names: gguf.TensorNameMap,
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the GGUF name and the values of each tensor."""
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if part in ("scales", "biases") or name.endswith("rotary_emb.inv_freq"):
            continue
        new = names.get_name(name, (".weight", ".bias"))
        if new is None:
            raise _unusable(folder, f"llama.cpp does not know the tensor {name}")
        quantised = part == "weight" and f"{module}.scales" in stored
        values = _dequantised(folder, module, stored, settings) if quantised else tensor.read()
        if settings["model_type"] == "llama" and name.endswith(_ROTATED):
            values = interleaved(values, config.head_size)
        yield new, values


def _dequantised(
    folder: Path, module: str, stored: Mapping[str, StoredTensor], settings: Mapping[str, Any]
) -> NDArray[np.float32]:
    """Return the dequantised weights [rows, columns] of a matrix that MLX quantised.

    Each row of packed weights is a stream of little-endian numbers with a fixed number of bits. Each group of
    columns has a scale and a bias.
    """
    packed, scales = stored[f"{module}.weight"].read(), stored[f"{module}.scales"].read()
    quantisation = settings.get("quantization")
    own = quantisation.get(module, quantisation) if isinstance(quantisation, dict) else {}
    bits = own.get("bits")
    if packed.dtype != np.uint32 or bits not in _BITS or f"{module}.biases" not in stored:
        raise _unusable(folder, f"the quantisation of {module} is unknown")
    biases, powers = stored[f"{module}.biases"].read(), 1 << np.arange(bits)
    weights = np.empty((len(packed), packed.shape[1] * 32 // bits), np.float32)
    rows = max(1, _UNPACKED_BITS // (32 * packed.shape[1]))
    for begin in range(0, len(packed), rows):
        chosen = slice(begin, begin + rows)
        stream = np.unpackbits(packed[chosen].view(np.uint8), axis=1, bitorder="little")
        groups = (stream.reshape(-1, bits) @ powers).reshape(*scales[chosen].shape, -1)
        weights[chosen] = (groups * scales[chosen, :, None] + biases[chosen, :, None]).reshape(
            -1, weights.shape[1]
        )
    return weights
