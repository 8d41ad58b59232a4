"""Read published DFlash heads (z-lab, speculators) and DSpark heads (DeepSeek, speculators)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.model.heads.eagle_files import target_ids
from edgespec.model.heads.layer_config import (
    LayerConfig,
    Shapes,
    check_tensors,
    layer_settings,
    read_config,
    unsupported_head,
)
from edgespec.model.heads.tensor_files import StoredTensor, read_folder_tensors

# Tensors to ignore: `t2d` is redundant with `d2t`, the rotary frequencies follow from the configuration, and
# the confidence head is unused because edgespec chooses the draft length from measured acceptance.
_IGNORED = re.compile(r"t2d|(.*\.)?rotary_emb\.inv_freq|confidence_head\..*")
# Prefix of tensors that only DFlash 2 heads have.
_SELECTOR = "candidate_selector."
# Maximum block size in tokens. Published heads use 7 to 16. Larger blocks could exceed the maximum size of
# llama.cpp's compute graph, which would abort the process.
MAX_BLOCK_TOKENS = 32
# Maximum number of layers. Published heads have five.
_MAX_LAYERS = 128
_DEFAULT_BLOCK_TOKENS = 16
_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class DFlashConfig(LayerConfig):
    """The configuration of a DFlash or DSpark head, whose layers resemble those of Qwen 3.

    See `LayerConfig` for the other attributes.

    Attributes:
        size: Hidden size of the head, which is the same as the target's.
        states: Layer indices of the target's hidden states that the head reads. Index k means the input of
            layer k. The target's layer count means the output of its last layer.
        block_tokens: Number of tokens in a block: the last emitted token, followed by mask tokens.
        mask_token: Token id of the mask token.
        predicts_next: Whether each block position predicts the token at the next position. Otherwise, each
            mask token predicts the token at its own position.
        is_causal: Whether attention within a block is causal.
        windows: Sliding window size of each layer in tokens. 0 for layers with full attention.
        markov_rank: Rank of the Markov head in a DSpark head. 0 for DFlash heads.
    """

    size: int
    layers: int
    states: tuple[int, ...]
    block_tokens: int
    mask_token: int
    predicts_next: bool
    is_causal: bool
    windows: tuple[int, ...]
    markov_rank: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes per token in the float32 KV cache."""
        return 2 * self.layers * self.kv_heads * self.head_size * 4


def parse_dflash_config(config: Mapping[str, Any]) -> DFlashConfig:
    """Parse the settings from `read_config`.

    Raises:
        ValueError, KeyError, TypeError, ArithmeticError: A setting is missing, invalid or not supported.
    """
    size, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    if not 0 < layers <= _MAX_LAYERS:
        raise ValueError(f"num_hidden_layers must be from 1 to {_MAX_LAYERS}, not {layers:,}")
    for name, supported in (("model_type", "qwen3"), ("hidden_act", "silu"), ("markov_head_type", "vanilla")):
        if (value := config.get(name) or supported) != supported:
            raise ValueError(f"{name} is {value!r}, but edgespec supports only {supported!r}")
    markov_rank = int(config.get("markov_rank") or 0)
    windows = _windows(config, layers)
    result = DFlashConfig(
        size=size,
        layers=layers,
        **layer_settings(config),
        states=_states(config),
        block_tokens=int(config.get("block_size") or _DEFAULT_BLOCK_TOKENS),
        mask_token=int(config["mask_token_id"]),
        predicts_next=bool(config.get("sample_from_anchor", markov_rank > 0)),
        is_causal=_is_causal(config, windows),
        windows=windows,
        markov_rank=markov_rank,
    )
    # A one-token block has no mask tokens, and MLX aborts the process if it computes with an empty array.
    if not 2 <= result.block_tokens <= MAX_BLOCK_TOKENS:
        raise ValueError(f"block_size must be from 2 to {MAX_BLOCK_TOKENS}, not {result.block_tokens:,}")
    if not 0 <= result.mask_token < result.vocab_size:
        raise ValueError(f"the mask token {result.mask_token} is not in the head's vocabulary")
    return result


def _states(config: Mapping[str, Any]) -> tuple[int, ...]:
    if "target_layer_ids" in config:
        # The DFlash authors list layers by output. The output of layer k is the input of layer k + 1.
        return tuple(int(layer) + 1 for layer in config["target_layer_ids"])
    return tuple(int(layer) for layer in config["aux_hidden_state_layer_ids"])


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    types = config.get("layer_types") or [_FULL] * layers
    if len(types) != layers or not {*types} <= {_SLIDING, _FULL}:
        raise ValueError(f"layer_types is {types!r}, which edgespec does not support")
    return tuple(int(config["sliding_window"]) if kind == _SLIDING else 0 for kind in types)


def _is_causal(config: Mapping[str, Any], windows: Sequence[int]) -> bool:
    causal = config.get("is_causal")
    if causal is None and len({window > 0 for window in windows}) > 1:
        raise ValueError("edgespec does not support layers that mix causal and bidirectional blocks")
    # The published code makes layers with a sliding window causal unless the configuration says otherwise.
    return any(windows) if causal is None else bool(causal)


@dataclass(frozen=True, slots=True)
class DFlashFiles:
    """A head's configuration and tensors.

    Attributes:
        config: The head's configuration.
        tensors: Tensors, keyed by their names in z-lab's heads without the prefix `model.`.
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
    """Read the configuration and tensor metadata of a head. Weights are loaded lazily.

    Raises:
        ModelFileError: The folder contains no DFlash or DSpark head, or the head is damaged or unsupported.
    """
    settings = read_config(folder)
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in read_folder_tensors(folder).items()
        if not _IGNORED.fullmatch(name)
    }
    with unsupported_head(folder, "a DFlash or DSpark head"):
        config = parse_dflash_config(settings)
        offsets = tensors.pop("d2t", None)
        ids = None if offsets is None else target_ids(offsets, config.vocab_size)
        tensors.pop("embed_tokens.weight", None)
        if ids is None:
            tensors.pop("lm_head.weight", None)
        _check_tensors(config, tensors, ids)
    return DFlashFiles(config, tensors, ids)


def _check_tensors(
    config: DFlashConfig, tensors: Mapping[str, StoredTensor], ids: NDArray[np.int64] | None
) -> None:
    """Raise ValueError if a tensor is missing or unknown, or if its shape contradicts the configuration."""
    size, queries, keys = config.size, config.heads * config.head_size, config.kv_heads * config.head_size
    shapes: Shapes = {
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
    check_tensors(tensors, shapes, {})
