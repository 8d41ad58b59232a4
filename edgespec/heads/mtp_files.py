"""Read the multi-token prediction (MTP) layer from a Hugging Face model's folder.

mlx-lm does not load MTP layers, and models converted by mlx-lm do not contain them. The layer can be in the
model's weights, or in a separate file in the same folder, such as `mtp.safetensors`.
"""

from __future__ import annotations

import re
from pathlib import Path

from edgespec.errors import ModelFileError
from edgespec.heads.stored_tensor import StoredTensor
from edgespec.heads.tensor_files import read_folder_tensors

__all__ = ["MTP_MODELS", "read_mtp"]

# Values of `model_type` in `config.json` whose MTP layout `read_mtp` supports.
MTP_MODELS = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
_NAME = re.compile(r"(?:(?:model|language_model)\.)*mtp\.(.+)")
_NEEDED = ("fc.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight")


def read_mtp(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a model's MTP layer by name, as in Qwen3-Next but without the prefix `mtp.`.

    Raises:
        ModelFileError: The folder contains no MTP layer, more than one, or a damaged file.
    """
    named = ((_NAME.fullmatch(name), tensor) for name, tensor in read_folder_tensors(folder).items())
    tensors = {match[1]: tensor for match, tensor in named if match}
    missing = [name for name in _NEEDED if name not in tensors]
    if missing or any(name.startswith("layers.1.") for name in tensors):
        what = f"it lacks mtp.{missing[0]}" if missing else "it has more than one MTP layer"
        raise ModelFileError(
            f"{folder} has no layer for multi-token prediction that edgespec can use: {what}",
            "use the original Hugging Face model, or choose another method",
        )
    return tensors
