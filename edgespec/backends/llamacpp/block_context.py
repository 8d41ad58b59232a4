"""Run block-diffusion heads, which draft a block of tokens per pass, in a llama.cpp context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LoadOptions
from edgespec.backends.llamacpp.batch import Batch, Inputs
from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.backends.llamacpp.context_plan import ContextPlan
from edgespec.backends.llamacpp.head_context import HeadContext, HeadPass, HeadRows
from edgespec.backends.llamacpp.layer_taps import copied_rows
from edgespec.backends.llamacpp.native import library
from edgespec.backends.llamacpp.staging_api import nextn_api

__all__ = ["BlockContext"]

# Number of positions that M-RoPE needs per hidden state: time, height, width, and an unused one.
_MROPE_POSITIONS = 4


class _MRopeBatch(Batch):
    """A batch of hidden states for a head with M-RoPE, which needs several positions per hidden state."""

    def __init__(self, size: int, sequences: int, embd_size: int) -> None:
        super().__init__(size * _MROPE_POSITIONS, sequences, embd_size)

    def put(
        self,
        inputs: Inputs,
        positions: Sequence[int],
        sequences: Sequence[Sequence[int]],
        logits: bool | Sequence[bool],
    ) -> None:
        super().put(inputs, positions, sequences, logits)
        # Time, height and width are equal for text tokens.
        rows = self._position[: len(inputs) * _MROPE_POSITIONS].reshape(_MROPE_POSITIONS, -1)
        rows[:-1], rows[-1] = positions, 0


class BlockContext(HeadContext):
    """A context that runs a block-diffusion head.

    The KV cache holds keys and values that the head computes from the target's hidden states.

    Args:
        row_size: Number of values per token in the target's hidden states.
        causal: Whether each token of a block attends only to earlier tokens, rather than to the whole block.
        selects: Whether the head has a path selector, as DFlash 2 heads do.
    """

    def __init__(
        self,
        head: Any,
        options: LoadOptions,
        plan: ContextPlan,
        threads: int,
        *,
        target: LlamaContext,
        row_size: int,
        causal: bool,
        selects: bool,
    ) -> None:
        self._causal, self._selects = causal, selects
        super().__init__(head, options, plan, threads, target=target)
        lib = library()
        has_mrope = lib.llama_model_rope_type(head) == lib.LLAMA_ROPE_TYPE_MROPE
        self._states = (_MRopeBatch if has_mrope else Batch)(options.batch_tokens, plan.sequences, row_size)

    def allocate(self, plan: ContextPlan) -> None:
        super().allocate(plan)
        library().llama_set_causal_attn(self._context, self._causal)
        if self._selects:
            api = nextn_api()
            assert api is not None
            api.switch(self._context, True, False)

    def compute(self, head_pass: HeadPass) -> HeadRows:
        """Run a pass of the head. See `HeadContext.compute`.

        `prefill` reads only hidden states. `draft` reads none. It runs a block, whose keys and values the
        caller removes, and returns the data for the `PathSelector` instead of hidden states.
        """
        none = np.empty((0, 0), np.float32)
        kind, tokens, inputs, positions, sequences = head_pass
        if kind == "prefill":
            self._states.put(inputs, positions, sequences, logits=False)
            self._decode(self._states)
            return HeadRows(none, none)
        logits = self.run(tokens, positions, sequences)
        return HeadRows(logits, self._lattice(len(tokens)) if self._selects else none)

    def _lattice(self, count: int) -> NDArray[np.float32]:
        """Return the candidates and scores for a block of `count` tokens. See `PathSelector`."""
        api = nextn_api()
        assert api is not None
        return copied_rows(api.address(self._context), count, library().llama_model_n_embd(self._model))

    def close(self) -> None:
        super().close()
        self._states.free()
