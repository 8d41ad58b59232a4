"""Draft with the layer for multi-token prediction (MTP) that some models contain, such as Qwen3-Next."""

from __future__ import annotations

import inspect
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
from edgespec.backends.mlx.cached_head import BATCH_TOKENS
from edgespec.backends.mlx.eagle import EagleHead
from edgespec.backends.mlx.eagle_loading import load_most_accurate
from edgespec.backends.mlx.head_loading import (
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
from edgespec.errors import ModelFileError, shorten
from edgespec.heads.mtp_files import QWEN_MODELS, read_mtp

if TYPE_CHECKING:
    from edgespec.backends.mlx.model import MlxModel

__all__ = ["estimate_mtp_head", "load_mtp_head"]


class MtpNetwork(Module):
    """An MTP layer, which is one of the target's layers with a token embedding and a hidden state as inputs.

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
        """See `HeadNetwork.__call__`."""
        pair = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(states)]
        inputs = self.fc(mx.concatenate(pair, axis=-1))[None]
        # Multi-head latent attention cannot use mlx-lm's short form of a causal mask, a string.
        mask = cache.make_mask(inputs.shape[1], return_array=True)
        outputs: mx.array = self.layers[0](inputs, mask, cache)[0]
        return outputs

    def normalised(self, states: mx.array) -> mx.array:
        return self.norm(states)

    def fed_back(self, states: mx.array) -> mx.array:
        return self.norm(states) if self._post_norm else states


def estimate_mtp_head(folder: Path, context_tokens: int) -> MemoryEstimate:
    """Estimate the memory for a model's MTP layer, including the log of hidden states that it reads.

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
                _kv_bytes({name: tensor.shape for name, tensor in tensors.items()})
                * cache_rows(None, context_tokens),
            ),
            MemoryPart("compute", 4 * (BATCH_TOKENS * (2 * vocab + 16 * size) + MAX_LOGGED_TOKENS * size)),
        ),
    )


def _kv_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the size of the keys and values of a token in bytes, in float32, from the shapes of the weights.

    Multi-head latent attention (arXiv 2405.04434), as in DeepSeek-V3, caches one latent vector for both.

    Raises:
        ModelFileError: The layer has no attention that edgespec knows.
    """
    for name, arrays in (("k_proj", 2), ("kv_a_proj_with_mqa", 1)):
        if shape := shapes.get(f"layers.0.self_attn.{name}.weight"):
            return arrays * 4 * shape[0]
    raise ModelFileError("the MTP layer has no tensor for attention keys", "download the model again")


def load_mtp_head(target: MlxModel, net: Any, folder: Path) -> EagleHead:
    """Load the MTP layer in a target's folder. The target's cache must be empty.

    Implementations disagree on whether the layer reads hidden states before or after the final norm, and some
    conversions of Qwen models have already added 1 to the weights of norms. We therefore load the layer in
    every way, and choose one with `load_most_accurate`.

    Raises:
        ModelFileError: The folder contains no MTP layer, or a damaged one.
        MemoryBudgetError: The layer does not fit in memory.
    """
    tensors = read_mtp(folder)
    check_memory(target, f"the MTP layer of {target.facts.name}", sum(map(loaded_bytes, tensors.values())))
    weights = _converted(net, {name: weight_array(tensor) for name, tensor in tensors.items()})
    norms = [weights]
    if target.facts.architecture in QWEN_MODELS:
        norms.append({name: one + 1 if _is_norm(name) else one for name, one in weights.items()})
    choices = (
        _head(target, net, choice, state, folder)
        for state in (POST_NORM, target.layer_count)
        for choice in reversed(norms)
    )
    return load_most_accurate(target, choices, folder)


def _is_norm(name: str) -> bool:
    return "norm" in name.rpartition(".")[0].rpartition(".")[2]


def _converted(net: Any, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Convert weights to mlx-lm's layout, which stacks the weights of experts and splits some of MLA's."""
    prefix = "layers.0.mlp"
    joined = dict(weights)
    if "layers.0.self_attn.kv_b_proj.weight" in joined:
        # Rename the MTP layer to an ordinary layer, because mlx-lm converts only those.
        known = net.sanitize({f"model.{name}": weight for name, weight in joined.items()})
        joined = {name.removeprefix("model."): weight for name, weight in known.items()}
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
    """Create a head that reads the target's hidden state `state`."""
    arguments, layers = Body(net).arguments, LayerList(net).layers
    # Use the type of the last layer, because in some models the first layers have no experts, unlike the MTP
    # layer.
    index = max(index for index, layer in enumerate(layers) if "self_attn" in layer)
    try:
        kind = type(layers[index])
        numbered = "layer_idx" in inspect.signature(kind).parameters
        layer = kind(arguments, layer_idx=index) if numbered else kind(arguments)
        network = MtpNetwork(layer, target.state_size, arguments.rms_norm_eps, state == POST_NORM)
        network.load_weights(list(weights.items()), strict=True)
        evaluate_constants([layer.self_attn.rope])
        mx.eval(network.parameters())
    except (ValueError, KeyError, TypeError) as error:
        raise ModelFileError(
            f"the MTP layer in {folder} does not fit the model: {shorten(error)}", "download the model again"
        ) from error
    facts = head_facts(
        target,
        f"the MTP layer of {target.facts.name}",
        folder,
        "mtp",
        f"MTP layer that reads the hidden state {state}",
        list(weights.values()),
        _kv_bytes({name: weight.shape for name, weight in weights.items()}),
        target.facts.trained_context_tokens,
    )
    embed = TargetEmbedding(net, target.facts.vocab_size, target.state_size)
    log = target.log_hidden_states([state])
    try:
        return EagleHead(target, log, network, embed, TargetLmHead(net), None, facts)
    except BaseException:
        target.stop_logging(log)
        raise
