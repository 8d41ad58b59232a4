"""Read published EAGLE heads, whose tensor names differ between publishers.

Supported layouts:

- EAGLE-3 by SafeAILab, SpecForge and AngelSlim (`midlayer.*`)
- EAGLE-3 by NVIDIA and speculators (`layers.0.*`)
- EAGLE-1 and EAGLE-2 (`layers.0.*` without input norms)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgespec.model.heads.layer_config import (
    LayerConfig,
    Shapes,
    check_tensors,
    layer_settings,
    read_config,
    unsupported_head,
)
from edgespec.model.heads.tensor_files import StoredTensor, read_folder_tensors

# Tensor name prefixes that differ between layouts.
_PREFIX = re.compile(r"^(?:model\.)?(?:midlayer|layers\.0)\.|^model\.")
# Tensors to ignore: `t2d` is redundant with `d2t`, and the rotary frequencies follow from the configuration.
_IGNORED = re.compile(r"t2d|(.*\.)?rotary_emb\.inv_freq")


@dataclass(frozen=True, slots=True)
class EagleConfig(LayerConfig):
    """The configuration of an EAGLE head.

    See `LayerConfig` for the other attributes.

    Attributes:
        version: 1 for EAGLE-1 and EAGLE-2, which have the same architecture. 3 for EAGLE-3.
        hidden_size: Size of the head's hidden states and token embeddings.
        target_size: Size of the target's hidden states.
        layers: Indices of the target layers whose hidden states the head reads, in the publisher's numbering.
            None if the configuration does not list any.
        norm_before_residual: Whether the residual connection adds the normalised hidden state (EAGLE-3).
        norm_before_fc: Whether the concatenated hidden states are normalised before `fc` (EAGLE-3).
        norm_output: Whether the head's output is normalised before the next step reads it (EAGLE-3).
    """

    version: Literal[1, 3]
    hidden_size: int
    target_size: int
    layers: tuple[int, ...] | None
    norm_before_residual: bool
    norm_before_fc: bool
    norm_output: bool

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes per token in the float32 KV cache."""
        return 2 * self.kv_heads * self.head_size * 4

    def layer_choices(self, target_layers: int) -> list[tuple[int, ...]]:
        """Return the combinations of hidden states that an EAGLE-3 head may read, most likely first.

        Args:
            target_layers: Number of layers in the target.

        Returns:
            Tuples of layer indices. Index k means the input of layer k, and `target_layers` the output of the
            last layer. Empty if the target has too few layers.
        """
        choices: list[tuple[int, ...]] = [(2, target_layers // 2, target_layers - 3)]
        if self.layers is not None:
            # Publishers number hidden states either by the layer that reads them or by the layer that writes
            # them. The first is usually the input of layer 2, so a list that starts with 1 follows the second
            # convention.
            inputs, outputs = self.layers, tuple(layer + 1 for layer in self.layers)
            choices = [outputs, inputs] if self.layers[:1] == (1,) else [inputs, outputs]
        return [choice for choice in choices if all(0 <= layer <= target_layers for layer in choice)]


def parse_config(config: Mapping[str, Any], version: Literal[1, 3]) -> EagleConfig:
    """Parse the settings from `read_config`.

    Raises:
        ValueError, KeyError, TypeError, ArithmeticError: A setting is missing or invalid.
    """
    size = int(config["hidden_size"])
    layers = config.get("eagle_aux_hidden_state_layer_ids")
    activation = config.get("hidden_act") or "silu"
    if activation != "silu":
        raise ValueError(f"hidden_act is {activation!r}, but edgespec supports only 'silu'")
    if int(config.get("num_hidden_layers") or 1) != 1:
        raise ValueError(f"the head has {config['num_hidden_layers']} layers, but edgespec supports only one")
    result = EagleConfig(
        version=version,
        hidden_size=size,
        target_size=int(config.get("target_hidden_size") or size),
        **layer_settings(config),
        layers=tuple(int(layer) for layer in layers) if layers else None,
        norm_before_residual=bool(config.get("norm_before_residual")),
        norm_before_fc=bool(config.get("norm_before_fc")),
        norm_output=bool(config.get("norm_output")),
    )
    if result.target_size <= 0:
        raise ValueError(f"target_hidden_size must be positive, not {result.target_size}")
    return result


@dataclass(frozen=True, slots=True)
class EagleFiles:
    """A head's configuration and tensors.

    Attributes:
        config: The head's configuration.
        tensors: Tensors keyed by canonical name: the name in SafeAILab's EAGLE-3 heads, with `layer` instead
            of `midlayer`.
        target_ids: Target token id for each draft token, int64 [draft vocabulary]. None if both vocabularies
            are equal.
    """

    config: EagleConfig
    tensors: Mapping[str, StoredTensor]
    target_ids: NDArray[np.int64] | None

    @property
    def draft_vocab_size(self) -> int:
        return self.config.vocab_size if self.target_ids is None else len(self.target_ids)

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors.values())


def eagle_kind(names: Collection[str]) -> str:
    """Return "EAGLE-1" or "EAGLE-3" if these tensor names belong to such a head, or else "".

    The configuration cannot identify heads, because an EAGLE-1 head's configuration looks like its target's.
    """
    canonical = {_canonical(name) for name in names}
    if not {"fc.weight", "layer.self_attn.q_proj.weight"} <= canonical:
        return ""
    return f"EAGLE-{_version(canonical)}"


def _version(names: Collection[str]) -> Literal[1, 3]:
    """Return the version of a head with these canonical tensor names. EAGLE-2 heads count as EAGLE-1."""
    return 3 if "layer.hidden_norm.weight" in names else 1


def read_eagle(folder: Path) -> EagleFiles:
    """Read the configuration and tensor metadata of an EAGLE head. Weights are loaded lazily.

    Raises:
        ModelFileError: The folder contains no EAGLE head, or the head is damaged or unsupported.
    """
    settings = read_config(folder)
    tensors = {
        _canonical(name): tensor
        for name, tensor in read_folder_tensors(folder).items()
        if not _IGNORED.fullmatch(name)
    }
    with unsupported_head(folder, "an EAGLE head"):
        offsets = tensors.pop("d2t", None)
        config = parse_config(settings, _version(tensors))
        ids = None if offsets is None else target_ids(offsets, config.vocab_size)
        _check_tensors(config, tensors, config.vocab_size if ids is None else len(ids))
    return EagleFiles(config, tensors, ids)


def _canonical(name: str) -> str:
    return _PREFIX.sub(lambda match: "" if match[0] == "model." else "layer.", name)


def target_ids(offsets: StoredTensor, vocab_size: int) -> NDArray[np.int64]:
    """Return each draft token's target token id, int64 [draft vocabulary].

    Args:
        offsets: The tensor `d2t`, which holds each draft token's target id minus its draft id.
        vocab_size: The target's vocabulary size.

    Raises:
        ValueError: `offsets` contains no token ids, or ids outside the target's vocabulary.
    """
    if offsets.is_floating or len(offsets.shape) != 1:
        raise ValueError("the tensor d2t does not contain token IDs")
    ids = np.arange(offsets.shape[0]) + offsets.read().astype(np.int64)
    if not (ids.size and 0 <= ids.min() <= ids.max() < vocab_size):
        raise ValueError(f"the tensor d2t contains token IDs outside the vocabulary of {vocab_size:,} tokens")
    return ids


def _check_tensors(config: EagleConfig, tensors: Mapping[str, StoredTensor], draft_vocab: int) -> None:
    """Raise ValueError if a tensor is missing or unknown, or if its shape contradicts the configuration."""
    if config.version == 1 and draft_vocab != config.vocab_size:
        raise ValueError("the head has a tensor d2t, but no LM head of its own")
    needed, optional = _shapes(config, tensors, draft_vocab)
    check_tensors(tensors, needed, optional)
    if (
        config.version == 1
        and "embed_tokens.weight" not in tensors
        and config.hidden_size != config.target_size
    ):
        raise ValueError("the head's hidden size differs from the model's")


def _shapes(
    config: EagleConfig, tensors: Mapping[str, StoredTensor], draft_vocab: int
) -> tuple[Shapes, Shapes]:
    """Return the shapes of a head's required and optional tensors, keyed by name."""
    size, pair = config.hidden_size, 2 * config.hidden_size
    keys, queries = config.kv_heads * config.head_size, config.heads * config.head_size
    attention = {"q": queries, "k": keys, "v": keys}
    needed: Shapes = {
        "layer.post_attention_layernorm.weight": (size,),
        "layer.self_attn.o_proj.weight": (size, queries),
        "layer.mlp.gate_proj.weight": (config.feed_forward_size, size),
        "layer.mlp.up_proj.weight": (config.feed_forward_size, size),
        "layer.mlp.down_proj.weight": (size, config.feed_forward_size),
    }
    optional: Shapes = {"embed_tokens.weight": (config.vocab_size, size)}
    for name, rows in attention.items():
        inputs = size if config.version == 1 else pair
        needed[f"layer.self_attn.{name}_proj.weight"] = (rows, inputs)
        optional[f"layer.self_attn.{name}_proj.bias"] = (rows,)
    if config.version == 1:
        needed["fc.weight"], optional["fc.bias"] = (size, pair), (size,)
        return needed, optional
    fused = tensors["fc.weight"].shape[-1] if "fc.weight" in tensors else 0
    states = fused // config.target_size
    if states < 1 or fused % config.target_size or len(config.layers or range(3)) != states:
        raise ValueError(
            f"the tensor fc.weight has {fused:,} columns, which does not match the configured hidden states"
        )
    needed |= {
        "fc.weight": (size, fused),
        "norm.weight": (size,),
        "layer.input_layernorm.weight": (size,),
        "layer.hidden_norm.weight": (size,),
    }
    if config.norm_before_fc:
        needed["input_norm.weight"] = (fused,)
    optional |= {f"fc_norm.{state}.weight": (config.target_size,) for state in range(states)}
    optional["lm_head.weight"] = (draft_vocab, size)
    return needed, optional
