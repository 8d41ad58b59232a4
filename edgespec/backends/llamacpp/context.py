"""A typed wrapper around a llama_context: passes, sequences of its KV cache, and copies of its cells."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
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

__all__ = ["MAX_WIDTH", "ContextPlan", "LlamaContext"]

# The option's values and llama.cpp's enum (LLAMA_FLASH_ATTN_TYPE_*).
_FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
# Results of llama_decode: no free KV cells, stopped by the abort callback, allocation failed.
_NO_SLOT, _ABORTED, _NO_MEMORY = 1, 2, -2
_BYTES = ctypes.POINTER(ctypes.c_uint8)
# The default limit of the rows of a pass that have logits. Chosen: far above any draft that saves time, and
# it bounds the logits buffer.
MAX_WIDTH = 256


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """The size and layout of a context's memory.

    Attributes:
        tokens: The number of KV cells.
        kv_types: The types of keys and values.
        sequences: The maximum number of sequences.
        recurrent: Whether some or all layers have a recurrent state instead of keys and values.
        undo_tokens: The number of recurrent states kept of a pass, for rollback without replay.
        kv_bytes: The size of cells and states together.
        token_bytes: The size of one cell in all layers.
        rows: The maximum number of rows with logits per pass.
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
        """Return the plan of the same context with another number of cells."""
        added_bytes = (tokens - self.tokens) * self.token_bytes
        return replace(self, tokens=tokens, kv_bytes=self.kv_bytes + added_bytes)


class LlamaContext:
    """A llama_context with a unified KV cache, used by one thread.

    Sequence 0 holds the committed tokens. The last sequence is scratch space for copies of cells; branches
    or checkpoints use the ones between. A failed `allocate` leaves the context without memory, see `is_lost`.

    Args:
        model: The llama_model.
        options: The batch size and attention kernels to use.
        plan: The size and layout of the memory.
        threads: The number of CPU threads.
        hook: Receives tensors of every pass.
        takes_hidden: Whether passes may take hidden states instead of tokens.

    Raises:
        MemoryBudgetError: The memory cannot be allocated.
        OptionError: `options` or `plan` hold an unsupported combination.
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
        self._scratch = plan.sequences - 1
        # Sequences other than 0 that may hold cells.
        self._others: set[int] = set()
        params.n_outputs_max = min(plan.rows, options.batch_tokens)
        params.n_threads = params.n_threads_batch = self.threads = threads
        params.type_k, params.type_v = plan.kv_types.ggml_types
        if options.flash_attention not in _FLASH_ATTENTION:
            raise OptionError(
                f"flash_attention is {options.flash_attention!r}",
                f"choose one of {', '.join(_FLASH_ATTENTION)}",
            )
        params.flash_attn_type = _FLASH_ATTENTION[options.flash_attention]
        # Cells that left a sliding window are overwritten otherwise, and rollback would need them again.
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
        # The sliding window of some layers in tokens, or 0 if all layers attend to everything.
        self.window: int = lib.llama_model_n_swa(model)
        # llama.cpp keeps no recurrent states for some architectures, whatever the plan asks for.
        self.undo_tokens: int = lib.llama_n_rs_seq(self._context)
        self._batch = Batch(options.batch_tokens, plan.sequences)
        self._hidden = (
            Batch(options.batch_tokens, plan.sequences, lib.llama_model_n_embd(model))
            if takes_hidden
            else None
        )

    def allocate(self, plan: ContextPlan) -> None:
        """Replace the memory by an empty one of the size of `plan`.

        The old memory is freed first, so that both never exist together. After an error the context has no
        memory (`is_lost`) until a later call succeeds.

        Args:
            plan: The plan given to the constructor, possibly with another number of tokens.

        Raises:
            MemoryBudgetError: The memory cannot be allocated.
            OptionError: The KV types need flash attention, which is off.
        """
        self._free()
        # Copies made for the old size would only waste memory.
        self._copies = BufferPool()
        recent_errors(clear=True)
        self._params.n_ctx = plan.tokens
        self._context = self._lib.llama_init_from_model(self._model, self._params)
        if not self._context:
            detail = (recent_errors() or ["no reason was given"])[-1]
            if "requires flash_attn" in detail:
                raise OptionError(
                    f"kv_type {plan.kv_types.text!r} needs flash attention",
                    "use --flash-attention auto, or --kv-type f16",
                )
            raise MemoryBudgetError(
                f"a context of {plan.tokens:,} tokens cannot be allocated: {detail}",
                "use a smaller --context or another --kv-type",
            )
        self._memory = self._lib.llama_get_memory(self._context)
        self.interrupt.attach(self._context)
        self.batch_tokens: int = self._lib.llama_n_batch(self._context)
        self.plan, self.tokens = plan, int(self._lib.llama_n_ctx(self._context))

    def _free(self) -> None:
        context, self._context, self._memory = self._context, None, None
        self._others.clear()
        self.tokens = 0
        # The logits are a view of memory that is freed here.
        self._logits = np.empty((0, self._vocab_size), np.float32)
        self._logits_address = 0
        if context:
            self._lib.llama_free(context)

    @property
    def is_lost(self) -> bool:
        """Whether the context has no memory because the last `allocate` failed."""
        return not self._context

    def _check_allocated(self) -> None:
        if self.is_lost:
            raise ContextFullError(
                "the context lost its memory because the system had none left",
                "close other programs and send the message again",
            )

    @property
    def has_memory(self) -> bool:
        """Whether the model has a KV cache or recurrent state. Models without one cannot generate."""
        return bool(self._memory)

    def append(self, inputs: Inputs, position: int) -> None:
        """Run tokens or hidden states in sequence 0 from `position` on, without computing logits."""
        batch = self._batch_for(inputs)
        batch.put_consecutive(inputs, position)
        self._decode(batch)

    def run(
        self, inputs: Inputs, positions: Sequence[int], sequences: Sequence[Sequence[int]]
    ) -> NDArray[np.float32]:
        """Run one pass and return its logits.

        Args:
            inputs: Tokens or hidden states, at most `max_width` rows.
            positions: The position of each row.
            sequences: The sequences that each row belongs to.

        Returns:
            Logits, float32 [rows, vocab]: a view that the next pass overwrites.

        Raises:
            CancelledError: `interrupt` was requested.
            ContextFullError: There are not enough free cells.
            OutOfMemoryError: A buffer of the pass cannot be allocated.
            BackendError: llama.cpp failed otherwise.
        """
        batch = self._batch_for(inputs)
        batch.put(inputs, positions, sequences, logits=True)
        self._decode(batch)
        pointer = self._lib.llama_get_logits(self._context)
        address = ctypes.cast(pointer, ctypes.c_void_p).value
        if not address:
            raise BackendError("the model computed no logits", "choose a model that generates text")
        if address != self._logits_address:
            self._logits_address = address
            self._logits = np.ctypeslib.as_array(pointer, (self.max_width, self._vocab_size))
        return self._logits[: len(inputs)]

    def run_to_hook(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[Sequence[int]]
    ) -> None:
        """Run a pass of at most `max_width` tokens that ends at the tensor the hook reads."""
        assert self._hook is not None
        # llama.cpp drops rows without logits before the end of the last layer, where the hook reads.
        self._batch.put(tokens, positions, sequences, logits=True)
        self._hook.stop_after = True
        try:
            self._decode(self._batch)
        finally:
            self._hook.stop_after = False

    def _batch_for(self, inputs: Inputs) -> Batch:
        if not isinstance(inputs, np.ndarray):
            return self._batch
        assert self._hidden is not None
        return self._hidden

    def _decode(self, batch: Batch) -> None:
        if self.interrupt.requested:
            raise CancelledError("cancelled")
        self._check_allocated()
        count = batch.native.n_tokens
        recent_errors(clear=True)
        status = self._lib.llama_decode(self._context, batch.native)
        if status == 0:
            return
        if status == _ABORTED or self.interrupt.requested:
            raise CancelledError("cancelled")
        if status == _NO_SLOT:
            raise ContextFullError(f"the context of {self.tokens:,} tokens is full", "use a larger --context")
        if status == _NO_MEMORY:
            raise OutOfMemoryError(
                f"the buffers of a pass of {count} tokens cannot be allocated",
                "close other programs, or use a smaller --context",
            )
        detail = (recent_errors() or ["no reason was given"])[-1]
        raise BackendError(
            f"llama.cpp failed on {count} tokens (status {status}): {detail}",
            "free some memory or use a smaller --context",
        )

    def copy(self, source: int, sequence: int, start: int = -1, end: int = -1) -> None:
        """Let `sequence` share the cells of `source` at positions [start, end), by default all.

        A recurrent state is always shared whole. llama.cpp copies it when a pass would overwrite it.
        """
        self._others.add(sequence)
        self._lib.llama_memory_seq_cp(self._memory, source, sequence, start, end)

    def drop(self, sequence: int, start: int, end: int = -1) -> bool:
        """Remove positions [start, end) from a sequence, by default to its end.

        Returns:
            Whether the memory supports this; a recurrent state cannot be cut at every position.
        """
        dropped = bool(self._lib.llama_memory_seq_rm(self._memory, sequence, start, end))
        if (start, end) == (0, -1):
            self._others.discard(sequence)
        return dropped

    def drop_others(self) -> None:
        """Remove all sequences but 0, including what an error or an interrupt left behind."""
        for sequence in self._others - {0}:
            self.drop(sequence, 0)

    @property
    def can_shift(self) -> bool:
        """Whether llama.cpp can move cached keys to other positions."""
        return bool(self._lib.llama_memory_can_shift(self._memory))

    def remove_range(self, start: int, end: int) -> None:
        """Remove positions [start, end) from sequence 0 and shift later ones down at the next pass."""
        self._lib.llama_memory_seq_rm(self._memory, 0, start, end)
        self._lib.llama_memory_seq_add(self._memory, 0, end, -1, start - end)

    def clear(self) -> None:
        """Remove the cells of all sequences."""
        self._lib.llama_memory_clear(self._memory, False)

    def compact_branch(self, source: int, start: int, end: int) -> None:
        """Move positions [start, end) of `source` to sequence 0 and remove everything else after `start`.

        The cells become contiguous. Attention sums cells in memory order, so a later token that filled a
        gap would change that order and with it the rounding.
        """
        parts = self.export_cells(source, start, end)
        for sequence in range(self._scratch + 1):
            self.drop(sequence, 0 if sequence else start)
        if not self.import_cells(parts, start, end):
            raise BackendError(
                f"the KV cells of {end - start} accepted tokens cannot be moved",
                "load the model without --draft-branches",
            )

    def export_cells(self, source: int, start: int, end: int) -> list[memoryview]:
        """Return the cells of `source` at positions [start, end), in parts for `import_cells`.

        A part is no longer than the sliding window: llama.cpp omits cells outside the window of a sequence's
        last token, but a later rollback needs them.
        """
        parts = []
        self.drop(self._scratch, 0)  # an interrupt may have left cells there
        for begin, stop in self._parts(start, end):
            self.copy(source, self._scratch, begin, stop)
            parts.append(self.export_sequence(self._scratch))
            self.drop(self._scratch, 0)
        return parts

    def import_cells(self, parts: Sequence[bytes | memoryview], start: int, end: int) -> bool:
        """Append exported cells to sequence 0 at positions [start, end).

        Returns:
            False if the parts do not match this model and context.
        """
        ranges = self._parts(start, end)
        if len(parts) != len(ranges):
            return False
        for part, (begin, stop) in zip(parts, ranges, strict=True):
            if not self.import_sequence(part, self._scratch):
                return False
            self.copy(self._scratch, 0, begin, stop)
            self.drop(self._scratch, 0)
        return True

    def _parts(self, start: int, end: int) -> list[tuple[int, int]]:
        """Split [start, end) at multiples of the sliding window."""
        window = self.window or max(1, end)
        cuts = [start, *range((start // window + 1) * window, end, window), end]
        return list(pairwise(cuts)) if start < end else []

    def apply_rollback(self) -> None:
        """Make the recurrent state selected by `drop` the current one of sequence 0.

        llama.cpp defers this to the next pass; checkpoints and copies of the context need it before.
        """
        if not self.import_sequence(self.export_sequence(recurrent_only=True), recurrent_only=True):
            raise BackendError("the recurrent state cannot be rolled back", "load the model again")

    def state_bytes(self, *, recurrent_only: bool = False) -> int:
        """Return the size of sequence 0 as exported by `export_sequence`."""
        return int(self._lib.llama_state_seq_get_size_ext(self._context, 0, self._flags(recurrent_only)))

    def export_sequence(self, sequence: int = 0, *, recurrent_only: bool = False) -> memoryview:
        """Return a copy of what the next token of a sequence attends to, valid while it is referenced."""
        self._check_allocated()
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
        """Load exported memory into an empty sequence.

        Returns:
            False if `data` does not match this model and context.
        """
        self._check_allocated()
        self._others.add(sequence)
        exported = np.frombuffer(data, np.uint8)
        return bool(
            self._lib.llama_state_seq_set_data_ext(
                self._context,
                exported.ctypes.data_as(_BYTES),
                exported.size,
                sequence,
                self._flags(recurrent_only),
            )
        )

    def _flags(self, recurrent_only: bool) -> int:
        return int(self._lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) if recurrent_only else 0

    def close(self) -> None:
        """Free the native context and its batches."""
        self._free()
        self._batch.free()
        if self._hidden is not None:
            self._hidden.free()
