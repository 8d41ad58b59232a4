"""Read the multi-token prediction (MTP) layer from a Hugging Face model's folder.

mlx-lm does not load MTP layers, and models converted by mlx-lm do not contain them. The layer can be in the
model's weights, or in a separate file in the same folder, such as `mtp.safetensors`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from edgespec.errors import ModelFileError
from edgespec.heads.stored_tensor import StoredTensor
from edgespec.heads.tensor_files import read_folder_tensors

__all__ = ["MTP_MODELS", "QWEN_MODELS", "read_mtp"]

# Values of `model_type` in `config.json` whose MTP layout `read_mtp` supports. Qwen's original files store
# the weights of norms minus 1.
QWEN_MODELS = ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
MTP_MODELS = (*QWEN_MODELS, "deepseek_v3", "glm4_moe", "mimo")
_NEEDED = ("fc.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight")


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a family of models names the tensors of an MTP layer.

    Attributes:
        prefix: Regular expression for the start of all names. Its group, if any, is the layer's number.
        marker: A name that only an MTP layer has, because DeepSeek numbers MTP layers like all others.
        names: Maps names outside the decoder layer to Qwen3-Next's names. Tensors with an empty new name are
            skipped, because they are copies of the target's tensors.
        decoder_prefix: Prefix that turns names in the decoder layer into Qwen3-Next's names.
        hidden_first: Whether the input of `fc` is the hidden state followed by the embedding, not the
            reverse.
    """

    prefix: str
    marker: str
    names: Mapping[str, str]
    decoder_prefix: str = "layers.0."
    hidden_first: bool = False


_LAYOUTS = (
    # Qwen3-Next and Qwen3.5.
    _Layout(r"mtp\.", "norm.weight", {name: name for name in _NEEDED}, decoder_prefix=""),
    # DeepSeek-V3 and GLM-4.5.
    _Layout(
        r"layers\.(\d+)\.",
        "eh_proj.weight",
        {
            "eh_proj.weight": "fc.weight",
            "enorm.weight": "pre_fc_norm_embedding.weight",
            "hnorm.weight": "pre_fc_norm_hidden.weight",
            "shared_head.norm.weight": "norm.weight",
            "shared_head.head.weight": "",
            "embed_tokens.weight": "",
        },
    ),
    # MiMo.
    _Layout(
        r"mtp_layers\.(\d+)\.",
        "input_proj.weight",
        {
            "input_proj.weight": "fc.weight",
            "token_layernorm.weight": "pre_fc_norm_embedding.weight",
            "hidden_layernorm.weight": "pre_fc_norm_hidden.weight",
            "final_layernorm.weight": "norm.weight",
        },
        hidden_first=True,
    ),
)


def read_mtp(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a model's MTP layer by name, as in Qwen3-Next but without the prefix `mtp.`.

    Raises:
        ModelFileError: The folder contains no MTP layer, more than one, or a damaged file.
    """
    stored = read_folder_tensors(folder)
    layers = [(layout, layer) for layout in _LAYOUTS for layer in _layers(stored, layout)]
    if len(layers) != 1 or any(name.startswith("layers.1.") for name in layers[0][1]):
        reason = "it has more than one MTP layer" if layers else "it has no tensors of an MTP layer"
        raise _unusable(folder, reason)
    layout, tensors = layers[0]
    missing = [name for name in _NEEDED if name not in tensors]
    if missing:
        original = next(name for name, renamed in layout.names.items() if renamed == missing[0])
        raise _unusable(folder, f"the layer lacks the tensor {original}")
    if layout.hidden_first:
        tensors["fc.weight"] = _with_halves_swapped(tensors["fc.weight"])
    return tensors


def _unusable(folder: Path, reason: str) -> ModelFileError:
    return ModelFileError(
        f"{folder} has no layer for multi-token prediction that edgespec can use: {reason}",
        "use the original Hugging Face model, or choose another method",
    )


def _layers(stored: Mapping[str, StoredTensor], layout: _Layout) -> Iterator[dict[str, StoredTensor]]:
    """Yield the tensors of each MTP layer with this layout, under their names in Qwen3-Next."""
    pattern = re.compile(rf"((?:(?:model|language_model)\.)*{layout.prefix})(.+)")
    layers: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        if match := pattern.fullmatch(name):
            layers.setdefault(match[1], {})[match[match.re.groups]] = tensor
    for tensors in layers.values():
        if layout.marker in tensors:
            named = {
                layout.names.get(name, layout.decoder_prefix + name): one for name, one in tensors.items()
            }
            named.pop("", None)
            yield named


def _with_halves_swapped(matrix: StoredTensor) -> StoredTensor:
    """Swap the first and the last n columns of a matrix [rows, 2n]."""
    return replace(matrix, read=lambda: np.roll(matrix.read(), matrix.shape[-1] // 2, axis=-1))
