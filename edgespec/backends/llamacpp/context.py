"""A typed wrapper around llama_context that allocates it and runs forward passes.

A context can also apply LoRA adapters that were loaded for its model.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import psutil
from numpy.typing import NDArray

from edgespec.backends.llamacpp.context_plan import MAX_WIDTH, ContextPlan, KvTypes
from edgespec.backends.llamacpp.first_layers import FirstLayers
from edgespec.backends.llamacpp.kv_sequences import KvSequences
from edgespec.backends.llamacpp.metadata import sliding_window, vocabulary_size
from edgespec.backends.llamacpp.native import (
    Interrupt,
    ggml,
    library,
    recent_errors,
    take_lost_interrupt,
    use_threads,
)
from edgespec.backends.llamacpp.state_taps import HiddenStateHook, StateTaps
from edgespec.backends.llamacpp.weight_stream import WeightStream
from edgespec.errors import (
    BackendError,
    CancelledError,
    ContextFullError,
    MemoryBudgetError,
    ModelFileError,
    OptionError,
    OutOfMemoryError,
)
from edgespec.model.base import LoadOptions
from edgespec.model.model_facts import Adapter
from edgespec.system.cores import CPU_LOAD

__all__ = ["Batch", "Inputs", "LlamaContext", "LoraAdapters", "ThreadCount", "adapter_bytes"]

# Maps values of `LoadOptions.flash_attention` to llama.cpp's LLAMA_FLASH_ATTN_TYPE_* constants.
_FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
# Status codes of `llama_decode`: no free KV cells, aborted by the callback, and out of memory.
_NO_SLOT, _ABORTED, _NO_MEMORY = 1, 2, -2
# Give up a core if other programs keep it busy for more than this fraction of the time. A pass waits for its
# slowest thread, so a thread that has to share its core slows down all the others.
_GIVE_UP_SHARE = 0.4
# Take a core back when other programs keep it busy for less than this fraction of the time.
_TAKE_BACK_SHARE = 0.3
# The input of a forward pass: token ids, or hidden states as a float32 array [tokens, embedding size].
Inputs: TypeAlias = Sequence[int] | NDArray[np.float32]


class Batch:
    """A reusable llama_batch that is allocated once and filled through NumPy views.

    Writing through the views avoids a ctypes call per token. The owner must call `free` when done.
    """

    def __init__(self, size: int, sequences: int, embd_size: int = 0) -> None:
        self._lib = library()
        self.native: Any = self._lib.llama_batch_init(size, embd_size, sequences)
        batch = self.native
        self._inputs = (
            np.ctypeslib.as_array(batch.embd, (size * embd_size,)).reshape(size, embd_size)
            if embd_size
            else np.ctypeslib.as_array(batch.token, (size,))
        )
        self._position = np.ctypeslib.as_array(batch.pos, (size,))
        self._sequence_count = np.ctypeslib.as_array(batch.n_seq_id, (size,))
        self._needs_logits = np.ctypeslib.as_array(batch.logits, (size,))
        self._sequences = [batch.seq_id[i] for i in range(size)]

    def put(
        self,
        inputs: Inputs,
        positions: Sequence[int],
        sequences: Sequence[Sequence[int]],
        logits: bool | Sequence[bool],
    ) -> None:
        """Replace the batch's contents.

        `logits` says which inputs need logits: one flag for all of them, or one flag per input.
        """
        count = self.native.n_tokens = len(inputs)
        self._inputs[:count] = inputs
        self._position[:count] = positions
        self._needs_logits[:count] = logits
        for i, ids in enumerate(sequences):
            self._sequence_count[i] = len(ids)
            for j, sequence in enumerate(ids):
                self._sequences[i][j] = sequence

    def free(self) -> None:
        """Free the native llama_batch."""
        self._lib.llama_batch_free(self.native)


class ImageBatch:
    """A llama_batch for part of an image. See `LlamaContext.append_image`."""

    def __init__(self, rows: NDArray[np.float32], positions: NDArray[np.int32], sequence: int) -> None:
        count, lib = len(rows), library()
        # Keep these arrays alive, because the batch points into them.
        self._rows, self._positions = np.ascontiguousarray(rows), np.ascontiguousarray(positions)
        self._sequence = (lib.llama_seq_id * 1)(sequence)
        self._sequences = (ctypes.POINTER(lib.llama_seq_id) * count)(*[self._sequence] * count)
        self._counts, self._logits = np.ones(count, np.int32), np.zeros(count, np.int8)
        self.native: Any = lib.llama_batch(
            n_tokens=count,
            embd=self._rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
            pos=self._positions.ctypes.data_as(ctypes.POINTER(lib.llama_pos)),
            n_seq_id=self._counts.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=self._sequences,
            logits=self._logits.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )


class ThreadCount:
    """The number of CPU threads for one context, reduced while other programs keep the CPU busy.

    Args:
        most: Maximum number of threads, used on an idle machine.
        cores: Number of logical cores in the machine.
        busy_cores: Returns the number of cores in use by other programs.

    Attributes:
        current: The current number of threads, from 1 to `most`.
        is_fixed: Whether the number stays at `most`.
    """

    def __init__(
        self,
        most: int,
        cores: int | None = None,
        busy_cores: Callable[[], float] = CPU_LOAD.busy_cores,
    ) -> None:
        self.most = self.current = most
        self.is_fixed = False
        self._cores = cores or psutil.cpu_count() or most
        self._busy_cores = busy_cores

    def update(self) -> int:
        """Adapt the number of threads to the machine's load, and return it."""
        if self.is_fixed:
            self.current = self.most
        elif self.most > 1:
            busy = self._busy_cores()
            fewer = self._free_cores(busy, _GIVE_UP_SHARE)
            more = self._free_cores(busy, _TAKE_BACK_SHARE)
            self.current = min(max(self.current, more), fewer)
        return self.current

    def _free_cores(self, busy_cores: float, share: float) -> int:
        return max(1, min(self.most, self._cores - max(0, ceil(busy_cores - share))))


class LlamaContext(KvSequences):
    """A llama_context with a unified KV cache. Not thread-safe, except for `interrupt`.

    Uses `threads` CPU threads on an idle machine, and fewer while other programs need the cores, unless the
    user set a fixed number.

    KV cache operations that need no forward pass are in `KvSequences`. If `allocate` fails, the context has
    no KV cache (see `is_lost`).

    The contexts in `kv_readers` read this context's KV cells through a pointer that llama.cpp keeps. They are
    therefore freed before this context and reallocated after it, while its cells are empty.

    If the model is larger than memory, `stream` reads the weights that are not kept in memory.

    The context of an EAGLE head borrows the token embeddings of `target`, so it must be reallocated whenever
    the target's context is. If `mtp` is set, the context runs only the model's multi-token prediction layers,
    and its KV cache covers only those layers.

    Raises:
        MemoryBudgetError: The context cannot be allocated.
        OptionError: The KV types require flash attention, which is off.
    """

    # Number of tokens of other replies in the last pass. See `ContextSlot`.
    other_tokens = 0

    def __init__(
        self,
        model: Any,
        options: LoadOptions,
        plan: ContextPlan,
        threads: int,
        *,
        hook: HiddenStateHook | None = None,
        takes_hidden: bool = False,
        target: LlamaContext | None = None,
        mtp: bool = False,
        adapters: LoraAdapters | None = None,
        stream: WeightStream | None = None,
    ) -> None:
        lib = library()
        window = sliding_window(model) if mtp else lib.llama_model_n_swa(model)
        super().__init__(plan.sequences, window=window)
        self.interrupt = Interrupt()
        params = self._params = lib.llama_context_default_params()
        if mtp:
            params.ctx_type = lib.LLAMA_CONTEXT_TYPE_MTP
        params.n_batch = params.n_ubatch = options.batch_tokens
        params.n_seq_max = plan.sequences
        params.n_rs_seq = plan.undo_tokens
        self.max_width: int = min(plan.rows, options.batch_tokens)
        if threads > 1:
            use_threads()
        self._thread_count = ThreadCount(threads) if options.threads is None else None
        params.n_threads = params.n_threads_batch = self.threads = threads
        params.type_k, params.type_v = plan.kv_types.ggml_types
        params.flash_attn_type = _FLASH_ATTENTION[options.flash_attention]
        # Keep KV cells outside the sliding attention window, because they are needed again after a rollback.
        params.swa_full = True
        params.kv_unified = True
        # Disable llama.cpp's pooling, which cannot handle long texts. `Pooling` is used instead.
        params.pooling_type = lib.LLAMA_POOLING_TYPE_NONE
        params.no_perf = True
        self._model, self._target, self._adapters = model, target, adapters
        self._stream, self._ggml = stream, ggml()
        self._stream_callback = lib.ggml_backend_sched_eval_callback(self._on_streamed_node)
        self._vocab_size = vocabulary_size(model)
        self._taps = StateTaps(model)
        self._hook, self._always_hooked = hook or self._taps.hook, hook is not None
        # Replaces `_hook` while passes stop after the first layers. See `run_first_layers`.
        self._first_layers: FirstLayers | None = None
        self.kv_readers: list[LlamaContext] = []
        # Whether llama.cpp rolls back the recurrent state at the start of the next forward pass.
        self.is_rolling_back = False
        # Number of calls to `allocate`. Head contexts compare it to detect that this context was replaced.
        self._generation = 0
        # Settings that the current llama_context was created with. `is_stale` compares them with the required
        # ones.
        self._is_hooked, self._max_outputs, self._target_generation = False, 0, 0
        self.allocate(plan)
        # Ask llama.cpp how many tokens it can undo, because some architectures ignore the requested number.
        self.undo_tokens: int = lib.llama_n_rs_seq(self._context)
        self._batch = Batch(options.batch_tokens, plan.sequences)
        self._hidden = (
            Batch(options.batch_tokens, plan.sequences, lib.llama_model_n_embd(model))
            if takes_hidden
            else None
        )

    def allocate(self, plan: ContextPlan) -> None:
        """Replace the KV cache with an empty one, sized according to `plan`.

        The old cache is freed first, so the two never take up memory at the same time. If this method fails,
        the context has no KV cache (`is_lost`) until a later call succeeds.

        Raises:
            MemoryBudgetError: The KV cache cannot be allocated.
            OptionError: The KV types require flash attention, which is off.
        """
        self.release()
        recent_errors(clear=True)
        params = self._params
        params.n_ctx = plan.tokens
        self._is_hooked = self._needs_hook
        params.cb_eval = (
            self._stream_callback
            if self._stream
            else self._active_hook.callback
            if self._is_hooked
            else self._lib.ggml_backend_sched_eval_callback()
        )
        self._max_outputs = params.n_outputs_max = self._needed_outputs
        if self._target is not None:
            params.ctx_other, self._target_generation = self._target._context, self._target._generation
        self._generation += 1
        context = self._lib.llama_init_from_model(self._model, params)
        if not context:
            detail = (recent_errors() or ["llama.cpp reported no reason"])[-1]
            # llama.cpp returns no error code, so only its log tells this cause apart.
            if "requires flash_attn" in detail:
                raise OptionError(
                    f"KV cache type {plan.kv_types.text!r} requires flash attention",
                    "use --flash-attention auto or --kv-type f16",
                    option="kv_type",
                    code="option_conflict",
                )
            raise MemoryBudgetError(
                f"a context of {plan.tokens:,} tokens cannot be allocated: {detail}",
                "use a smaller --context or another --kv-type",
                code="out_of_memory",
            )
        self.attach(context)
        self.interrupt.attach(context)
        self.plan, self.tokens = plan, int(self._lib.llama_n_ctx(self._context))
        self._taps.apply(context)
        self.apply_adapters()
        for reader in self.kv_readers:
            # If memory is short, the head is left without a context and cannot draft.
            with suppress(MemoryBudgetError):
                reader.allocate(reader.plan.with_tokens(plan.tokens))

    def _on_streamed_node(self, tensor: int, is_query: bool, _user_data: object) -> bool:
        """Wait for streamed weights, and call the hook. See `HiddenStateHook.on_node`."""
        assert self._stream is not None
        name = self._ggml.ggml_get_name(tensor)
        is_stop = self._stream.is_stop(name)
        hook = self._active_hook
        is_hooked = self._is_hooked and hook.on_node(tensor, True, None)
        if is_query:
            return is_stop or is_hooked
        continues = not is_hooked or hook.on_node(tensor, False, None)
        return (not is_stop or self._stream.on_node(name, tensor)) and continues

    def apply_adapters(self) -> None:
        """Apply the adapters with their current scales, starting with the next pass.

        Raises:
            BackendError: llama.cpp rejected the adapters.
        """
        if self._adapters:
            self._adapters.apply(self._context)

    @property
    def _needs_hook(self) -> bool:
        return self._always_hooked or self._taps.uses_hook or self._first_layers is not None

    @property
    def _active_hook(self) -> HiddenStateHook:
        return self._first_layers or self._hook

    @property
    def runs_first_layers(self) -> bool:
        """Whether passes stop after the first layers. See `run_first_layers`."""
        return self._first_layers is not None

    def run_first_layers(self, count: int) -> None:
        """Reallocate the context so that passes run only the first `count` layers, or all if `count` is 0.

        `run` then returns the hidden states after these layers and their products with the output weights,
        instead of logits. The KV cells of the other layers stay zero, so exported cells can still be
        compared. If this method fails, all layers must be made to run again.

        Raises:
            MemoryBudgetError: The KV cache cannot be allocated.
            BackendError: The first layers of this model cannot run alone.
        """
        self._first_layers = None
        if count:
            size = self._lib.llama_model_n_embd(self._model)
            self._first_layers = FirstLayers(count, size, self._vocab_size, lambda: self.threads)
        self.allocate(self.plan)
        if self._first_layers:
            self._batch.put([0], [0], [(0,)], logits=True)
            self._decode(self._batch)
            self._first_layers.check()
            self._first_layers.stop_after = True
            # Clear the cells of the other layers.
            self.allocate(self.plan)

    def use_attention(self, kv_types: KvTypes, flash_attention: str) -> bool:
        """Reallocate the context with other KV types or another attention setting.

        Returns:
            Whether they changed. If not, the context is not reallocated.

        Raises:
            MemoryBudgetError: The KV cache cannot be allocated.
        """
        params = self._params
        wanted = (*kv_types.ggml_types, _FLASH_ATTENTION[flash_attention])
        if wanted == (params.type_k, params.type_v, params.flash_attn_type):
            return False
        params.type_k, params.type_v, params.flash_attn_type = wanted
        self.allocate(self.plan)
        return True

    @property
    def _needed_outputs(self) -> int:
        """Maximum number of logit rows per pass that llama.cpp must reserve memory for."""
        if not self._taps.needs_all_rows:
            return self.max_width
        return min(max(self.max_width, MAX_WIDTH), int(self._params.n_batch))

    @property
    def batch_tokens(self) -> int:
        """Maximum number of tokens that `append` can run at once."""
        batch_tokens = int(self._params.n_batch)
        return min(batch_tokens, self._max_outputs) if self._taps.needs_all_rows else batch_tokens

    def tap_states(self, states: Sequence[int]) -> None:
        """Choose the hidden states that every pass copies for `tapped_rows`.

        If `is_stale` is True afterwards, the context must be reallocated before the next pass.

        Raises:
            CapabilityError: One of the hidden states does not exist in the model or cannot be read.
        """
        self._taps.set(self._context, states)

    @property
    def needs_all_rows(self) -> bool:
        """Whether hidden states can be copied only for tokens whose logits are requested."""
        return self._taps.needs_all_rows

    def tapped_rows(self, count: int) -> NDArray[np.float32]:
        """Return the hidden states from the last pass, which ran `count` tokens. See `StateTaps.rows`."""
        return self._taps.rows(self._context, count)

    def release(self) -> None:
        """Free the llama_context and its KV cache. Call `allocate` before the next pass."""
        for reader in self.kv_readers:
            reader.release()
        context = self.detach()
        self.tokens = 0
        # Drop the NumPy view of the logits, because `llama_free` frees the underlying memory.
        self._logits = np.empty((0, self._vocab_size), np.float32)
        self._logits_address = 0
        if context:
            # Wait for the last pass, because a GPU may still be running it.
            self._lib.llama_synchronize(context)
            self._lib.llama_free(context)

    @property
    def is_stale(self) -> bool:
        """Whether the context must be reallocated before the next pass, even if its size is unchanged."""
        return (
            self.is_lost
            or (self._needs_hook and not self._is_hooked)
            or self._needed_outputs > self._max_outputs
            or (self._target is not None and self._target._generation != self._target_generation)
        )

    def clear(self) -> None:
        self._lib.llama_memory_clear(self._memory, False)

    def apply_rollback(self) -> None:
        """Complete the rollback of the recurrent state that `drop` requested, if there is one.

        llama.cpp would complete it only in the next forward pass, which is too late for checkpoints and
        copies.
        """
        if not self.is_rolling_back:
            return
        if not self.import_sequence(self.export_sequence(recurrent_only=True), recurrent_only=True):
            raise BackendError("the recurrent state cannot be rolled back", "load the model again")
        self.is_rolling_back = False

    def append(self, inputs: Inputs, position: int) -> None:
        """Append tokens or hidden states to sequence 0, starting at `position`, without computing logits."""
        count, position = len(inputs), self.position(position)
        positions, sequences = range(position, position + count), [(0,)] * count
        if self._taps.needs_all_rows:
            self.run_to_hook(inputs, positions, sequences)
            return
        if self._first_layers:
            self._first_layers.clear()
        batch = self._batch_for(inputs)
        batch.put(inputs, positions, sequences, logits=False)
        self._decode(batch)

    def append_image(
        self,
        rows: NDArray[np.float32],
        positions: NDArray[np.int32],
        sequence: int = 0,
        *,
        is_causal: bool = True,
    ) -> None:
        """Append part of an image to a llama.cpp sequence, without computing logits.

        Args:
            rows: The image embeddings that replace token embeddings, as float32 [tokens, size].
            positions: The position of each token, as int32 [components, tokens].
            sequence: The llama.cpp id of the sequence.
            is_causal: Whether tokens attend only to earlier tokens, rather than to all of `rows`. If False,
                `rows` may contain at most `batch_tokens` tokens.
        """
        if not is_causal:
            self._lib.llama_set_causal_attn(self._context, False)
        try:
            self._decode(ImageBatch(rows, positions, sequence))
        finally:
            if not is_causal:
                self._lib.llama_set_causal_attn(self._context, True)

    def run(
        self,
        inputs: Inputs,
        positions: Sequence[int],
        sequences: Sequence[Sequence[int]],
        needs_logits: Sequence[bool] | None = None,
    ) -> NDArray[np.float32]:
        """Run a forward pass and return the logits of its inputs.

        Args:
            inputs: Tokens or hidden states.
            positions: The index of each input in its sequence.
            sequences: For each input, the ids of the llama.cpp sequences that it belongs to.
            needs_logits: Whether to compute the logits of each input. None means all inputs.

        Returns:
            The logits as a float32 array [inputs that need logits, vocabulary size]. The next forward pass
            overwrites the array.

        Raises:
            CancelledError: `interrupt` stopped the forward pass.
            ContextFullError: There are not enough free KV cells.
            OutOfMemoryError: A buffer for the forward pass cannot be allocated.
            BackendError: llama.cpp failed for any other reason.
        """
        batch = self._batch_for(inputs)
        if self.has_wide_images:
            positions = [self.position(index) for index in positions]
        if self._first_layers:
            self._first_layers.clear()
            batch.put(inputs, positions, sequences, logits=False)
            self._decode(batch)
            rows = self._first_layers.rows(len(inputs))
            return rows if needs_logits is None else rows[np.asarray(needs_logits)]
        batch.put(inputs, positions, sequences, logits=True if needs_logits is None else needs_logits)
        self._decode(batch)
        return self._last_logits(len(inputs) if needs_logits is None else sum(needs_logits))

    def _last_logits(self, count: int) -> NDArray[np.float32]:
        if not count:
            return self._logits[:0]
        pointer = self._lib.llama_get_logits(self._context)
        address = ctypes.cast(pointer, ctypes.c_void_p).value
        if not address:
            raise BackendError("the model computed no logits", "use a text-generation model")
        if address != self._logits_address:
            self._logits_address = address
            self._logits = np.ctypeslib.as_array(pointer, (self._max_outputs, self._vocab_size))
        return self._logits[:count]

    def run_states(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[Sequence[int]]
    ) -> NDArray[np.float32]:
        """Run a forward pass and return the last layer's hidden states, float32 [tokens, size].

        At most `max_width` tokens can be run. Raises the same errors as `run`.
        """
        self._check_allocated()
        self._lib.llama_set_embeddings(self._context, True)
        try:
            self._batch.put(tokens, positions, sequences, logits=True)
            self._decode(self._batch)
            pointer = self._lib.llama_get_embeddings(self._context)
            if not pointer:
                raise BackendError("llama.cpp returned no hidden states", "choose another model")
            size = self._lib.llama_model_n_embd_out(self._model)
            return np.ctypeslib.as_array(pointer, (len(tokens), size)).copy()
        finally:
            self._lib.llama_set_embeddings(self._context, False)

    def run_to_hook(
        self, inputs: Inputs, positions: Sequence[int], sequences: Sequence[Sequence[int]]
    ) -> None:
        """Run a forward pass that stops once the `HiddenStateHook` has copied the hidden states.

        At most `max_width` tokens can be run, or `batch_tokens` if the hidden states were chosen with
        `tap_states`.
        """
        # Request logits for all tokens, because llama.cpp would otherwise skip some hidden states.
        batch = self._batch_for(inputs)
        batch.put(inputs, positions, sequences, logits=True)
        self._hook.clear()
        self._hook.stop_after = True
        try:
            self._decode(batch)
        finally:
            self._hook.stop_after = False

    def _batch_for(self, inputs: Inputs) -> Batch:
        if not isinstance(inputs, np.ndarray):
            return self._batch
        assert self._hidden is not None
        return self._hidden

    def _decode(self, batch: Batch | ImageBatch, *, encode: bool = False) -> None:
        self.is_rolling_back = False
        if self.interrupt.requested:
            raise CancelledError("the model's computation was cancelled")
        self._check_allocated()
        self._adapt_threads()
        count = batch.native.n_tokens
        recent_errors(clear=True)
        run = self._lib.llama_encode if encode else self._lib.llama_decode
        if self._stream:
            first = self._first_layers.count if self._first_layers and self._first_layers.stop_after else None
            self._stream.begin_pass(lambda: self.interrupt.requested, first)
        take_lost_interrupt()
        status = run(self._context, batch.native)
        if take_lost_interrupt():
            # Treat the pass as aborted, because the interrupted callback may not have copied its hidden
            # states or waited for its streamed weights.
            status = _ABORTED
        if status == 0:
            if self._stream:
                self._stream.end_pass(is_partial=self._is_hooked and self._active_hook.stop_after)
            return
        if status == _ABORTED or self.interrupt.requested:
            raise CancelledError("the model's computation was cancelled")
        if status == _NO_SLOT:
            raise ContextFullError(f"the context of {self.tokens:,} tokens is full", "use a larger --context")
        if status == _NO_MEMORY:
            raise OutOfMemoryError(
                f"there is not enough memory to process {count} tokens",
                "close other programs, or use a smaller --context",
            )
        detail = (recent_errors() or ["llama.cpp reported no reason"])[-1]
        raise BackendError(
            f"llama.cpp failed to process {count} tokens (status {status}): {detail}",
            "close other programs or use a smaller --context",
        )

    @property
    def max_threads(self) -> int:
        """Maximum number of threads, used on an idle machine. 0 if the number of threads never changes."""
        return self._thread_count.most if self._thread_count else 0

    def set_max_threads(self, threads: int) -> None:
        """Set the maximum number of threads, unless the user set a fixed number."""
        if self._thread_count:
            self._thread_count.most = self._thread_count.current = threads

    def fix_threads(self, fixed: bool) -> None:
        """Pin the number of threads, or let it follow the machine's load."""
        if self._thread_count:
            self._thread_count.is_fixed = fixed

    def watch_memory(self, spare_bytes: Callable[[], int]) -> None:
        """Read fewer weights ahead while memory is low. See `LanguageModel.watch_memory`."""
        if self._stream:
            self._stream.watch_memory(spare_bytes)

    def _adapt_threads(self) -> None:
        """Limit the threads of the next pass to the cores that other programs leave free."""
        if self._thread_count and (threads := self._thread_count.update()) != self.threads:
            self._lib.llama_set_n_threads(self._context, threads, threads)
            # Also update the parameters, which `allocate` uses when it creates a new context.
            self._params.n_threads = self._params.n_threads_batch = self.threads = threads

    def set_interrupt(self, requested: bool) -> None:
        """Make current and later passes raise CancelledError, or stop doing so if not `requested`."""
        self.interrupt.requested = requested

    def close(self) -> None:
        """Free the llama_context and its batches."""
        self.release()
        self._batch.free()
        if self._hidden is not None:
            self._hidden.free()


def adapter_bytes(adapters: Sequence[Adapter]) -> int:
    """Estimate the memory that loaded adapters use, in bytes, from the size of their files."""
    return sum(Path(adapter.path).stat().st_size for adapter in adapters)


class LoraAdapters:
    """The adapters loaded for a model. llama.cpp frees them together with the model.

    Args:
        model: The llama_model handle.
        adapters: The adapters to load.

    Attributes:
        scales: The scale of each adapter. 0 disables an adapter.

    Raises:
        ModelFileError: llama.cpp cannot load an adapter, for example because it belongs to a different model.
    """

    def __init__(self, model: Any, adapters: Sequence[Adapter]) -> None:
        self.scales = tuple(adapter.scale for adapter in adapters)
        self._handles = [_load_adapter(model, Path(adapter.path)) for adapter in adapters]

    def apply(self, context: Any) -> None:
        """Apply the adapters with their current scales to a llama_context, starting with its next pass.

        Raises:
            BackendError: llama.cpp rejected the adapters.
        """
        if not self._handles:
            return
        lib, count = library(), len(self._handles)
        handles = (lib.llama_adapter_lora_p_ctypes * count)(*self._handles)
        if lib.llama_set_adapters_lora(context, handles, count, (ctypes.c_float * count)(*self.scales)):
            raise BackendError(
                "llama.cpp could not apply the adapters",
                "omit --adapter",
                code="adapter_unusable",
            )


def _load_adapter(model: Any, path: Path) -> Any:
    recent_errors(clear=True)
    handle = library().llama_adapter_lora_init(model, os.fsencode(path))
    if not handle:
        detail = (recent_errors() or ["llama.cpp reported no reason"])[0]
        raise ModelFileError(
            f"the adapter {path} could not be loaded: {detail}",
            "use an adapter that was trained for this model, or download it again",
            code="adapter_unusable",
        )
    return handle
