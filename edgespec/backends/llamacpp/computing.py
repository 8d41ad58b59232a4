"""What llama.cpp computes passes in beside the buffers that it tells of, and what of those it never uses."""

from __future__ import annotations

import platform
import re
from typing import Any

from edgespec.backends.base import LoadOptions
from edgespec.backends.llamacpp.context import MAX_WIDTH, ContextPlan
from edgespec.backends.llamacpp.devices import on_cpu
from edgespec.backends.llamacpp.loading import threads_for
from edgespec.backends.llamacpp.metadata import metadata
from edgespec.backends.llamacpp.native import library
from edgespec.heap import address_space_is_limited

__all__ = ["converted_bytes", "logits_bytes", "unused_bytes"]

# What the rows of a pass are turned into to be multiplied by weights of 16 bits, and of fewer (block_q8_K).
_HALF_BYTES, _EIGHT_BITS_BYTES = 2.0, 292 / 256
# Bytes of an average weight, by which float32, 16 bits and fewer are told from each other.
_MORE_THAN_HALF_BYTES, _MORE_THAN_EIGHT_BITS_BYTES = 3.0, 1.5
# What each thread of an x86 processor holds for weights of K-quants and IQ-quants (ggml-cpu/tiled).
_TILES_BYTES = 512 * 2**10


def unused_bytes(weights: Any, plan: ContextPlan, options: LoadOptions) -> int:
    """What is reserved for hidden states, and never written to where tokens are given.

    Each graph can take either (`build_inp_embd` of llama-graph.cpp). Where addresses are limited they count
    all the same, and where there is a card buffers of the processor are pinned for it, used or not.
    """
    if address_space_is_limited() or library().llama_supports_gpu_offload():
        return 0
    return int(min(options.batch_tokens, plan.tokens) * library().llama_model_n_embd_inp(weights) * 4)


def logits_bytes(weights: Any, batch_tokens: int) -> int:
    """What the logits of the widest pass take."""
    lib = library()
    size: int = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(weights))
    return min(MAX_WIDTH, batch_tokens) * size * 4


def converted_bytes(weights: Any, plan: ContextPlan, options: LoadOptions, *, tiled: int) -> int:
    """What a processor turns the rows of a pass into to multiply weights or values by them: the most at once.

    tiled: how many tensors are of a type for which tiles are held; one is a head alone.
    """
    return max(_for_weights(weights, options, tiled), _for_values(weights, plan, options))


def _for_values(weights: Any, plan: ContextPlan, options: LoadOptions) -> int:
    """How much each row looks at each cell, by halves: without flash attention that is there all at once."""
    lib = library()
    if options.flash_attention != "off" or plan.kv_types.values == "f32" or not on_cpu(options):
        return 0
    if lib.llama_model_is_recurrent(weights):
        return 0
    arch = metadata(weights, "general.architecture") or ""
    # Some models have another number in each layer.
    heads = re.findall(r"\d+", metadata(weights, f"{arch}.attention.head_count") or "")
    rows = min(options.batch_tokens, plan.tokens)
    return int(rows * plan.tokens * max(map(int, heads), default=0) * _HALF_BYTES)


def _for_weights(weights: Any, options: LoadOptions, tiled: int) -> int:
    """Rows become halves for weights of 16 bits, eight bits and scales for fewer; else they stay float32."""
    lib = library()
    size = lib.llama_model_size(weights)
    weight_bytes = size / max(1, lib.llama_model_n_params(weights))
    if weight_bytes > _MORE_THAN_HALF_BYTES:
        return 0
    number_bytes = _HALF_BYTES if weight_bytes > _MORE_THAN_EIGHT_BITS_BYTES else _EIGHT_BITS_BYTES
    rows_bytes = int(options.batch_tokens * _widest_row(weights) * number_bytes)
    if not tiled or platform.machine() not in ("x86_64", "AMD64"):
        return rows_bytes
    tiles = threads_for(weights, options) * _TILES_BYTES
    if tiled > 1:
        return rows_bytes + tiles
    head_rows = min(MAX_WIDTH, options.batch_tokens)
    return max(rows_bytes, int(head_rows * lib.llama_model_n_embd(weights) * _EIGHT_BITS_BYTES) + tiles)


def _widest_row(weights: Any) -> int:
    """Of how many numbers, for each token: of a layer's middle, of those of all experts that it asks."""
    arch = metadata(weights, "general.architecture") or ""

    def said(key: str) -> int:
        return _said(weights, f"{arch}.{key}")

    middle = said("feed_forward_length")
    experts = said("expert_used_count") * (said("expert_feed_forward_length") or middle)
    heads = said("attention.head_count") * said("attention.value_length")
    return max(middle, experts, heads, said("ssm.inner_size"), said("embedding_length"))


def _said(weights: Any, key: str) -> int:
    """A number of the metadata; 0 where there is none, or one for each layer."""
    text = metadata(weights, key) or ""
    return int(text) if text.isdecimal() else 0
