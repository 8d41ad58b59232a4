"""Draft with the multi-token prediction (MTP) layers that many models contain (arXiv 2412.19437)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from edgespec.backends.llamacpp.context_plan import ContextPlan
from edgespec.backends.llamacpp.context_planning import check_contexts_fit
from edgespec.backends.llamacpp.gemma4_assistant import estimate_assistant, load_assistant
from edgespec.backends.llamacpp.gemma4_assistant_files import is_assistant
from edgespec.backends.llamacpp.head import PairHead
from edgespec.backends.llamacpp.head_context import PairContext
from edgespec.backends.llamacpp.head_loading import (
    HeadFile,
    HeadParts,
    HeadWeights,
    check_sizes,
    head_memory,
    head_options,
    load_head_file,
)
from edgespec.backends.llamacpp.head_target import HeadTarget, SharedHead
from edgespec.backends.llamacpp.kv_types import KvTypes
from edgespec.backends.llamacpp.loading import check_file, threads_for
from edgespec.backends.llamacpp.mtp_files import MtpLayers, check_same_model, read_mtp_layers
from edgespec.backends.llamacpp.native import library
from edgespec.backends.llamacpp.staging_api import nextn_api
from edgespec.errors import CapabilityError
from edgespec.model.base import LoadOptions
from edgespec.model.memory_estimate import MemoryEstimate
from edgespec.model.self_draft_methods import Head

__all__ = ["estimate_head", "load_head"]

# Approximate size of a head's compute buffer in bytes, per token of a batch and per token of the vocabulary.
_COMPUTE_BYTES_PER_LOGIT = 4
_F16 = KvTypes("f16", "f16")


def load_head(target: HeadTarget, head: Head) -> SharedHead:
    """Load MTP layers from a file, or use the MTP layers in the target's own file if the head has no path.

    Raises:
        CapabilityError: The file was made for a different target, llama.cpp cannot run its MTP layers, or
            concurrent replies cannot share them.
        ModelFileError: The file is damaged.
        MemoryBudgetError: The head does not fit in memory.
    """
    if nextn_api() is None:
        raise CapabilityError(
            "this version of llama.cpp cannot run MTP layers separately from the model",
            "install the version of llama-cpp-python that edgespec was tested with, or choose another method",
            code="head_not_supported",
        )
    path = head.path
    if path is not None and is_assistant(path):
        return load_assistant(target, head, path)
    file = path or Path(target.facts.path)
    layers = read_mtp_layers(file)
    if layers.count > 1 and target.options.parallel > 1:
        # All layers of a context share its KV cells, but concurrent replies would run different layers.
        raise CapabilityError(
            f"the {layers.count} MTP layers of {file.name} cannot draft for several replies at once",
            "omit --parallel, or choose another method, such as suffix",
            code="parallel_not_supported",
        )

    def make(weights: Any, options: LoadOptions, name: str, free: Callable[[], None]) -> HeadFile:
        plan = plan_mtp_context(layers, options)
        check_contexts_fit([plan], check_file(str(path)) if path else 0, options)
        found = HeadWeights(weights, file, name, options, plan, free, file)

        def open_context(target: HeadTarget, _row_size: int) -> PairContext:
            return PairContext(
                weights, options, found.plan_for(target), threads_for(weights, options), mtp=True
            )

        def make_view(parts: HeadParts) -> PairHead:
            view = PairHead(parts, layers=layers.count)
            if path is None:
                # `weights` covers the whole target, not just its MTP layers.
                view.facts = replace(view.facts, weight_bytes=layers.weight_bytes)
            return view

        states = layers.graph.states_read(library().llama_model_n_layer(target.weights[0]))
        return HeadFile(found, states, open_context, make_view)

    if path is None:
        if not target.options.own_head:
            raise CapabilityError(
                f"{target.facts.name} was loaded without its MTP layers",
                f"load the model with --method {head.method} (in Python: the option `method` or `methods`)",
                code="mtp_missing",
            )
        name = f"the MTP layers of {target.facts.name}"
        return make(target.weights[0], head_options(target), name, lambda: None)
    check_same_model(path, Path(target.facts.path), target.facts.name)

    def make_from_file(weights: Any, options: LoadOptions, name: str) -> HeadFile:
        n_embd = library().llama_model_n_embd
        check_sizes(target, file, [("hidden states", n_embd(target.weights[0]), n_embd(weights))])
        return make(weights, options, name, partial(library().llama_model_free, weights))

    return load_head_file(target, head, target.facts.architecture, "a file with MTP layers", make_from_file)


def estimate_head(head: Head, target: Path, context_tokens: int) -> MemoryEstimate:
    """Estimate the memory of MTP layers. See `HeadNetwork`."""
    path = head.path
    if path is not None and is_assistant(path):
        return estimate_assistant(path, context_tokens)
    layers = read_mtp_layers(path or target)
    return head_memory(
        context_tokens,
        weight_bytes=check_file(str(path)) if path else layers.weight_bytes,
        token_bytes=layers.token_bytes,
        vocabulary=layers.vocabulary,
        state_size=layers.state_size,
        bytes_per_logit=_COMPUTE_BYTES_PER_LOGIT,
    )


def plan_mtp_context(layers: MtpLayers, options: LoadOptions) -> ContextPlan:
    """Return the context plan for MTP layers, whose KV cache is separate from the target's."""
    assert options.context_tokens is not None
    slots, token_bytes = options.parallel, layers.token_bytes
    tokens, sequences = options.context_tokens * slots, (options.max_branches + 1) * slots
    return ContextPlan(
        tokens,
        _F16,
        sequences,
        kv_bytes=tokens * token_bytes,
        token_bytes=token_bytes,
        rows=max(options.batch_tokens, sequences),
        slots=slots,
    )
