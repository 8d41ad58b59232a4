"""Draft with the multi-token prediction (MTP) layers that many models contain (arXiv 2412.19437)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.backends.base import LoadOptions
from edgespec.backends.head_trial import check_finite
from edgespec.backends.llamacpp.gemma4_assistant import AssistantHead, estimate_assistant, load_assistant
from edgespec.backends.llamacpp.gemma4_assistant_files import is_assistant
from edgespec.backends.llamacpp.head_loading import (
    check_sizes,
    estimate_head,
    head_options,
    load_head_file,
)
from edgespec.backends.llamacpp.loading import check_file
from edgespec.backends.llamacpp.mtp_files import MtpLayers, check_same_model, read_mtp_layers
from edgespec.backends.llamacpp.mtp_head import ChainedMtpHead, MtpHead
from edgespec.backends.llamacpp.native import library
from edgespec.backends.llamacpp.staging_api import nextn_api
from edgespec.backends.memory_estimate import MemoryEstimate
from edgespec.backends.self_draft_methods import Head
from edgespec.errors import CapabilityError

if TYPE_CHECKING:
    from edgespec.backends.llamacpp.model import LlamaCppModel

__all__ = ["estimate_mtp_head", "load_mtp_head"]

# Approximate size of a head's compute buffer in bytes, per token of a batch and per token of the vocabulary.
_COMPUTE_BYTES_PER_LOGIT = 4


def load_mtp_head(target: LlamaCppModel, path: Path | None) -> MtpHead | AssistantHead:
    """Load MTP layers from a file, or use the MTP layers in the target's own file if `path` is None.

    Raises:
        CapabilityError: The file was made for another target, or has no MTP layers that llama.cpp can run.
        ModelFileError: The file is damaged, or its logits are not finite.
        MemoryBudgetError: The head does not fit in memory.
    """
    if nextn_api() is None:
        raise CapabilityError(
            "this version of llama.cpp cannot run MTP layers separately from the model",
            "install the version of llama-cpp-python that edgespec was tested with, or choose another method",
        )
    if path is not None and is_assistant(path):
        return load_assistant(target, path)
    file = path or Path(target.facts.path)
    layers = read_mtp_layers(file)
    if path is None:
        return _own_head(target, file, layers)
    check_same_model(path, Path(target.facts.path), target.facts.name)

    def make(weights: Any, options: LoadOptions, name: str) -> MtpHead:
        n_embd = library().llama_model_n_embd
        check_sizes(target, file, [("hidden states", n_embd(target.weights[0]), n_embd(weights))])
        kind = ChainedMtpHead if layers.count > 1 else MtpHead
        return kind(target, weights, file, layers, options, name, owns_weights=True)

    return load_head_file(
        target, Head("mtp", path), target.facts.architecture, "a file with MTP layers", make
    )


def _own_head(target: LlamaCppModel, path: Path, layers: MtpLayers) -> MtpHead:
    """Return a head that uses the MTP layers in the target, whose weights are already loaded."""
    if not target.options.mtp:
        raise CapabilityError(
            f"{target.facts.name} was loaded without its MTP layers",
            "load the model with --method mtp (in Python, use the option `method` or `methods`)",
        )
    options, name = head_options(target), f"the MTP layers of {target.facts.name}"
    kind = ChainedMtpHead if layers.count > 1 else MtpHead
    head = kind(target, target.weights[0], path, layers, options, name, owns_weights=False)
    try:
        check_finite(head, path)
    except BaseException:
        head.close()
        raise
    return head


def estimate_mtp_head(path: Path | None, target: Path, context_tokens: int) -> MemoryEstimate:
    """Estimate the memory for MTP layers, including the log of hidden states that they read.

    Args:
        path: The file with the MTP layers. None means the target's own file.
        target: The target's file.
        context_tokens: Size of the KV cache in tokens.

    Raises:
        CapabilityError: The file has no MTP layers that llama.cpp can run.
        ModelFileError: The file is missing or damaged.
    """
    if path is not None and is_assistant(path):
        return estimate_assistant(path, context_tokens)
    layers = read_mtp_layers(path or target)
    return estimate_head(
        context_tokens,
        weight_bytes=check_file(str(path)) if path else layers.weight_bytes,
        token_bytes=layers.token_bytes,
        vocabulary=layers.vocabulary,
        state_size=layers.state_size,
        bytes_per_logit=_COMPUTE_BYTES_PER_LOGIT,
    )
