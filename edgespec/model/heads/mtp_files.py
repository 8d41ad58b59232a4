"""Read multi-token prediction (MTP) layers from the folder of a Hugging Face or MLX model.

mlx-lm does not load MTP layers, and models converted by it do not contain them. The layers can be part of the
model's weights or in a separate file, such as `mtp.safetensors`. MTPLX and others publish quantised MLX
models with such files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from edgespec.errors import ModelFileError
from edgespec.model.heads.tensor_files import StoredTensor, read_folder_tensors, read_tensor_files

# Values of `model_type` in `config.json` whose MTP layout `read_mtp` supports. Qwen models are listed
# separately because their original files store norm weights minus 1.
QWEN_MODELS = ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
MTP_MODELS = (*QWEN_MODELS, "deepseek_v3", "glm4_moe", "mimo")
_NEEDED = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
# Matches the paths of separate files with MTP layers, relative to the model's folder.
_FILE = re.compile(r"(?:[^/]+/)?mtp[^/]*\.safetensors|mtp/[^/]+\.safetensors")


@dataclass(frozen=True, slots=True)
class _Layout:
    """The names of MTP tensors in a family of models.

    Attributes:
        prefix: Regular expression for the start of all names. Its group matches the number of the MTP module,
            or an empty string if modules are not numbered.
        marker: Name of a tensor that only MTP modules have. It is needed because DeepSeek numbers MTP modules
            like ordinary layers.
        names: Maps the names of tensors outside the decoder layers, without `.weight`, to Qwen3-Next's names.
            An empty name means that the tensor is a copy of the target's and is skipped.
        decoder_prefix: Prefix that turns the names of decoder layer tensors into Qwen3-Next's names.
        hidden_first: Whether the input of `fc` starts with the hidden state rather than the embedding.
    """

    prefix: str
    marker: str
    names: Mapping[str, str]
    decoder_prefix: str = "layers.0."
    hidden_first: bool = False


_LAYOUTS = (
    # Qwen3-Next and Qwen3.5.
    _Layout(r"mtp\.()", "norm.weight", {name: name for name in _NEEDED}, decoder_prefix=""),
    # DeepSeek-V3 and GLM-4.5.
    _Layout(
        r"layers\.(\d+)\.",
        "eh_proj.weight",
        {
            "eh_proj": "fc",
            "enorm": "pre_fc_norm_embedding",
            "hnorm": "pre_fc_norm_hidden",
            "shared_head.norm": "norm",
            "shared_head.head": "",
            "embed_tokens": "",
        },
    ),
    # MiMo.
    _Layout(
        r"mtp_layers\.(\d+)\.",
        "input_proj.weight",
        {
            "input_proj": "fc",
            "token_layernorm": "pre_fc_norm_embedding",
            "hidden_layernorm": "pre_fc_norm_hidden",
            "final_layernorm": "norm",
        },
        hidden_first=True,
    ),
)


def is_mtp_file(name: str) -> bool:
    """Return whether a file contains only MTP layers, judging by its path in the model's folder."""
    return _FILE.fullmatch(name) is not None


def mtp_files(folder: Path) -> list[Path]:
    """Return the files in a model's folder that contain only MTP layers."""
    files = [*folder.glob("*.safetensors"), *folder.glob("*/*.safetensors")]
    return sorted(
        file for file in files if is_mtp_file(file.relative_to(folder).as_posix()) and file.is_file()
    )


def read_mtp(folder: Path) -> list[dict[str, StoredTensor]]:
    """Return the tensors of each MTP module of a model, named as in Qwen3-Next but without `mtp.`.

    A module predicts the next token from a token and the preceding hidden state. Qwen models have one module,
    which can contain several layers. Other models can have several modules, with one layer each. The weights
    can be quantised by MLX. FP8 weights are dequantised.

    Raises:
        ModelFileError: The folder contains no MTP module, or a module is damaged.
    """
    stored = read_folder_tensors(folder) | read_tensor_files(*mtp_files(folder))
    for layout in _LAYOUTS:
        if modules := _modules(stored, layout):
            return [_checked(tensors, layout, folder) for tensors in modules]
    raise _unusable(folder, "no tensors of an MTP layer were found")


def _checked(tensors: dict[str, StoredTensor], layout: _Layout, folder: Path) -> dict[str, StoredTensor]:
    """Validate an MTP module, and reorder its `fc` so that the embedding comes first.

    Raises:
        ModelFileError: A tensor is missing or cannot be dequantised.
    """
    for name in _NEEDED:
        if f"{name}.weight" not in tensors:
            original = next(each for each, renamed in layout.names.items() if renamed == name)
            raise _unusable(folder, f"the tensor {original}.weight is missing")
    for name, one in tensors.items():
        if one.dtype == "F8_E4M3":
            raise _unusable(
                folder, f"the scales of the FP8 tensor {name} are missing or have an unexpected shape"
            )
    if not layout.hidden_first:
        return tensors
    return {
        name: _with_halves_swapped(one) if name.startswith("fc.") else one for name, one in tensors.items()
    }


def _unusable(folder: Path, reason: str) -> ModelFileError:
    return ModelFileError(
        f"edgespec cannot use {folder} for multi-token prediction (MTP): {reason}",
        "use the original Hugging Face model, or choose another method",
        code="model_file_not_supported",
    )


def _modules(stored: Mapping[str, StoredTensor], layout: _Layout) -> list[dict[str, StoredTensor]]:
    """Return the tensors of each MTP module with this layout, keyed by Qwen3-Next's names."""
    pattern = re.compile(rf"(?:(?:model|language_model)\.)*{layout.prefix}(.+)")
    modules: dict[int, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        if match := pattern.fullmatch(name):
            modules.setdefault(int(match[1] or 0), {})[match[2]] = tensor
    return [_renamed(tensors, layout) for _, tensors in sorted(modules.items()) if layout.marker in tensors]


def _renamed(tensors: Mapping[str, StoredTensor], layout: _Layout) -> dict[str, StoredTensor]:
    renamed: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if new := layout.names.get(module, layout.decoder_prefix + module):
            renamed[f"{new}.{part}"] = tensor
    return renamed


def _with_halves_swapped(matrix: StoredTensor) -> StoredTensor:
    """Swap the left and right halves of a matrix [rows, 2n]."""
    return replace(matrix, read=lambda: np.roll(matrix.read(), matrix.shape[-1] // 2, axis=-1))
