"""Draft with the multi-token prediction (MTP) layers that many models were trained with (arXiv 2412.19437)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Head, LoadOptions
from edgespec.backends.hidden_state_log import POST_NORM
from edgespec.backends.llamacpp.context import ContextPlan
from edgespec.backends.llamacpp.context_planning import check_contexts_fit
from edgespec.backends.llamacpp.head import PairHead
from edgespec.backends.llamacpp.head_context import HeadContext
from edgespec.backends.llamacpp.head_loading import check_finite, check_sizes, estimate_head, head_options
from edgespec.backends.llamacpp.kv_types import KvTypes
from edgespec.backends.llamacpp.loading import check_file, load_weights, threads_for
from edgespec.backends.llamacpp.metadata import vocabulary_size
from edgespec.backends.llamacpp.mtp_files import MtpLayers, check_same_model, read_mtp_layers
from edgespec.backends.llamacpp.native import library
from edgespec.backends.llamacpp.staging_api import staging_api
from edgespec.backends.memory_check import check_weights_fit
from edgespec.backends.memory_estimate import MemoryEstimate
from edgespec.errors import CapabilityError

if TYPE_CHECKING:
    from edgespec.backends.llamacpp.model import LlamaCppModel

__all__ = ["MtpHead", "estimate_mtp_head", "load_mtp_head"]

# Approximate size of a head's compute buffer, in bytes per token of a batch and per token of the vocabulary.
_COMPUTE_BYTES_PER_LOGIT = 4
_F16 = KvTypes("f16", "f16")


def load_mtp_head(target: LlamaCppModel, path: Path | None) -> MtpHead:
    """Load the MTP layers in a file, or use those in the target's own file if `path` is None.

    Raises:
        CapabilityError: The file has no MTP layers that llama.cpp can run, or was made for another target.
        ModelFileError: The file is damaged, or its logits are not finite.
        MemoryBudgetError: The head does not fit in memory.
    """
    file, options = path or Path(target.facts.path), head_options(target)
    layers = read_mtp_layers(file)
    if staging_api() is None:
        raise CapabilityError(
            "this version of llama.cpp cannot run MTP layers apart from the model",
            "install the version of llama-cpp-python that edgespec was tested with, or choose another method",
        )
    if path is None and not target.options.mtp:
        raise CapabilityError(
            f"{target.facts.name} was loaded without its MTP layers",
            "load the model with --method mtp (in Python, use the option `method` or `methods`)",
        )
    weights = target.weights[0] if path is None else _load_file(target, path, options)
    try:
        head = MtpHead(target, weights, file, layers, options, owns_weights=path is not None)
    except BaseException:
        if path is not None:
            library().llama_model_free(weights)
        raise
    try:
        check_finite(head, file)
    except BaseException:
        head.close()
        raise
    return head


def _load_file(target: LlamaCppModel, path: Path, options: LoadOptions) -> Any:
    """Load a file that contains only MTP layers, the embeddings and the LM head. Return its llama_model."""
    name = _name(target)
    check_same_model(path, Path(target.facts.path), target.facts.name)
    check_weights_fit(name, check_file(str(path)), options)
    weights, own = load_weights(str(path), name, replace(options, mtp=True), None), target.weights[0]
    try:
        n_embd = library().llama_model_n_embd
        check_sizes(
            target,
            path,
            [
                ("hidden states", n_embd(own), n_embd(weights)),
                ("vocabularies", vocabulary_size(own), vocabulary_size(weights)),
            ],
        )
    except BaseException:
        library().llama_model_free(weights)
        raise
    return weights


def _name(target: LlamaCppModel) -> str:
    return f"the MTP head of {target.facts.name}"


def estimate_mtp_head(head: Head, target: Path, context_tokens: int) -> MemoryEstimate:
    """Return the memory used by MTP layers and by the hidden states that are kept for them.

    Raises:
        CapabilityError: The file has no MTP layers that llama.cpp can run.
        ModelFileError: The file is missing or damaged.
    """
    layers = read_mtp_layers(head.path or target)
    return estimate_head(
        context_tokens,
        weight_bytes=check_file(str(head.path)) if head.path else layers.weight_bytes,
        token_bytes=layers.token_bytes,
        vocabulary=layers.vocabulary,
        state_size=layers.state_size,
        bytes_per_logit=_COMPUTE_BYTES_PER_LOGIT,
    )


class MtpHead(PairHead):
    """MTP layers. They read the target's final hidden states.

    If a model has several, which were trained to predict one token further each, the first of them predicts
    all tokens of a draft.
    """

    def __init__(
        self,
        target: LlamaCppModel,
        weights: Any,
        path: Path,
        layers: MtpLayers,
        options: LoadOptions,
        *,
        owns_weights: bool,
    ) -> None:
        self._own_weights = weights if owns_weights else None
        max_plan = _plan(layers, options)
        check_contexts_fit([max_plan], check_file(str(path)) if owns_weights else 0, options)
        plan = max_plan.with_tokens(target.facts.context_tokens)
        context = HeadContext(weights, options, plan, threads_for(weights, options), mtp=True)
        state = POST_NORM if layers.graph.reads_normed else library().llama_model_n_layer(target.weights[0])
        try:
            log = target.log_hidden_states((state,))
        except BaseException:
            context.close()
            raise
        super().__init__(target, weights, str(path), options, _name(target), context, log, max_plan)
        if not owns_weights:
            self.facts = replace(self.facts, weight_bytes=layers.weight_bytes)

    def _target_states(self, start: int, count: int) -> NDArray[np.float32]:
        return self._log.rows(start - 1, start - 1 + count)

    def _free_weights(self) -> None:
        if self._own_weights is not None:
            library().llama_model_free(self._own_weights)


def _plan(layers: MtpLayers, options: LoadOptions) -> ContextPlan:
    """Return the context plan of MTP layers. Their KV cache is separate from the target's."""
    assert options.context_tokens is not None
    sequences, token_bytes = options.max_branches + 1, layers.token_bytes
    return ContextPlan(
        options.context_tokens,
        _F16,
        sequences,
        kv_bytes=options.context_tokens * token_bytes,
        token_bytes=token_bytes,
        rows=max(options.batch_tokens, sequences),
    )
