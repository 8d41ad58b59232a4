"""Read published DFlash heads (z-lab, speculators) and DSpark heads (DeepSeek, speculators)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError, shorten
from edgespec.heads.dflash_config import DFlashConfig, parse_dflash_config
from edgespec.heads.eagle_files import target_ids
from edgespec.heads.layer_config import read_config
from edgespec.heads.stored_tensor import StoredTensor
from edgespec.heads.tensor_files import read_folder_tensors

__all__ = ["DFlashFiles", "read_dflash"]

# Tensors to ignore: `t2d` repeats what `d2t` says, the rotary frequencies follow from the configuration, and
# the confidence head is unused because edgespec chooses the draft length from measured acceptance.
_IGNORED = re.compile(r"t2d|(.*\.)?rotary_emb\.inv_freq|confidence_head\..*")
# Prefix of tensors that only DFlash 2 heads have.
_SELECTOR = "candidate_selector."


@dataclass(frozen=True, slots=True)
class DFlashFiles:
    """A head's configuration and tensors.

    Attributes:
        config: The head's configuration.
        tensors: Tensors, by their names in z-lab's heads without the prefix `model.`.
        target_ids: Target token id for each draft token, int64 [draft vocabulary]. None if both vocabularies
            are equal, in which case the head uses the target's LM head.
    """

    config: DFlashConfig
    tensors: Mapping[str, StoredTensor]
    target_ids: NDArray[np.int64] | None

    @property
    def draft_vocab_size(self) -> int:
        return self.config.vocab_size if self.target_ids is None else len(self.target_ids)


def read_dflash(folder: Path) -> DFlashFiles:
    """Read the configuration and tensor metadata of a head. Weights are read on request.

    Raises:
        ModelFileError: The folder contains no DFlash or DSpark head, or the head is damaged or unsupported.
    """
    settings = read_config(folder)
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in read_folder_tensors(folder).items()
        if not _IGNORED.fullmatch(name)
    }
    try:
        config = parse_dflash_config(settings)
        offsets = tensors.pop("d2t", None)
        ids = None if offsets is None else target_ids(offsets, config.vocab_size)
        tensors.pop("embed_tokens.weight", None)
        if ids is None:
            tensors.pop("lm_head.weight", None)
        _check_tensors(config, tensors, ids)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        what = f"the setting {error} is missing" if isinstance(error, KeyError) else shorten(error)
        raise ModelFileError(
            f"{folder} is not a DFlash or DSpark head that edgespec supports: {what}",
            "choose a folder with the config.json and weights of a DFlash or DSpark head",
        ) from error
    return DFlashFiles(config, tensors, ids)


def _check_tensors(
    config: DFlashConfig, tensors: Mapping[str, StoredTensor], ids: NDArray[np.int64] | None
) -> None:
    """Raise ValueError if a tensor is missing or unknown, or if its shape contradicts the configuration."""
    size, queries, keys = config.size, config.heads * config.head_size, config.kv_heads * config.head_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, len(config.states) * size),
        "hidden_norm.weight": (size,),
        "norm.weight": (size,),
    }
    for layer in range(config.layers):
        shapes |= {
            f"layers.{layer}.{name}.weight": shape
            for name, shape in (
                ("input_layernorm", (size,)),
                ("post_attention_layernorm", (size,)),
                ("self_attn.q_proj", (queries, size)),
                ("self_attn.k_proj", (keys, size)),
                ("self_attn.v_proj", (keys, size)),
                ("self_attn.o_proj", (size, queries)),
                ("self_attn.q_norm", (config.head_size,)),
                ("self_attn.k_norm", (config.head_size,)),
                ("mlp.gate_proj", (config.feed_forward_size, size)),
                ("mlp.up_proj", (config.feed_forward_size, size)),
                ("mlp.down_proj", (size, config.feed_forward_size)),
            )
        }
    draft_vocab = config.vocab_size if ids is None else len(ids)
    if ids is not None:
        shapes["lm_head.weight"] = (draft_vocab, size)
    if config.markov_rank:
        shapes["markov_head.markov_w1.weight"] = (config.vocab_size, config.markov_rank)
        shapes["markov_head.markov_w2.weight"] = (draft_vocab, config.markov_rank)
    if any(name.startswith(_SELECTOR) for name in tensors):
        raise ValueError("a DFlash 2 head must be a GGUF file, as made by llama.cpp's convert_hf_to_gguf.py")
    if missing := shapes.keys() - tensors.keys():
        raise ValueError(f"the tensor {min(missing)} is missing")
    for name, tensor in tensors.items():
        if name not in shapes:
            raise ValueError(f"the tensor {name} is unknown")
        if tensor.shape != shapes[name]:
            raise ValueError(f"the tensor {name} has shape {tensor.shape} instead of {shapes[name]}")
        if not tensor.is_floating:
            raise ValueError(f"the tensor {name} has type {tensor.dtype}, which is not a floating-point type")
