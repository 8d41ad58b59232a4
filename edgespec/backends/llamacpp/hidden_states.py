"""Compute the hidden states after each layer of a GGUF model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LoadOptions, Progress
from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.backends.llamacpp.context_planning import plan_context
from edgespec.backends.llamacpp.hidden_state_hook import HiddenStateHook, layer_output
from edgespec.backends.llamacpp.loading import load_weights, threads_for
from edgespec.backends.llamacpp.native import library

__all__ = ["hidden_states"]


def hidden_states(
    path: str, name: str, tokens: Sequence[int], options: LoadOptions, progress: Progress | None = None
) -> NDArray[np.float32]:
    """Load a model, run `tokens`, and return the hidden states after every layer.

    Returns:
        The hidden states as a float32 array [layers, tokens, embedding size].

    Raises:
        BackendError: llama.cpp does not expose the layer outputs of this architecture.
        EdgespecError: The model cannot be loaded. See `edgespec.backends.llamacpp.load`.
    """
    lib = library()
    weights = load_weights(path, name, options, progress)
    try:
        names = [layer_output(layer) for layer in range(lib.llama_model_n_layer(weights))]
        hook = HiddenStateHook(names, lib.llama_model_n_embd(weights))
        threads = threads_for(weights, options)
        context = LlamaContext(weights, options, plan_context(weights, options), threads, hook=hook)
        try:
            parts = []
            for start in range(0, len(tokens), context.max_width):
                chunk = tokens[start : start + context.max_width]
                context.run(chunk, range(start, start + len(chunk)), [(0,)] * len(chunk))
                parts.append(np.stack([hook.take(name, len(chunk)) for name in names]))
            return np.concatenate(parts, axis=1)
        finally:
            context.close()
    finally:
        lib.llama_model_free(weights)
