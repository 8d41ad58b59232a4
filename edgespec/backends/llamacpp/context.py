"""A llama_context in typed form: one batch, one memory, passes of tokens with sequence ids."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LoadOptions
from edgespec.backends.llamacpp.batch import Batch, Inputs
from edgespec.backends.llamacpp.buffer_pool import BufferPool
from edgespec.backends.llamacpp.hidden_state_hook import HiddenStateHook
from edgespec.backends.llamacpp.kv_types import KvTypes
from edgespec.backends.llamacpp.native import Interrupt, library, recent_errors
from edgespec.errors import (
    BackendError,
    CancelledError,
    ContextFullError,
    MemoryBudgetError,
    OptionError,
    OutOfMemoryError,
)
from edgespec.heap import large_buffers_apart

__all__ = ["MAX_WIDTH", "ContextPlan", "LlamaContext"]

FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}

_NO_SLOT, _ABORTED, _NO_MEMORY = 1, 2, -2
_BYTES = ctypes.POINTER(ctypes.c_uint8)
MAX_WIDTH = 256


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """What a context is made of.

    sequences: how many it can hold. recurrent: all or some layers remember by a state. undo_tokens: so
    many earlier states the library keeps of a pass. kv_bytes: what all of that takes. token_bytes: what it
    takes for each token. rows: the most of a pass whose logits are wanted.
    """

    tokens: int
    kv_types: KvTypes
    sequences: int
    recurrent: bool = False
    undo_tokens: int = 0
    kv_bytes: int = 0
    token_bytes: int = 0
    rows: int = MAX_WIDTH

    def with_tokens(self, tokens: int) -> ContextPlan:
        """The same for so many tokens."""
        more = (tokens - self.tokens) * self.token_bytes
        return replace(self, tokens=tokens, kv_bytes=self.kv_bytes + more)


class LlamaContext:
    """One context with a unified KV memory.

    hook: reads tensors out of its passes. takes_hidden: its passes may be given hidden states in
    place of tokens.
    """

    def __init__(
        self,
        model: Any,
        options: LoadOptions,
        plan: ContextPlan,
        threads: int,
        *,
        hook: HiddenStateHook | None = None,
        takes_hidden: bool = False,
    ) -> None:
        lib = self._lib = library()
        self.interrupt = Interrupt()
        params = self._params = lib.llama_context_default_params()
        params.n_batch = params.n_ubatch = options.batch_tokens
        params.n_seq_max = plan.sequences
        params.n_rs_seq = plan.undo_tokens
        self._spare = plan.sequences - 1
        # Sequences beside 0 that may hold something.
        self._others: set[int] = set()
        params.n_outputs_max = min(plan.rows, options.batch_tokens)
        params.n_threads = params.n_threads_batch = self.threads = threads
        params.type_k, params.type_v = plan.kv_types.numbers
        params.flash_attn_type = _choice("flash_attention", options.flash_attention, FLASH_ATTENTION)
        # A window that was thrown away cannot be rolled back into: keep it whole.
        params.swa_full = True
        params.kv_unified = True
        params.no_perf = True
        self._hook = hook
        if hook is not None:
            params.cb_eval = hook.callback
        self._model = model
        self._vocab_size: int = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self._context: Any = None
        self.allocate(plan)
        self.max_width: int = params.n_outputs_max
        # How many tokens some layers look back; 0 where all look at everything.
        self.window: int = lib.llama_model_n_swa(model)
        # How many earlier states of a pass are kept: none where the library cannot.
        self.undo_tokens: int = lib.llama_n_rs_seq(self._context)
        self._batch = Batch(options.batch_tokens, plan.sequences)
        self._hidden = (
            Batch(options.batch_tokens, plan.sequences, lib.llama_model_n_embd(model))
            if takes_hidden
            else None
        )

    def allocate(self, plan: ContextPlan) -> None:
        """Make the memory, empty; the one before it, if there is one, is freed first.

        plan: as at first, but for the size. Raises MemoryBudgetError, and OptionError for types that cannot
        be; there is no memory then, and room for no token, until one can be made.
        """
        self._free()
        # Copies of cells: those of another size are large, and not needed again.
        self._copies = BufferPool()
        recent_errors(clear=True)
        self._params.n_ctx = plan.tokens
        with large_buffers_apart():
            self._context = self._lib.llama_init_from_model(self._model, self._params)
        if not self._context:
            detail = (recent_errors() or ["no reason was given"])[-1]
            if "requires flash_attn" in detail:
                raise OptionError(
                    f"kv_type {plan.kv_types.text!r} needs flash attention",
                    "use --flash-attention auto, or --kv-type f16",
                )
            raise MemoryBudgetError(
                f"a context of {plan.tokens} tokens could not be made: {detail}",
                "use a smaller --context or another --kv-type",
            )
        # How wide the widest pass was, without logits and with them.
        self._widest = {False: 0, True: 0}
        self._memory = self._lib.llama_get_memory(self._context)
        self.interrupt.attach(self._context)
        self.batch_tokens: int = self._lib.llama_n_batch(self._context)
        self.plan, self.tokens = plan, int(self._lib.llama_n_ctx(self._context))

    def _free(self) -> None:
        former, self._context, self._memory = self._context, None, None
        self._others.clear()
        self.tokens = 0
        # What they are a view of is gone as well.
        self._logits = np.empty((0, self._vocab_size), np.float32)
        self._logits_address = 0
        if former:
            self._lib.llama_free(former)

    @property
    def is_lost(self) -> bool:
        """Whether there is no memory, for none could be made."""
        return not self._context

    def _check_there(self) -> None:
        if self.is_lost:
            raise ContextFullError("there was no memory for the context", "close other programs and go on")

    @property
    def has_memory(self) -> bool:
        """False for models without a memory of past tokens, which cannot generate."""
        return bool(self._memory)

    def append(self, inputs: Inputs, position: int) -> None:
        """Run tokens, or hidden states, from `position` on in sequence 0, without logits."""
        batch = self._batch_of(inputs)
        batch.append(inputs, position)
        self._decode(batch, logits=False)

    def run(
        self, inputs: Inputs, positions: Sequence[int], sequences: Sequence[Sequence[int]]
    ) -> NDArray[np.float32]:
        """Run tokens, or hidden states, each part of some sequences.

        Returns logits float32 [n, vocab], a view until the next pass.
        """
        batch = self._batch_of(inputs)
        batch.put(inputs, positions, sequences, logits=True)
        self._decode(batch, logits=True)
        pointer = self._lib.llama_get_logits(self._context)
        address = ctypes.cast(pointer, ctypes.c_void_p).value
        if not address:
            raise BackendError("the model gave no logits", "this kind of model cannot generate text")
        if address != self._logits_address:
            self._logits_address = address
            self._logits = np.ctypeslib.as_array(pointer, (self.max_width, self._vocab_size))
        return self._logits[: len(inputs)]

    def run_to_hook(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[Sequence[int]]
    ) -> None:
        """Run tokens, at most `max_width`, up to what the hook reads and no further."""
        assert self._hook is not None
        # A row whose logits are not wanted is dropped before the end of the last layer.
        self._batch.put(tokens, positions, sequences, logits=True)
        self._hook.last = True
        try:
            self._decode(self._batch, logits=True)
        finally:
            self._hook.last = False

    def _batch_of(self, inputs: Inputs) -> Batch:
        if not isinstance(inputs, np.ndarray):
            return self._batch
        assert self._hidden is not None
        return self._hidden

    def _decode(self, batch: Batch, *, logits: bool) -> None:
        if self.interrupt.requested:
            raise CancelledError("cancelled")
        self._check_there()
        count = batch.native.n_tokens
        recent_errors(clear=True)
        # What the library makes for a wider pass than any before, it keeps.
        wider = count > self._widest[logits]
        with large_buffers_apart() if wider else nullcontext():
            status = self._lib.llama_decode(self._context, batch.native)
        if status == 0:
            if wider:
                self._widest[logits] = count
            return
        if status == _ABORTED or self.interrupt.requested:
            raise CancelledError("cancelled")
        if status == _NO_SLOT:
            raise ContextFullError(f"the context of {self.tokens} tokens is full", "use a larger --context")
        if status == _NO_MEMORY:
            raise OutOfMemoryError(
                f"there was no memory for a pass of {count} tokens",
                "close other programs, or use a smaller --context",
            )
        detail = (recent_errors() or ["no reason was given"])[-1]
        raise BackendError(
            f"llama.cpp failed on {count} tokens (status {status}): {detail}",
            "free some memory or use a smaller --context",
        )

    def copy(self, source: int, sequence: int, start: int = -1, end: int = -1) -> None:
        """Let a sequence share the source's cells of positions [start, end), or all.

        A recurrent state is shared too, always whole, until the pass that would overwrite it.
        """
        self._others.add(sequence)
        self._lib.llama_memory_seq_cp(self._memory, source, sequence, start, end)

    def drop(self, sequence: int, start: int, end: int = -1) -> bool:
        """Take positions [start, end), or all from `start` on, out of a sequence; False when it cannot."""
        dropped = bool(self._lib.llama_memory_seq_rm(self._memory, sequence, start, end))
        if (start, end) == (0, -1):
            self._others.discard(sequence)
        return dropped

    def drop_others(self) -> None:
        """Leave nothing but sequence 0, whatever an error or an interrupt has left of others."""
        for sequence in self._others - {0}:
            self.drop(sequence, 0)

    @property
    def can_shift(self) -> bool:
        """Whether cached keys can be turned to other positions."""
        return bool(self._lib.llama_memory_can_shift(self._memory))

    def remove_range(self, start: int, end: int) -> None:
        """Take positions [start, end) out of sequence 0; those after them move down at the next pass."""
        self._lib.llama_memory_seq_rm(self._memory, 0, start, end)
        self._lib.llama_memory_seq_add(self._memory, 0, end, -1, start - end)

    def clear(self) -> None:
        """Empty the memory, of all sequences."""
        self._lib.llama_memory_clear(self._memory, False)

    def compact_branch(self, source: int, start: int, end: int) -> None:
        """Make positions [start, end) of `source` the end of sequence 0, in cells next to one another.

        Everything else after `start` is dropped. Attention adds up cells in the order they lie in memory;
        a later token that filled a hole between them would change that order, and with it the rounding.
        """
        parts = self.export_cells(source, start, end)
        for sequence in range(self._spare + 1):
            self.drop(sequence, 0 if sequence else start)
        if not self.import_cells(parts, start, end):
            raise BackendError(
                f"the cache of {end - start} tokens could not be moved", "leave --draft-branches out"
            )

    def export_cells(self, source: int, start: int, end: int) -> list[memoryview]:
        """The cells of positions [start, end) of a sequence, for `import_cells`.

        In parts no wider than a sliding window: the library leaves out what the last token of a sequence
        no longer looks at, and that is needed again when the sequence is cut back.
        """
        parts = []
        # An interrupt may have left something there.
        self.drop(self._spare, 0)
        for begin, stop in self._stretches(start, end):
            self.copy(source, self._spare, begin, stop)
            parts.append(self.export_sequence(self._spare))
            self.drop(self._spare, 0)
        return parts

    def import_cells(self, parts: Sequence[bytes | memoryview], start: int, end: int) -> bool:
        """Append to sequence 0 cells from `export_cells`; False when they do not fit."""
        stretches = self._stretches(start, end)
        if len(parts) != len(stretches):
            return False
        for part, (begin, stop) in zip(parts, stretches, strict=True):
            if not self.import_sequence(part, self._spare):
                return False
            self.copy(self._spare, 0, begin, stop)
            self.drop(self._spare, 0)
        return True

    def _stretches(self, start: int, end: int) -> list[tuple[int, int]]:
        """[start, end), cut at the multiples of the window."""
        window = self.window or max(1, end)
        cuts = [start, *range((start // window + 1) * window, end, window), end]
        return list(pairwise(cuts)) if start < end else []

    def apply_rollback(self) -> None:
        """Make the earlier state that a drop chose the state of sequence 0: until a pass it is but chosen."""
        if not self.import_sequence(self.export_sequence(recurrent_only=True), recurrent_only=True):
            raise BackendError("the recurrent state could not be moved", "load the model again")

    def state_bytes(self, *, recurrent_only: bool = False) -> int:
        """How many bytes `state` of sequence 0 has."""
        return int(self._lib.llama_state_seq_get_size_ext(self._context, 0, self._flags(recurrent_only)))

    def export_sequence(self, sequence: int = 0, *, recurrent_only: bool = False) -> memoryview:
        """The memory of a sequence as bytes: what its next token looks at."""
        self._check_there()
        flags = self._flags(recurrent_only)
        size = self._lib.llama_state_seq_get_size_ext(self._context, sequence, flags)
        copy = self._copies.take(size)
        written = self._lib.llama_state_seq_get_data_ext(
            self._context, copy.ctypes.data_as(_BYTES), size, sequence, flags
        )
        return copy.data[:written]

    def import_sequence(
        self, data: bytes | memoryview, sequence: int = 0, *, recurrent_only: bool = False
    ) -> bool:
        """Put saved memory into an empty sequence; False when it does not fit this model and context."""
        self._check_there()
        self._others.add(sequence)
        given = np.frombuffer(data, np.uint8)
        return bool(
            self._lib.llama_state_seq_set_data_ext(
                self._context,
                given.ctypes.data_as(_BYTES),
                given.size,
                sequence,
                self._flags(recurrent_only),
            )
        )

    def _flags(self, recurrent_only: bool) -> int:
        return int(self._lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) if recurrent_only else 0

    def close(self) -> None:
        """Free context and batch."""
        self._free()
        self._batch.free()
        if self._hidden is not None:
            self._hidden.free()


def _choice(name: str, value: str, known: dict[str, int]) -> int:
    if value not in known:
        raise OptionError(f"{name} is {value!r}", f"choose one of {', '.join(known)}")
    return known[value]
