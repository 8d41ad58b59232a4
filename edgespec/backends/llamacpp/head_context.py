"""Run heads, which draft from tokens and hidden states, in a llama.cpp context."""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llamacpp.context import Batch, LlamaContext
from edgespec.backends.llamacpp.context_plan import ContextPlan
from edgespec.backends.llamacpp.native import library
from edgespec.backends.llamacpp.staging_api import nextn_api
from edgespec.backends.llamacpp.state_taps import copied_rows
from edgespec.model.base import LoadOptions

__all__ = ["EagleContext", "HeadContext", "HeadPass", "HeadRows", "PairContext"]

_Kind: TypeAlias = Literal["encode", "prefill", "draft"]


class HeadPass(NamedTuple):
    """A pass of a head.

    Attributes:
        kind: What to compute. `encode` computes the input states of an EAGLE-3 head from the target's hidden
            states, and leaves the KV cache unchanged. `prefill` computes only keys and values. `draft` also
            computes logits and the head's own hidden states.
        tokens: The tokens. Ignored if this kind of pass reads only hidden states.
        inputs: The hidden states that the head reads, float32 [tokens, values].
        positions: The position of each token in its sequence.
        sequences: For each token, the ids of the llama.cpp sequences that it belongs to.
    """

    kind: _Kind
    tokens: Sequence[int]
    inputs: NDArray[np.float32]
    positions: Sequence[int]
    sequences: Sequence[Sequence[int]]

    @classmethod
    def chain(
        cls,
        kind: _Kind,
        tokens: Sequence[int],
        inputs: NDArray[np.float32],
        start: int,
    ) -> HeadPass:
        """Return a pass over consecutive tokens of sequence 0, starting at position `start`."""
        count = len(tokens)
        return cls(kind, tokens, inputs, range(start, start + count), [(0,)] * count)


class HeadRows(NamedTuple):
    """The results of a pass of a head.

    Attributes:
        logits: float32 [tokens, vocabulary size]. Empty unless the pass drafts. The next pass overwrites it.
        states: Hidden states, float32 [tokens, values]. Empty if the pass computes none.
    """

    logits: NDArray[np.float32]
    states: NDArray[np.float32]


_NO_ROWS: NDArray[np.float32] = np.empty((0, 0), np.float32)


class HeadContext(LlamaContext):
    """A context that runs a head. Concurrent replies share it (see `SharedHeadContext`)."""

    @abstractmethod
    def compute(self, head_pass: HeadPass) -> HeadRows:
        """Run a pass of a head. See `LlamaContext.run` for the errors."""


class _PairBatch(Batch):
    """A batch of tokens, each with a hidden state."""

    def __init__(self, size: int, sequences: int, state_size: int) -> None:
        super().__init__(size, sequences)
        self.states: NDArray[np.float32] = np.zeros((size, state_size), np.float32)
        self.native.embd = self.states.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    def free(self) -> None:
        # Clear the pointer into NumPy's memory, which llama.cpp would otherwise free.
        self.native.embd = None
        super().free()


class PairContext(HeadContext):
    """A context that runs a head on pairs of a token and the preceding hidden state.

    Args:
        weights: The head's llama_model handle.
        target: The context of the target, if the head borrows its token embeddings.
        mtp: Whether to run only the multi-token prediction layers of `weights`. The weights must have been
            loaded with these layers. Otherwise, llama.cpp aborts.
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
        """Select the MTP layer, counted from 0, that later passes run."""
        api = nextn_api()
        assert api is not None
        api.select_layer(self._context, layer)

    def compute(self, head_pass: HeadPass) -> HeadRows:
        kind, tokens, inputs, positions, sequences = head_pass
        # Request logits for all tokens or none. If only some are requested, llama.cpp returns the hidden
        # states of the wrong tokens (the first ones) for many heads.
        self._pairs.put(tokens, positions, sequences, kind == "draft")
        self._pairs.states[: len(tokens)] = inputs
        self._decode(self._pairs)
        if kind == "prefill":
            return HeadRows(_NO_ROWS, _NO_ROWS)
        return HeadRows(self._last_logits(len(tokens)), self._last_states(len(tokens)))

    def _last_states(self, count: int) -> NDArray[np.float32]:
        """Return the head's own hidden states after the `count` tokens of the last pass."""
        api = nextn_api()
        assert api is not None
        return copied_rows(api.address(self._context), count, self._state_size)

    def close(self) -> None:
        super().close()
        self._pairs.free()


class EagleContext(PairContext):
    """A context that runs an EAGLE-3 head.

    The head's encoder first combines the inputs of the tapped target layers into one hidden state per token.
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

    def compute(self, head_pass: HeadPass) -> HeadRows:
        if head_pass.kind != "encode":
            return super().compute(head_pass)
        self._features.put(head_pass.inputs, head_pass.positions, head_pass.sequences, logits=True)
        self._decode(self._features, encode=True)
        return HeadRows(_NO_ROWS, self._last_states(len(head_pass.inputs)))

    def close(self) -> None:
        super().close()
        self._features.free()
