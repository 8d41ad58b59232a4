"""Load a published EAGLE head for an MLX target, and estimate its memory use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from edgespec.backends.head_trial import load_most_accurate
from edgespec.backends.hidden_state_log import MAX_LOGGED_TOKENS, POST_NORM
from edgespec.backends.memory_estimate import MemoryEstimate
from edgespec.backends.mlx.cached_head import BATCH_TOKENS
from edgespec.backends.mlx.eagle import EagleHead
from edgespec.backends.mlx.eagle_network import EagleNetwork
from edgespec.backends.mlx.head_loading import (
    check_memory,
    check_sizes,
    checked_folder,
    estimate_head,
    evaluate_constants,
    head_facts,
    loaded_bytes,
    weight_array,
)
from edgespec.backends.mlx.target_ends import TargetEmbedding, TargetLmHead
from edgespec.errors import CapabilityError
from edgespec.heads.eagle_files import EagleFiles, read_eagle
from edgespec.heads.layer_config import invalid_settings

if TYPE_CHECKING:
    from edgespec.backends.mlx.model import MlxModel

__all__ = ["estimate_eagle_head", "load_eagle_head"]


def estimate_eagle_head(folder: Path, context_tokens: int) -> MemoryEstimate:
    """Estimate the memory for a head, including the log of hidden states that it reads.

    Raises:
        CapabilityError: The head is a GGUF file.
        ModelFileError: The folder contains no EAGLE head, or one that is damaged.
    """
    files = read_eagle(checked_folder(folder))
    config, fused = files.config, files.tensors["fc.weight"].shape[1]
    weight_bytes = sum(loaded_bytes(tensor) for tensor in files.tensors.values())
    row = 2 * config.vocab_size + 8 * config.hidden_size + 2 * config.feed_forward_size + fused
    compute_elements = BATCH_TOKENS * row + MAX_LOGGED_TOKENS * fused
    return estimate_head(context_tokens, weight_bytes, config.kv_bytes_per_token, compute_elements)


def load_eagle_head(target: MlxModel, net: Any, folder: Path) -> EagleHead:
    """Load an EAGLE head for a target. The target's cache must be empty.

    The configuration of a head does not say which hidden states it reads, nor whether its inputs start with
    the embedding or with the hidden state. We therefore try all possibilities (see `load_most_accurate`).

    Args:
        target: The target.
        net: The target's mlx-lm model.
        folder: Folder of the head, in the layout in which it was published.

    Raises:
        CapabilityError: The head was made for another target, or is a GGUF file.
        ModelFileError: The folder contains no EAGLE head, or one that is damaged or not supported.
        MemoryBudgetError: The head does not fit in memory.
    """
    files = read_eagle(checked_folder(folder))
    name = f"the head of {target.facts.name}"
    check_sizes(target, folder, files.config.target_size, files.config.vocab_size)
    check_memory(target, name, files.weight_bytes)
    weights = [(parameter, weight_array(tensor)) for parameter, tensor in files.tensors.items()]
    choices = (
        _head(target, net, files, weights, states, hidden_first, name, folder)
        for hidden_first in (False, True)
        for states in _state_choices(target, files, folder)
    )
    return load_most_accurate(target, choices, folder)


def _state_choices(target: MlxModel, files: EagleFiles, folder: Path) -> list[tuple[int, ...]]:
    """Return the combinations of hidden states that the head may read, most likely first."""
    layers = target.layer_count
    if files.config.version == 1:
        # Most heads read the hidden state after the final norm, as in EAGLE's own code. Some read the state
        # before the norm.
        return [(POST_NORM,), (layers,)]
    choices = files.config.layer_choices(layers)
    if not choices:
        raise CapabilityError(
            f"the head {folder} was made for another target: it reads the layers"
            f" {list(files.config.layers or ())}, but {target.facts.name} has {layers} layers",
            "choose the head that was published for this target",
        )
    return choices


def _head(
    target: MlxModel,
    net: Any,
    files: EagleFiles,
    weights: Sequence[tuple[str, mx.array]],
    states: Sequence[int],
    hidden_first: bool,
    name: str,
    folder: Path,
) -> EagleHead:
    """Create a head that reads the target's hidden states `states`, before or after the embedding."""
    config = files.config
    with invalid_settings(folder):
        network = EagleNetwork(files, hidden_first)
        network.load_weights(list(weights), strict=True)
        evaluate_constants([network.layer.self_attn.rope])
    parameters = dict(weights)
    embed = (
        network.embed_tokens
        if "embed_tokens.weight" in parameters
        else TargetEmbedding(net, config.vocab_size, config.hidden_size)
    )
    lm_head = network.lm_head if "lm_head.weight" in parameters else TargetLmHead(net)
    facts = head_facts(
        target,
        name,
        folder,
        f"eagle{config.version}",
        f"EAGLE-{config.version} head that reads the hidden states {list(states)}",
        list(parameters.values()),
        config.kv_bytes_per_token,
        config.context_tokens,
    )
    return EagleHead(target, states, network, embed, lm_head, files.target_ids, facts)
