"""Draft with the layer for multi-token prediction (MTP) that Qwen3-Next and Qwen3.5 models contain."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm

from edgespec.backends.hidden_state_log import MAX_LOGGED_TOKENS, POST_NORM
from edgespec.backends.memory_estimate import MemoryEstimate, MemoryPart
from edgespec.backends.mlx.attention_cache import AttentionCache, cache_rows
from edgespec.backends.mlx.eagle import BATCH_TOKENS, EagleHead
from edgespec.backends.mlx.eagle_loading import most_accurate
from edgespec.backends.mlx.head_loading import (
    check_finite,
    check_memory,
    evaluate_constants,
    head_facts,
    loaded_bytes,
    weight_array,
)
from edgespec.backends.mlx.layers import Body, LayerList
from edgespec.backends.mlx.target_ends import TargetEmbedding, TargetLmHead
from edgespec.backends.mlx_files import read_json_object
from edgespec.backends.mlx_metadata import language_config
from edgespec.errors import ModelFileError
from edgespec.heads.mtp_files import read_mtp

if TYPE_CHECKING:
    from edgespec.backends.mlx.model import MlxModel

__all__ = ["estimate_mtp_head", "load_mtp_head"]


class MtpNetwork(Module):
    """The MTP layer: one of the target's layers, which reads an embedding and a hidden state.

    Args:
        layer: A layer with the architecture of the target's full-attention layers, without weights.
        size: Size of hidden states.
        norm_eps: Epsilon of the norms.
        post_norm: Whether the layer's hidden state is normalised before it is fed back, like the target's.
    """

    def __init__(self, layer: Any, size: int, norm_eps: float, post_norm: bool) -> None:
        super().__init__()
        self._post_norm = post_norm
        self.pre_fc_norm_embedding = RMSNorm(size, norm_eps)
        self.pre_fc_norm_hidden = RMSNorm(size, norm_eps)
        self.fc = Linear(2 * size, size, bias=False)
        self.layers = [layer]
        self.norm = RMSNorm(size, norm_eps)

    def reduced(self, states: mx.array) -> mx.array:
        return states

    def __call__(self, embeddings: mx.array, states: mx.array, cache: AttentionCache) -> mx.array:
        """See `EagleNetwork.__call__`."""
        pair = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(states)]
        inputs = self.fc(mx.concatenate(pair, axis=-1))[None]
        outputs: mx.array = self.layers[0](inputs, cache.make_mask(inputs.shape[1]), cache)[0]
        return outputs

    def normalised(self, states: mx.array) -> mx.array:
        return self.norm(states)

    def fed_back(self, states: mx.array) -> mx.array:
        return self.norm(states) if self._post_norm else states


def estimate_mtp_head(folder: Path, context_tokens: int) -> MemoryEstimate:
    """Return the memory used by the MTP layer of a model and by the hidden states that are kept for it.

    Raises:
        ModelFileError: The folder contains no MTP layer, or a damaged one.
    """
    tensors = read_mtp(folder)
    config = language_config(read_json_object(folder / "config.json"))
    size, vocab = tensors["norm.weight"].shape[0], int(config.get("vocab_size") or 0)
    return MemoryEstimate(
        context_tokens,
        "as the weights",
        (
            MemoryPart("weights", sum(map(loaded_bytes, tensors.values()))),
            MemoryPart(
                "cache",
                _kv_bytes(tensors["layers.0.self_attn.k_proj.weight"].shape[0])
                * cache_rows(None, context_tokens),
            ),
            MemoryPart("compute", 4 * (BATCH_TOKENS * (2 * vocab + 16 * size) + MAX_LOGGED_TOKENS * size)),
        ),
    )


def _kv_bytes(key_size: int) -> int:
    """Return the size of the keys and values of a token in bytes, in float32."""
    return 2 * 4 * key_size


def load_mtp_head(target: MlxModel, net: Any, folder: Path) -> EagleHead:
    """Load the MTP layer in a target's folder. The target's cache must be empty.

    Implementations disagree whether the layer reads hidden states before or after the final norm, and
    conversions can have added 1 to the weights of norms. So all four are tried on a short text.

    Raises:
        ModelFileError: The folder contains no MTP layer, or a damaged one.
        MemoryBudgetError: The layer does not fit in memory.
    """
    tensors = read_mtp(folder)
    check_memory(target, f"the MTP layer of {target.facts.name}", sum(map(loaded_bytes, tensors.values())))
    weights = _converted({name: weight_array(tensor) for name, tensor in tensors.items()})
    shifted = {name: one + 1 if _is_norm(name) else one for name, one in weights.items()}
    heads: list[EagleHead] = []
    try:
        for state in (POST_NORM, target.layer_count):
            for choice in (shifted, weights):
                heads += [_head(target, net, choice, state, folder)]
        check_finite(heads[0], folder)
        best = most_accurate(target, heads)
    except BaseException:
        for head in heads:
            head.close()
        raise
    for head in heads:
        if head is not best:
            head.close()
    return best


def _is_norm(name: str) -> bool:
    return "norm" in name.rpartition(".")[0].rpartition(".")[2]


def _converted(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return the weights with those of experts joined, as in mlx-lm."""
    prefix = "layers.0.mlp"
    joined = dict(weights)
    for name in ("gate_proj", "up_proj", "down_proj"):
        experts: list[mx.array] = []
        while (key := f"{prefix}.experts.{len(experts)}.{name}.weight") in joined:
            experts.append(joined.pop(key))
        if experts:
            joined[f"{prefix}.switch_mlp.{name}.weight"] = mx.stack(experts)
    if (both := joined.pop(f"{prefix}.experts.gate_up_proj", None)) is not None:
        gate, up = mx.split(both, 2, axis=-2)
        joined[f"{prefix}.switch_mlp.gate_proj.weight"] = gate
        joined[f"{prefix}.switch_mlp.up_proj.weight"] = up
        joined[f"{prefix}.switch_mlp.down_proj.weight"] = joined.pop(f"{prefix}.experts.down_proj")
    mx.eval(joined)
    return joined


def _head(target: MlxModel, net: Any, weights: Mapping[str, mx.array], state: int, folder: Path) -> EagleHead:
    """Return a head that reads the target's hidden state `state`."""
    arguments, layers = Body(net).arguments, LayerList(net).layers
    index = next(index for index, layer in enumerate(layers) if "self_attn" in layer)
    try:
        layer = type(layers[index])(arguments, index)
        network = MtpNetwork(layer, target.state_size, arguments.rms_norm_eps, state == POST_NORM)
        network.load_weights(list(weights.items()), strict=True)
        evaluate_constants([layer.self_attn.rope])
        mx.eval(network.parameters())
    except (ValueError, KeyError, TypeError) as error:
        raise ModelFileError(
            f"the MTP layer in {folder} does not fit the model: {error}", "download the model again"
        ) from error
    key_size = weights["layers.0.self_attn.k_proj.weight"].shape[0]
    facts = head_facts(
        target,
        f"the MTP layer of {target.facts.name}",
        folder,
        "mtp",
        f"MTP layer that reads the hidden state {state}",
        list(weights.values()),
        _kv_bytes(key_size),
        target.facts.trained_context_tokens,
    )
    embed = TargetEmbedding(net, target.facts.vocab_size, target.state_size)
    log = target.log_hidden_states([state])
    try:
        return EagleHead(target, log, network, embed, TargetLmHead(net), None, facts)
    except BaseException:
        target.stop_logging(log)
        raise
