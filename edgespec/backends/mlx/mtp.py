"""Load and run multi-token prediction (MTP) layers (arXiv 2412.19437), as in Qwen3-Next."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.quantized import quantize

from edgespec.backends.head_view import load_most_accurate
from edgespec.backends.mlx.attention_cache import AttentionCache
from edgespec.backends.mlx.eagle import EagleHead
from edgespec.backends.mlx.heads import (
    BATCH_TOKENS,
    check_memory,
    evaluate_constants,
    head_facts,
    head_memory,
    loaded_bytes,
    target_embedding,
    target_lm_head,
    weight_array,
)
from edgespec.backends.mlx.layers import Body, LayerList
from edgespec.backends.mlx.model import MlxModel
from edgespec.errors import ModelFileError, shorten
from edgespec.model.base import Head
from edgespec.model.formats.mlx_files import read_json_object
from edgespec.model.formats.mlx_metadata import language_config
from edgespec.model.heads.mtp_files import QWEN_MODELS, read_mtp
from edgespec.model.heads.tensor_files import StoredTensor
from edgespec.model.hidden_states import MAX_LOGGED_TOKENS, POST_NORM
from edgespec.model.memory_estimate import MemoryEstimate

__all__ = ["estimate_head", "load_head"]

_Weights: TypeAlias = dict[str, mx.array]
# Quantisation formats without biases, keyed by bits per weight and group size.
_MODES = {(4, 32): "mxfp4", (8, 32): "mxfp8", (4, 16): "nvfp4"}


class MtpModule(Module):
    """An MTP module, which predicts the next token from a token and the preceding hidden state.

    Args:
        layers: Layers with the architecture of the target's full-attention layers, without weights. They run
            one after another.
        size: Size of hidden states.
        norm_eps: Epsilon of the norms.
        post_norm: Whether the module's hidden state is normalised before it is fed back, like the target's.
        hidden_first: Whether `fc` reads the hidden state before the embedding.
    """

    def __init__(
        self, layers: Sequence[Any], size: int, norm_eps: float, post_norm: bool, hidden_first: bool
    ) -> None:
        super().__init__()
        self._post_norm, self._hidden_first = post_norm, hidden_first
        self.pre_fc_norm_embedding = RMSNorm(size, norm_eps)
        self.pre_fc_norm_hidden = RMSNorm(size, norm_eps)
        self.fc = Linear(2 * size, size, bias=False)
        self.layers = list(layers)
        self.norm = RMSNorm(size, norm_eps)

    @property
    def dtype(self) -> mx.Dtype:
        return self.norm.weight.dtype

    @property
    def cache_count(self) -> int:
        return len(self.layers)

    def reduced(self, states: mx.array) -> mx.array:
        return states

    def __call__(self, embeddings: mx.array, states: mx.array, caches: Sequence[AttentionCache]) -> mx.array:
        pair = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(states)]
        if self._hidden_first:
            pair.reverse()
        outputs: mx.array = self.fc(mx.concatenate(pair, axis=-1))[None]
        for layer, cache in zip(self.layers, caches, strict=True):
            # Pass the mask as an array, because multi-head latent attention does not accept the string
            # "causal".
            mask = cache.make_mask(outputs.shape[1], return_array=True)
            outputs = layer(outputs, mask, cache)
        return outputs[0]

    def normalised(self, states: mx.array) -> mx.array:
        return self.norm(states)

    def fed_back(self, states: mx.array) -> mx.array:
        return self.norm(states) if self._post_norm else states


def quantize_like(network: Module, weights: Mapping[str, mx.array]) -> None:
    """Quantise the layers of a network whose stored weights are quantised.

    The bits per weight and the group size are inferred from the weights' shapes, because there is no common
    format for describing them.

    Raises:
        KeyError: A weight is missing, or its quantisation is unknown.
    """

    def settings(path: str, layer: Any) -> bool | dict[str, Any]:
        scales = weights.get(f"{path}.scales")
        if scales is None:
            return False
        columns: int = layer.weight.shape[-1]
        bits = 32 * weights[f"{path}.weight"].shape[-1] // columns
        group_size = columns // max(1, scales.shape[-1])
        mode = "affine" if f"{path}.biases" in weights else _MODES[bits, group_size]
        return {"bits": bits, "group_size": group_size, "mode": mode}

    quantize(network, class_predicate=settings)


def estimate_head(head: Head, target: Path, context_tokens: int) -> MemoryEstimate:
    """Estimate the memory use of MTP layers. See `registry.HeadNetwork`."""
    folder = head.path or target
    modules = read_mtp(folder)
    config = language_config(read_json_object(folder / "config.json"))
    size, vocab = modules[0]["norm.weight"].shape[0], int(config.get("vocab_size") or 0)
    compute_elements = BATCH_TOKENS * (2 * vocab + 16 * size) + MAX_LOGGED_TOKENS * size
    return head_memory(context_tokens, _weight_bytes(modules), _kv_bytes(modules), compute_elements)


def _weight_bytes(modules: Iterable[Mapping[str, StoredTensor]]) -> int:
    return sum(loaded_bytes(tensors.values()) for tensors in modules)


def _kv_bytes(modules: Iterable[Mapping[str, StoredTensor | mx.array]]) -> int:
    """Return the size in bytes of one token's float32 keys and values, based on the weights' shapes.

    Multi-head latent attention (arXiv 2405.04434), as in DeepSeek-V3, caches one latent vector for keys and
    values.

    Raises:
        ModelFileError: The weights contain no known kind of attention.
    """
    weights = [item for tensors in modules for item in tensors.items()]
    for name, arrays in (("k_proj", 2), ("kv_a_proj_with_mqa", 1)):
        if found := [one.shape[0] for key, one in weights if key.endswith(f".self_attn.{name}.weight")]:
            return arrays * 4 * sum(found)
    raise ModelFileError("the MTP layer has no tensor for attention keys", "download the model again")


def load_head(target: MlxModel, head: Head) -> EagleHead:
    """Load the MTP layers in a target's folder. See `registry.HeadNetwork`.

    MTP implementations differ in four ways:

    - The layers read hidden states from before or after the final norm.
    - `fc` reads the embedding or the hidden state first.
    - Several layers run one after another, or predict one token each.
    - Some conversions of Qwen models have already added 1 to the norm weights.

    Files do not reliably say which variant they need, so we try all variants and keep the most accurate one
    (see `load_most_accurate`).
    """
    folder = head.path or Path(target.facts.path)
    stored = read_mtp(folder)
    check_memory(target, f"the MTP layers of {target.facts.name}", _weight_bytes(stored))
    modules = [
        _converted(target.net, {name: weight_array(tensor) for name, tensor in tensors.items()})
        for tensors in stored
    ]
    variants = [modules]
    if target.facts.architecture in QWEN_MODELS:
        variants.insert(0, [_with_norms_raised(weights) for weights in modules])
    choices = (
        _head(target, arrangement, state, hidden_first, folder)
        for hidden_first in (False, True)
        for state in (POST_NORM, target.layer_count)
        for variant in variants
        for arrangement in _arrangements(variant)
    )
    return load_most_accurate(target, choices, folder)


def _arrangements(modules: list[_Weights]) -> Iterator[list[_Weights]]:
    """Yield the modules as stored and, if a single module has several layers, split into one per layer."""
    yield modules
    if len(modules) == 1 and _layer_count(modules[0]) > 1:
        yield _one_layer_each(modules[0])


def _layer_count(weights: Iterable[str]) -> int:
    return len({name.split(".")[1] for name in weights if name.startswith("layers.")})


def _one_layer_each(weights: _Weights) -> list[_Weights]:
    """Split a module with several layers into one module per layer, sharing all other weights."""
    shared = {name: one for name, one in weights.items() if not name.startswith("layers.")}
    return [
        shared
        | {
            f"layers.0.{name.removeprefix(prefix)}": one
            for name, one in weights.items()
            if name.startswith(prefix)
        }
        for prefix in (f"layers.{layer}." for layer in range(_layer_count(weights)))
    ]


def _with_norms_raised(weights: _Weights) -> _Weights:
    """Add 1 to the norm weights, whose modules have names such as `input_layernorm`."""
    return {name: one + 1 if "norm" in name.split(".")[-2] else one for name, one in weights.items()}


def _converted(net: Any, weights: _Weights) -> _Weights:
    """Convert weights to mlx-lm's layout, which stacks expert weights and splits some MLA weights."""
    joined = dict(weights)
    if "layers.0.self_attn.kv_b_proj.weight" in joined:
        # Rename the MTP layer to look like an ordinary layer, because mlx-lm converts only those.
        known = net.sanitize({f"model.{name}": weight for name, weight in joined.items()})
        joined = {name.removeprefix("model."): weight for name, weight in known.items()}
    for layer in range(_layer_count(joined)):
        _stack_experts(joined, f"layers.{layer}.mlp")
    mx.eval(joined)
    return joined


def _stack_experts(weights: _Weights, prefix: str) -> None:
    """Stack the weights of all experts into one array per matrix."""
    for name, part in product(("gate_proj", "up_proj", "down_proj"), ("weight", "scales", "biases")):
        experts: list[mx.array] = []
        while (key := f"{prefix}.experts.{len(experts)}.{name}.{part}") in weights:
            experts.append(weights.pop(key))
        if experts:
            weights[f"{prefix}.switch_mlp.{name}.{part}"] = mx.stack(experts)
    if (both := weights.pop(f"{prefix}.experts.gate_up_proj", None)) is not None:
        gate, up = mx.split(both, 2, axis=-2)
        weights[f"{prefix}.switch_mlp.gate_proj.weight"] = gate
        weights[f"{prefix}.switch_mlp.up_proj.weight"] = up
        weights[f"{prefix}.switch_mlp.down_proj.weight"] = weights.pop(f"{prefix}.experts.down_proj")


def _head(
    target: MlxModel, modules: Sequence[_Weights], state: int, hidden_first: bool, folder: Path
) -> EagleHead:
    """Create a head whose input has `state` either before (`hidden_first`) or after the embedding."""
    networks = [_module(target, weights, state == POST_NORM, hidden_first, folder) for weights in modules]
    arrays = {id(one): one for weights in modules for one in weights.values()}
    facts = head_facts(
        target,
        f"the MTP layers of {target.facts.name}",
        folder,
        "mtp",
        f"MTP layers that read the hidden state {state}",
        list(arrays.values()),
        _kv_bytes(modules),
        target.facts.trained_context_tokens,
    )
    embed = target_embedding(target.net, target.facts.vocab_size, target.state_size)
    lm_head = target_lm_head(target.net)
    return EagleHead(target, [state], networks, embed, lm_head, None, facts)


def _module(
    target: MlxModel, weights: _Weights, post_norm: bool, hidden_first: bool, folder: Path
) -> MtpModule:
    """Create the network of an MTP module. Raises ModelFileError if its weights do not fit the target."""
    arguments, layers = Body(target.net).arguments, LayerList(target.net).layers
    # Use the last layer's type, because the first layers of some models have no experts, unlike the MTP
    # layers.
    index = max(index for index, layer in enumerate(layers) if "self_attn" in layer)
    kind = type(layers[index])
    numbered = {"layer_idx": index} if "layer_idx" in inspect.signature(kind).parameters else {}
    try:
        own = [kind(arguments, **numbered) for _ in range(_layer_count(weights))]
        network = MtpModule(own, target.state_size, arguments.rms_norm_eps, post_norm, hidden_first)
        quantize_like(network, weights)
        network.load_weights(list(weights.items()), strict=True)
        evaluate_constants(layer.self_attn.rope for layer in own)
        mx.eval(network.parameters())
    except (ValueError, KeyError, TypeError) as error:
        raise ModelFileError(
            f"the MTP layers in {folder} do not match the model: {shorten(error)}", "download the model again"
        ) from error
    return network
