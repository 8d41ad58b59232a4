"""Draft with an EAGLE-3 head, a one-layer model that reads the target's hidden states (arXiv 2503.01840)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LoadOptions
from edgespec.backends.gguf_header import read_header
from edgespec.backends.gguf_metadata import read_gguf_info
from edgespec.backends.llamacpp.context_planning import plan_context
from edgespec.backends.llamacpp.head import PairHead, check_finite, check_sizes, estimate_head, head_options
from edgespec.backends.llamacpp.head_context import EagleContext
from edgespec.backends.llamacpp.loading import check_file, load_weights, threads_for
from edgespec.backends.llamacpp.metadata import architecture_metadata, metadata, vocabulary_size
from edgespec.backends.llamacpp.native import library
from edgespec.backends.llamacpp.staging_api import StagingApi, staging_api
from edgespec.backends.memory_check import check_weights_fit
from edgespec.backends.memory_estimate import MemoryEstimate
from edgespec.errors import CapabilityError, ModelFileError

if TYPE_CHECKING:
    from edgespec.backends.llamacpp.model import LlamaCppModel

__all__ = ["EagleHead", "estimate_eagle_head", "load_eagle_head"]

_ARCHITECTURE = "eagle3"
# Approximate size of a head's compute buffer, in bytes per token of a batch and per token of the vocabulary.
_COMPUTE_BYTES_PER_LOGIT = 7


def load_eagle_head(target: LlamaCppModel, path: Path) -> EagleHead:
    """Load an EAGLE-3 head for a target.

    Raises:
        CapabilityError: The file is not an EAGLE-3 head, or was made for another target.
        ModelFileError: The file is damaged, or its logits are not finite.
        MemoryBudgetError: The head does not fit in memory.
    """
    api = staging_api()
    if api is None or "eagle" not in target.facts.capabilities.self_draft_methods:
        raise CapabilityError(
            f"{target.facts.name} does not support heads, because its hidden states cannot be read",
            "choose another method, such as model or suffix",
        )
    options, name = head_options(target), f"the head of {target.facts.name}"
    check_weights_fit(name, check_file(str(path)), options)
    weights = load_weights(str(path), name, options, None)
    try:
        layers = _check_made_for(target, weights, path, api)
        _check_token_ids(path, vocabulary_size(target.weights[0]))
        head = EagleHead(target, weights, str(path), layers, options, name)
    except BaseException:
        library().llama_model_free(weights)
        raise
    try:
        check_finite(head, path)
    except BaseException:
        head.close()
        raise
    return head


def _check_token_ids(path: Path, vocab_size: int) -> None:
    """Raise ModelFileError if a head's `d2t` maps a draft token to none of the target's tokens.

    llama.cpp would end the process.
    """
    header = read_header(path)
    found = next((tensor for tensor in header.tensors if tensor.name == "d2t"), None)
    if found is None:
        return
    import gguf  # Imported lazily because importing gguf takes 0.2 seconds.

    ids = next(tensor.data for tensor in gguf.GGUFReader(path).tensors if tensor.name == "d2t")
    if ids.dtype != np.int64 or not (ids.size and 0 <= ids.min() <= ids.max() < vocab_size):
        raise ModelFileError(
            f"the head {path} is damaged, or was made for another target: its d2t contains token ids outside"
            f" the target's vocabulary of {vocab_size:,} tokens",
            "download it again, or choose the head that was published for this target",
        )


def estimate_eagle_head(path: Path, context_tokens: int) -> MemoryEstimate:
    """Return the memory used by a head and by the hidden states that are kept for it.

    Raises:
        ModelFileError: The file is missing or damaged.
    """
    header = read_header(path)
    size = int(header.architecture_value("embedding_length", 0))
    state_size = int(header.architecture_value("target_hidden_size", size))
    return estimate_head(
        context_tokens,
        weight_bytes=check_file(str(path)),
        token_bytes=read_gguf_info(path).kv_bytes,
        vocabulary=int(header.architecture_value("vocab_size", 0)),
        state_size=len(header.architecture_value("target_layers", ())) * state_size,
        bytes_per_logit=_COMPUTE_BYTES_PER_LOGIT,
    )


def _check_made_for(target: LlamaCppModel, head: Any, path: Path, api: StagingApi) -> list[int]:
    """Return the target's layers whose inputs the head reads.

    Raises:
        CapabilityError: The file is not an EAGLE-3 head, or was made for another target.
        ModelFileError: The file is damaged.
    """
    lib, (weights,) = library(), target.weights
    architecture = metadata(head, "general.architecture")
    if architecture != _ARCHITECTURE:
        raise CapabilityError(
            f"{path} is not an EAGLE-3 head, but a model with the architecture {architecture!r}",
            "pass a head with --head, and draft models with --draft",
        )
    layers = list(api.model_target_layer_ids(head)[: api.model_target_layer_ids_n(head)])
    size, count = lib.llama_model_n_embd(weights), lib.llama_model_n_layer(weights)
    head_size = int(architecture_metadata(head, "target_hidden_size") or lib.llama_model_n_embd(head))
    check_sizes(
        target,
        path,
        [
            ("hidden states", size, head_size),
            ("vocabularies", vocabulary_size(weights), vocabulary_size(head)),
        ],
    )
    rotated, key_length = (
        int(architecture_metadata(head, key) or 0) for key in ("rope.dimension_count", "attention.key_length")
    )
    # llama.cpp would end the process or hang.
    if rotated % 2 or not 0 < rotated <= key_length:
        raise ModelFileError(
            f"the head {path} is damaged: its rope.dimension_count is {rotated:,}, but must be an even number"
            f" up to the key length of {key_length:,}",
            "download it again, or omit --head",
        )
    if not layers or not all(0 <= layer < count for layer in layers):
        raise CapabilityError(
            f"the head {path} was made for another target: it reads the layers {layers}, but"
            f" {target.facts.name} has {count}",
            "choose the head that was published for this target",
        )
    return layers


class EagleHead(PairHead):
    """An EAGLE-3 head. It reads the inputs of some of the target's layers, which its encoder combines."""

    def __init__(
        self,
        target: LlamaCppModel,
        weights: Any,
        path: str,
        layers: Sequence[int],
        options: LoadOptions,
        name: str,
    ) -> None:
        self._weights = weights
        max_plan = plan_context(weights, options)
        plan = max_plan.with_tokens(target.facts.context_tokens)
        log = target.log_hidden_states(layers)
        self._encoder = context = EagleContext(
            weights, options, plan, threads_for(weights, options), target.context, log.row_size
        )
        super().__init__(target, weights, path, options, name, context, log, max_plan)

    def _target_states(self, start: int, count: int) -> NDArray[np.float32]:
        return self._encoder.encode(self._log.rows(start - 1, start - 1 + count), start)

    def _free_weights(self) -> None:
        library().llama_model_free(self._weights)
