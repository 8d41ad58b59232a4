"""Share one llama.cpp context between concurrent replies and batch their forward passes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.backends.llamacpp.context_plan import ContextPlan
from edgespec.backends.llamacpp.context_planning import longrope_switch_tokens
from edgespec.backends.llamacpp.kv_sequences import KvSequences
from edgespec.backends.llamacpp.metadata import has_state
from edgespec.backends.llamacpp.pass_scheduler import PassKind, PassPart, PassScheduler
from edgespec.errors import CapabilityError, EdgespecError, OptionError
from edgespec.model.base import LoadOptions

__all__ = [
    "ContextSlot",
    "JoinedParts",
    "SharedContext",
    "check_slots",
    "max_pass_tokens",
    "why_not_shared",
]

# The maximum number of sequences in a llama.cpp context (LLAMA_MAX_SEQ).
_MAX_SEQUENCES = 256
# Maximum number of prompt tokens in a pass shared with other replies. The limit was chosen so that such a
# pass takes only a few times as long as one that only generates tokens.
_SHARED_PREFILL_TOKENS = 64


def why_not_shared(weights: Any) -> str:
    """Return why replies cannot share a GGUF model's passes, or an empty string if they can."""
    if has_state(weights):
        return "it has recurrent layers"
    if longrope_switch_tokens(weights):
        # llama.cpp chooses the LongRoPE factors based on the size of the whole context, which replies would
        # share.
        return "it uses LongRoPE"
    return ""


def check_slots(plan: ContextPlan, options: LoadOptions) -> None:
    """Raise OptionError if a context has more sequences than llama.cpp supports."""
    if plan.sequences > _MAX_SEQUENCES:
        most = _MAX_SEQUENCES * plan.slots // plan.sequences
        raise OptionError(
            f"{plan.slots} concurrent replies with up to {options.max_branches} branches per draft need"
            f" {plan.sequences} llama.cpp sequences, but llama.cpp supports only {_MAX_SEQUENCES}",
            f"use --parallel {most} or less, or fewer --draft-branches",
            option="draft_branches",
        )


def max_pass_tokens(context: LlamaContext) -> int:
    """Return the maximum number of tokens that one pass can verify for a single reply."""
    if not context.window:
        return context.max_width
    # In a deeper tree, the root could leave the window before it is committed (see `WindowSlot`).
    return max(1, min(context.max_width, context.window - 1))


class JoinedParts(NamedTuple):
    """The concatenated inputs of all parts of a pass. See `PassPart`."""

    tokens: Sequence[int]
    positions: Sequence[int]
    sequences: Sequence[Sequence[int]]

    @classmethod
    def of(cls, parts: Sequence[PassPart]) -> JoinedParts:
        return cls(
            list(chain.from_iterable(part.tokens for part in parts)),
            list(chain.from_iterable(part.positions for part in parts)),
            list(chain.from_iterable(part.sequences for part in parts)),
        )


class SharedContext:
    """A llama_context that several replies share, each in its own slot.

    Each slot has its own sequences and an equal share of the KV cells. Slots can be used concurrently, each
    by one thread.

    Args:
        context: The context, which must be empty. Its plan contains the number of slots.
        free_weights: Frees the model's weights. Called once the last slot has been released.
    """

    def __init__(self, context: LlamaContext, free_weights: Callable[[], None]) -> None:
        self._context, self._free_weights = context, free_weights
        # Held during every call to llama.cpp, because a llama_context is not thread-safe.
        self.lock = threading.RLock()
        count = context.plan.slots
        self.scheduler = PassScheduler(
            count, context.batch_tokens, context.max_width, self._run, context.set_interrupt
        )
        self.slots = tuple(self._make_slot(context, slot) for slot in range(count))
        self._open_slots = count
        # The hidden states that each slot's heads read, and their union, which every pass copies.
        self._slot_states: list[Sequence[int]] = [()] * count
        self._states: Sequence[int] = ()

    def _make_slot(self, context: LlamaContext, slot: int) -> ContextSlot:
        return (WindowSlot if context.window else ContextSlot)(self, context, slot)

    def _run(self, parts: Sequence[PassPart]) -> None:
        """Run a pass. If it fails, run each part on its own, so that only the part at fault fails."""
        with self.lock:
            try:
                self._run_together(parts)
            except EdgespecError as error:
                if len(parts) == 1:
                    parts[0].error = error
                else:
                    for part in parts:
                        self._run([part])

    def _run_together(self, parts: Sequence[PassPart]) -> None:
        joined = JoinedParts.of(parts)
        if parts[0].kind == "embeddings":
            parts[0].rows = self._context.run_states(*joined)
            return
        if parts[0].kind == "image":
            (part,) = parts
            self._context.append_image(
                part.inputs, part.components, part.sequences[0][0], is_causal=part.is_causal
            )
            self.slots[part.slot].protect(part.positions[0], part.positions[-1] + 1)
            return
        # Compute all logits if heads read hidden states that llama.cpp computes only along with logits.
        every = self._context.needs_all_rows
        needs_logits = [
            every or index >= part.prompt_tokens for part in parts for index in range(len(part.tokens))
        ]
        logits = self._context.run(*joined, needs_logits)
        states = self._context.tapped_rows(len(needs_logits)) if self._states else None
        row = token = 0
        for part in parts:
            if part.prompt_tokens:
                end = part.positions[0] + part.prompt_tokens
                self.slots[part.slot].protect(part.positions[0], end)
            row += part.prompt_tokens if every else 0
            # Copy the rows, because the next pass overwrites them, even if it runs for other replies.
            part.rows, row = logits[row : row + part.outputs].copy(), row + part.outputs
            if states is not None and (own := self._slot_states[part.slot]):
                columns = [self._states.index(state) for state in own]
                part.states = states[token : token + len(part.tokens), columns]
            token += len(part.tokens)

    def tap_states(self, slot: int, states: Sequence[int]) -> None:
        """Choose which hidden states each pass returns for a slot. See `LlamaContext.tap_states`."""
        with self.lock:
            self._slot_states[slot] = states
            self._states = tuple(sorted(set(chain.from_iterable(self._slot_states))))
            self._context.tap_states(self._states)

    def allocate_for_states(self) -> None:
        """Reallocate the context if copying the chosen hidden states requires it.

        Raises:
            CapabilityError: Reallocating would discard the tokens of other replies.
            MemoryBudgetError: The context cannot be reallocated.
        """
        with self.lock:
            if self._context.is_stale:
                if any(slot.first_position is not None for slot in self.slots):
                    raise CapabilityError(
                        "a draft head cannot be loaded while replies are being generated",
                        "load the model together with the draft head",
                    )
                self._reallocate()
            self.scheduler.max_tokens = self._context.batch_tokens

    def _reallocate(self) -> None:
        """Replace the context with an empty one. If this fails, no slot has a KV cache."""
        for slot in self.slots:
            slot.detach()
        self._context.allocate(self._context.plan)
        for slot in self.slots:
            slot.attach(self._context.handle)

    def release(self) -> None:
        """Close a slot. When the last slot is closed, free the context and the weights."""
        with self.lock:
            self._open_slots -= 1
            if self._open_slots:
                return
        self.close()

    def close(self) -> None:
        """Free the context and the weights."""
        self.scheduler.close()
        self._context.close()
        self._free_weights()


class ContextSlot(KvSequences):
    """One reply's slot in a shared context, with the methods of `LlamaContext` that a model needs.

    Attributes:
        plan: The slot's share of the context.
        tokens: The number of KV cells in the slot.
        shared: The shared context.
        whole: The context that contains all slots.
        index: The index of the slot.
        other_tokens: The number of tokens in the reply's last pass in addition to those with logits.
    """

    # Number of llama.cpp sequences per slot in addition to those for committed tokens and drafts.
    _EXTRA_SEQUENCES = 0
    # Whether `run` must be called with all tokens whose hidden states are needed. A shared pass computes the
    # hidden states of all of its tokens.
    needs_all_rows = False

    def __init__(self, shared: SharedContext, context: LlamaContext, slot: int) -> None:
        self.plan: ContextPlan = context.plan.share
        first, count = slot * self.plan.sequences, self.plan.sequences - self._EXTRA_SEQUENCES
        super().__init__(count, window=context.window, first=first, lock=shared.lock)
        self.attach(context.handle)
        self.tokens = self.plan.tokens
        self.shared = shared
        self.whole = context
        self.index = slot
        self.max_width = max_pass_tokens(context)
        self.other_tokens = 0
        self._states: NDArray[np.float32] = np.empty((0, 0, 0), np.float32)

    @property
    def batch_tokens(self) -> int:
        """Maximum number of prompt tokens in the next pass. It is lower if other replies share the pass."""
        most = self.whole.batch_tokens
        return min(most, _SHARED_PREFILL_TOKENS) if self.shared.scheduler.is_shared(self.index) else most

    @property
    def threads(self) -> int:
        return self.whole.threads

    @property
    def max_threads(self) -> int:
        return self.whole.max_threads

    def set_max_threads(self, threads: int) -> None:
        with self._lock:
            self.whole.set_max_threads(threads)

    def fix_threads(self, fixed: bool) -> None:
        with self._lock:
            self.whole.fix_threads(fixed)

    def watch_memory(self, spare_bytes: Callable[[], int]) -> None:
        with self._lock:
            self.whole.watch_memory(spare_bytes)

    def append(self, tokens: Sequence[int], position: int) -> None:
        """Append tokens to the slot's sequence, without computing logits. See `run` for the errors."""
        count = len(tokens)
        self._run(tokens, range(position, position + count), [(0,)] * count, 0)

    def append_image(
        self, rows: NDArray[np.float32], positions: NDArray[np.int32], *, is_causal: bool
    ) -> None:
        """Append part of an image, given as image embeddings, to the slot's sequence.

        See `LlamaContext.append_image`, and `run` for the errors.
        """
        count = len(rows)
        part = self._part([0] * count, positions[0].tolist(), [(0,)] * count, 0, "image")
        part.inputs, part.components, part.is_causal = rows, positions, is_causal
        self.shared.scheduler.run(part)

    def run(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[Sequence[int]],
        needs_logits: Sequence[bool] | None = None,
    ) -> NDArray[np.float32]:
        """Process tokens in the next shared pass, and return their logits. See `LlamaContext.run`.

        If `needs_logits` is given, only the last tokens may need them.

        Raises:
            CancelledError: `interrupt` was called.
            ContextFullError: There are not enough free KV cells.
            OutOfMemoryError: A buffer for the forward pass cannot be allocated.
            BackendError: llama.cpp failed for any other reason.
        """
        outputs = len(tokens) if needs_logits is None else sum(needs_logits)
        return self._run(tokens, positions, sequences, outputs).rows

    def run_states(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[Sequence[int]]
    ) -> NDArray[np.float32]:
        """Run tokens, and return the last layer's hidden states. See `LlamaContext.run_states`."""
        return self._run(tokens, positions, sequences, len(tokens), "embeddings").rows

    def tap_states(self, states: Sequence[int]) -> None:
        """Choose the hidden states that the slot's passes return. See `LlamaContext.tap_states`."""
        self.shared.tap_states(self.index, states)

    def tapped_rows(self, count: int) -> NDArray[np.float32]:
        """Return the hidden states from the slot's last pass, which ran `count` tokens."""
        assert len(self._states) == count
        return self._states

    def _run(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[Sequence[int]],
        outputs: int,
        kind: PassKind = "logits",
        inputs: NDArray[np.float32] | None = None,
    ) -> PassPart:
        if self.has_wide_images:
            positions = [self.position(index) for index in positions]
        part = self._part(tokens, positions, sequences, outputs, kind)
        if inputs is not None:
            part.inputs = inputs
        self.shared.scheduler.run(part)
        self.other_tokens, self._states = part.pass_tokens - outputs, part.states
        return part

    def _part(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[Sequence[int]],
        outputs: int,
        kind: PassKind,
    ) -> PassPart:
        ids = [[self._first + sequence for sequence in each] for each in sequences]
        return PassPart(self.index, tokens, positions, ids, outputs, kind)

    def set_interrupt(self, enabled: bool) -> None:
        """Make this slot's passes raise CancelledError from now on, or stop doing so if not `enabled`."""
        self.shared.scheduler.cancel(self.index, enabled)

    def protect(self, start: int, end: int) -> None:
        """Prevent llama.cpp from reusing the cells at positions [start, end) of sequence 0."""


class WindowSlot(ContextSlot):
    """One reply's slot in the shared context of a model with sliding-window attention.

    A rollback can require cells outside the window, but llama.cpp reuses such cells for other replies if they
    belong to a single sequence. To prevent this, the slot's last sequence also holds all committed cells.
    """

    _EXTRA_SEQUENCES = 1

    def __init__(self, shared: SharedContext, context: LlamaContext, slot: int) -> None:
        super().__init__(shared, context, slot)
        self._protecting = self._first + self._scratch + 1

    def protect(self, start: int, end: int) -> None:
        with self._lock:
            self._lib.llama_memory_seq_cp(self._memory, self._first, self._protecting, start, end)

    def copy(self, source: int, sequence: int, start: int = -1, end: int = -1) -> None:
        with self._lock:
            super().copy(source, sequence, start, end)
            if sequence == 0:
                self.protect(start, end)

    def drop(self, sequence: int, start: int, end: int = -1) -> bool:
        with self._lock:
            if sequence == 0:
                self._lib.llama_memory_seq_rm(self._memory, self._protecting, start, end)
            dropped = super().drop(sequence, start, end)
            if sequence == 0:
                # Protect the remaining cells too, because they may include accepted tokens of a draft tree
                # that are not protected yet.
                self.protect(0, start)
            return dropped

    def remove_range(self, start: int, end: int) -> None:
        with self._lock:
            self._lib.llama_memory_seq_rm(self._memory, self._protecting, start, end)
            super().remove_range(start, end)
