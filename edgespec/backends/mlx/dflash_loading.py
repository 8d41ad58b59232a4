"""Load a published DFlash or DSpark head for an MLX target, and estimate its memory use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.backends.head_trial import check_finite
from edgespec.backends.hidden_state_log import MAX_LOGGED_TOKENS
from edgespec.backends.memory_estimate import MemoryEstimate
from edgespec.backends.mlx.cached_head import BATCH_TOKENS
from edgespec.backends.mlx.dflash import DFlashHead
from edgespec.backends.mlx.dflash_network import DFlashNetwork
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
from edgespec.heads.dflash_files import read_dflash
from edgespec.heads.layer_config import invalid_settings

if TYPE_CHECKING:
    from edgespec.backends.mlx.model import MlxModel

__all__ = ["estimate_dflash_head", "load_dflash_head"]


def estimate_dflash_head(folder: Path, context_tokens: int) -> MemoryEstimate:
    """Estimate the memory for a head, including the log of hidden states that it reads.

    Raises:
        CapabilityError: The head is a GGUF file.
        ModelFileError: The folder contains no DFlash or DSpark head, or a damaged one.
    """
    files = read_dflash(checked_folder(folder))
    config, fused = files.config, files.tensors["fc.weight"].shape[1]
    batch_elements = BATCH_TOKENS * (8 * config.size + 2 * config.feed_forward_size + fused)
    compute_elements = (
        batch_elements + 2 * config.block_tokens * config.vocab_size + MAX_LOGGED_TOKENS * fused
    )
    weight_bytes = sum(map(loaded_bytes, files.tensors.values()))
    return estimate_head(context_tokens, weight_bytes, config.kv_bytes_per_token, compute_elements)


def load_dflash_head(target: MlxModel, net: Any, folder: Path) -> DFlashHead:
    """Load a DFlash or DSpark head for a target.

    Args:
        target: The target.
        net: The target's mlx-lm model.
        folder: Folder of the head, in the layout in which it was published.

    Raises:
        CapabilityError: The head was made for another target, or is a GGUF file.
        ModelFileError: The folder contains no DFlash or DSpark head, or the head is damaged or not supported.
        MemoryBudgetError: The head does not fit in memory.
    """
    files = read_dflash(checked_folder(folder))
    config, name = files.config, f"the head of {target.facts.name}"
    check_sizes(target, folder, config.size, config.vocab_size)
    if not config.states or not all(0 <= state <= target.layer_count for state in config.states):
        raise CapabilityError(
            f"the head {folder} was made for another target: it reads the layers {list(config.states)}, but"
            f" {target.facts.name} has {target.layer_count} layers",
            "choose the head that was published for this target",
        )
    check_memory(target, name, sum(loaded_bytes(tensor) for tensor in files.tensors.values()))
    weights = [(parameter, weight_array(tensor)) for parameter, tensor in files.tensors.items()]
    with invalid_settings(folder):
        network = DFlashNetwork(files)
        network.load_weights(weights, strict=True)
        evaluate_constants(layer.self_attn.rope for layer in network.layers)
    facts = head_facts(
        target,
        name,
        folder,
        "dspark" if config.markov_rank else "dflash",
        f"head that drafts blocks of {config.block_tokens} tokens",
        [array for _, array in weights],
        config.kv_bytes_per_token,
        config.context_tokens,
    )
    embed = TargetEmbedding(net, config.vocab_size, config.size)
    lm_head = TargetLmHead(net) if files.target_ids is None else network.lm_head
    head = DFlashHead(target, network, config, embed, lm_head, files.target_ids, facts)
    try:
        check_finite(head, folder)
    except BaseException:
        head.close()
        raise
    return head
