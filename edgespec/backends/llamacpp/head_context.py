"""Run a head that drafts from tokens and hidden states in a llama.cpp context."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LoadOptions
from edgespec.backends.llamacpp.batch import Batch
from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.backends.llamacpp.context_plan import ContextPlan
from edgespec.backends.llamacpp.layer_taps import copied_rows
from edgespec.backends.llamacpp.native import library
from edgespec.backends.llamacpp.staging_api import nextn_api

__all__ = ["EagleContext", "HeadContext"]


class _PairBatch(Batch):
    """A batch of tokens, each with a hidden state."""

    def __init__(self, size: int, sequences: int, state_size: int) -> None:
        super().__init__(size, sequences)
        self.states: NDArray[np.float32] = np.zeros((size, state_size), np.float32)
        self.native.embd = self.states.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    def free(self) -> None:
        # Remove the pointer to NumPy's memory, which llama.cpp would otherwise free.
        self.native.embd = None
        super().free()


class HeadContext(LlamaContext):
    """A context that runs a head, whose inputs are tokens and the hidden states before them.

    Args:
        weights: The head's llama_model handle.
        target: The context of the target, if the head borrows its token embeddings.
        mtp: Whether to run the multi-token prediction layers of `weights`, and no others. The weights must
            have been loaded with these layers. Otherwise, llama.cpp ends the process.
    """

    def __init__(
        self,
        weights: Any,
        options: LoadOptions,
        plan: ContextPlan,
        threads: int,
        *,
        target: LlamaContext | None = None,
        mtp: bool = False,
    ) -> None:
        super().__init__(weights, options, plan, threads, target=target, mtp=mtp)
        self._state_size: int = library().llama_model_n_embd_out(weights)
        self._pairs = _PairBatch(options.batch_tokens, plan.sequences, self._state_size)

    def allocate(self, plan: ContextPlan) -> None:
        super().allocate(plan)
        api = nextn_api()
        assert api is not None
        api.switch(self._context, True, True)

    def select_mtp_layer(self, layer: int) -> None:
        """Run this MTP layer from the next pass on, counted from 0."""
        api = nextn_api()
        assert api is not None
        api.select_layer(self._context, layer)

    def run_pairs(
        self,
        tokens: Sequence[int],
        states: NDArray[np.float32],
        positions: Sequence[int],
        sequences: Sequence[Sequence[int]],
        *,
        logits: bool = True,
    ) -> NDArray[np.float32]:
        """Process tokens with the hidden states before them, and return their logits. See `run`.

        If `logits` is False, the result has no rows.
        """
        # Request logits for all tokens or for none. If only some are requested, llama.cpp returns the wrong
        # hidden states for many heads: those of the first tokens.
        self._pairs.put(tokens, positions, sequences, logits)
        self._pairs.states[: len(tokens)] = states
        self._decode(self._pairs)
        return self._last_logits(len(tokens)) if logits else np.empty((0, 0), np.float32)

    def last_states(self, count: int) -> NDArray[np.float32]:
        """Return the head's own hidden states after the `count` tokens of the last pass with logits."""
        return self._states(count)

    def _states(self, count: int) -> NDArray[np.float32]:
        api = nextn_api()
        assert api is not None
        return copied_rows(api.address(self._context), count, self._state_size)

    def close(self) -> None:
        super().close()
        self._pairs.free()


class EagleContext(HeadContext):
    """A context that runs an EAGLE-3 head.

    The head's encoder first reduces the inputs of the target's tapped layers to one hidden state per token.
    """

    def __init__(
        self,
        head: Any,
        options: LoadOptions,
        plan: ContextPlan,
        threads: int,
        target: LlamaContext,
        size: int,
    ) -> None:
        super().__init__(head, options, plan, threads, target=target)
        self._features = Batch(options.batch_tokens, plan.sequences, size)

    def encode(self, features: NDArray[np.float32], position: int) -> NDArray[np.float32]:
        """Return the hidden states [tokens, embedding size] for features of at most one batch of tokens.

        `position` must be that of the next token in the KV cache, which encoding leaves unchanged.
        """
        count = len(features)
        self._features.put(features, range(position, position + count), [(0,)] * count, logits=True)
        self._decode(self._features, encode=True)
        return self._states(count)

    def close(self) -> None:
        super().close()
        self._features.free()
