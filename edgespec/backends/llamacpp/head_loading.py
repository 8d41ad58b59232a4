"""Load heads that llama.cpp runs: check that a head matches its target, and create its context.

A head drafts from tokens and hidden states. Several replies can share its context.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.head_view import check_finite, check_sizes
from edgespec.backends.llamacpp.context import Batch, LlamaContext
from edgespec.backends.llamacpp.context_plan import ContextPlan
from edgespec.backends.llamacpp.devices import has_own_memory
from edgespec.backends.llamacpp.head_target import HeadTarget
from edgespec.backends.llamacpp.loading import check_file, load_weights
from edgespec.backends.llamacpp.metadata import metadata, vocabulary_size
from edgespec.backends.llamacpp.native import library
from edgespec.backends.llamacpp.pass_scheduler import PassPart
from edgespec.backends.llamacpp.shared_context import ContextSlot, JoinedParts, SharedContext
from edgespec.backends.llamacpp.state_taps import copied_rows, nextn, target_layer_ids
from edgespec.errors import CapabilityError, ModelFileError, shorten
from edgespec.model.base import Head, LoadOptions
from edgespec.model.base_model import SelfDraftView
from edgespec.model.formats.gguf_header import read_header
from edgespec.model.hidden_states import MAX_LOGGED_TOKENS, HiddenStateLog
from edgespec.model.memory_estimate import GPU, MEMORY, MemoryEstimate, MemoryPart, check_weights_fit

__all__ = [
    "BATCH_TOKENS",
    "EagleContext",
    "HeadContext",
    "HeadFile",
    "HeadParts",
    "HeadPass",
    "HeadRows",
    "PairContext",
    "head_memory",
    "head_options",
    "load_head_file",
    "target_layers",
]

# Maximum number of tokens per pass of a head. It is small because compute buffers grow with both this number
# and the vocabulary size.
BATCH_TOKENS = 64


@dataclass(frozen=True, slots=True)
class HeadParts:
    """The parts that make up a reply's view of a head.

    Attributes:
        file: The loaded head.
        target: The model that the head drafts for.
        context: The context that runs the head, or the reply's slot in it if several replies share its
            passes.
        log: The log of the target's hidden states that the head reads.
        release: Called when the view is closed. See `SharedHead.view`.
    """

    file: HeadFile
    target: HeadTarget
    context: HeadContext | HeadSlot
    log: HiddenStateLog
    release: Callable[[], None]


@dataclass(eq=False)
class HeadFile:
    """A loaded head whose context is opened with its first view. Implements `SharedHead`.

    Attributes:
        handle: The llama_model handle that contains the head.
        path: The head's file.
        shown_path: The path to show to the user.
        name: The head's name, for messages.
        options: See `head_options`.
        max_plan: The head's context plan for the target's maximum context length, covering all concurrent
            replies.
        states: The hidden states of the target that the head reads, numbered as in `HiddenStateSource`.
        open_context: Opens the context, given this head, the target and the number of hidden-state values per
            token.
        make_view: Creates a view.
        owns_weights: Whether `handle` was loaded for the head, rather than for the target.
    """

    handle: Any
    path: Path
    shown_path: Path
    name: str
    options: LoadOptions
    max_plan: ContextPlan
    states: Sequence[int]
    open_context: Callable[[HeadFile, HeadTarget, int], HeadContext]
    make_view: Callable[[HeadParts], SelfDraftView[HeadTarget]]
    owns_weights: bool = True
    # One context per view: either its slot in a shared context, or a context of its own if there is only one
    # view.
    _contexts: Sequence[HeadContext | HeadSlot] = field(default=(), init=False)
    _close_context: Callable[[], None] | None = field(default=None, init=False)

    def plan_for(self, target: HeadTarget) -> ContextPlan:
        """Return the head's context plan for the target's current context length."""
        return self.max_plan.with_tokens(target.facts.context_tokens * self.max_plan.slots)

    def view(self, target: HeadTarget, release: Callable[[], None]) -> SelfDraftView[HeadTarget]:
        """Return a reply's view of the head. Raises ModelFileError if its logits are not finite."""
        log = target.log_hidden_states(self.states)
        try:
            if not self._contexts:
                self._open(target, log.row_size)
            context = self._contexts[target.slot]
            view = self.make_view(HeadParts(self, target, context, log, release))
        except BaseException:
            target.stop_logging(log)
            raise
        try:
            check_finite(view, self.shown_path)
        except BaseException:
            view.close()
            raise
        return view

    def _open(self, target: HeadTarget, row_size: int) -> None:
        context = self.open_context(self, target, row_size)
        self._contexts, self._close_context = [context], context.close
        if context.plan.slots > 1:
            shared = SharedHeadContext(context, self.name)
            self._contexts, self._close_context = shared.slots, shared.close

    def close(self) -> None:
        """Free the contexts and the weights. All views must already be closed."""
        if self._close_context is not None:
            self._close_context()
        if self.owns_weights:
            library().llama_model_free(self.handle)


class SharedHeadContext(SharedContext):
    """A head's context, shared by several replies that each have their own slot. See `SharedContext`.

    Raises:
        CapabilityError: Replies cannot share the head's passes.
    """

    _context: HeadContext
    slots: tuple[HeadSlot, ...]

    def __init__(self, context: HeadContext, name: str) -> None:
        if context.window:
            # Outside the attention window, llama.cpp would reuse one reply's cells for other replies' tokens.
            raise CapabilityError(
                f"{name} cannot draft for several replies at once, because it has sliding-window attention",
                "omit --parallel, or choose another method, such as suffix",
                code="parallel_not_supported",
            )
        # Pass a no-op, because `HeadFile` frees the weights.
        super().__init__(context, lambda: None)

    def _make_slot(self, context: LlamaContext, slot: int) -> HeadSlot:
        return HeadSlot(self, context, slot)

    def _run_together(self, parts: Sequence[PassPart]) -> None:
        kind = parts[0].kind
        assert kind in ("encode", "prefill", "draft")
        if self._context.is_stale:
            # Loading another head has replaced the target's context, to which this context has a pointer.
            # That happens only between replies, so at most the head's cached tokens are lost.
            self._reallocate()
        tokens, positions, sequences = JoinedParts.of(parts)
        inputs = np.concatenate([part.inputs for part in parts])
        rows = self._context.compute(HeadPass(kind, tokens, inputs, positions, sequences))
        start = 0
        for part in parts:
            end = start + len(part.tokens)
            # Copy the logits, because the next pass overwrites them.
            part.rows, part.states = rows.logits[start:end].copy(), rows.states[start:end]
            start = end


class HeadSlot(ContextSlot):
    """One reply's slot in a head's shared context, with the `HeadContext` methods that heads need."""

    def compute(self, head_pass: HeadPass) -> HeadRows:
        """Run a pass of the head, batched with those of other replies. See `HeadContext.compute`."""
        kind, tokens, inputs, positions, sequences = head_pass
        outputs = len(tokens) if kind == "draft" else 0
        part = self._run(tokens, positions, sequences, outputs, kind, inputs)
        return HeadRows(part.rows, part.states)


def head_options(target: HeadTarget) -> LoadOptions:
    """Return the load options for a target's head."""
    options = target.options
    memory_bytes = options.memory_bytes
    if memory_bytes is not None:
        kv_bytes = options.parallel * target.facts.max_kv_bytes
        memory_bytes = max(0, memory_bytes - target.facts.weight_bytes - kv_bytes)
    return replace(
        options.for_draft(),
        context_tokens=target.max_plan.tokens,
        choose_context_tokens=None,
        memory_bytes=memory_bytes,
        batch_tokens=BATCH_TOKENS,
        max_logit_rows=BATCH_TOKENS,
        kv_type="auto",
        own_head=True,
    )


def load_head_file(
    target: HeadTarget,
    head: Head,
    architecture: str,
    kind: str,
    make: Callable[[Any, LoadOptions, str], HeadFile],
) -> HeadFile:
    """Load a head from its own GGUF file.

    Args:
        target: The model that the head drafts for.
        head: The head, which has its own file.
        architecture: The `general.architecture` that the file must have.
        kind: The kind of head for messages, with an article, such as `an EAGLE-3 head`.
        make: Checks the metadata and returns the head, given its llama_model handle, load options and name.

    Raises:
        CapabilityError: The file has another architecture, or was made for a different target.
        ModelFileError: The file is damaged.
        MemoryBudgetError: The head does not fit in memory.
    """
    path, shown = head.path, head.shown_path
    assert path is not None
    options, name = head_options(target), f"the draft head of {target.facts.name}"
    check_weights_fit(name, check_file(str(path)), options)
    weights = load_weights(str(path), name, options, None)
    try:
        found = metadata(weights, "general.architecture")
        if found != architecture:
            raise CapabilityError(
                f"{shown} is not {kind}, but a model with architecture {shorten(found)!r}",
                "pass draft heads with --head, and draft models with --draft",
                code="wrong_file",
            )
        own_size = vocabulary_size(target.weights[0])
        check_sizes(target, shown, [("a vocabulary", own_size, vocabulary_size(weights))])
        _check_token_ids(path, own_size)
        return make(weights, options, name)
    except BaseException:
        library().llama_model_free(weights)
        raise


def _check_token_ids(path: Path, vocab_size: int) -> None:
    """Raise ModelFileError if a head's `d2t` contains token ids outside the target's vocabulary.

    llama.cpp aborts when it runs such a head.
    """
    header = read_header(path)
    found = next((tensor for tensor in header.tensors if tensor.name == "d2t"), None)
    if found is None:
        return
    import gguf  # Imported lazily because importing gguf takes 0.2 seconds.

    ids = next(tensor.data for tensor in gguf.GGUFReader(path).tensors if tensor.name == "d2t")
    if ids.dtype != np.int64 or not (ids.size and 0 <= ids.min() <= ids.max() < vocab_size):
        raise ModelFileError(
            f"the draft head {path} is damaged or was made for another model: its tensor d2t contains token"
            f" IDs outside the model's vocabulary of {vocab_size:,} tokens",
            "download it again, or choose the head that was published for this model",
        )


def target_layers(target: HeadTarget, head: Any, path: Path, state_size: int) -> list[int]:
    """Return the indices of the target layers whose inputs a head reads.

    Args:
        target: The model that the head drafts for.
        head: The head's llama_model handle.
        path: The head's file, for messages.
        state_size: The hidden size that the head expects.

    Raises:
        CapabilityError: The head was made for a different target.
    """
    lib, (weights,) = library(), target.weights
    check_sizes(target, path, [("hidden states", lib.llama_model_n_embd(weights), state_size)])
    layers, count = target_layer_ids(head), lib.llama_model_n_layer(weights)
    # An index of `count` is also valid, and refers to the last layer's output.
    if not layers or not all(0 <= layer <= count for layer in layers):
        raise CapabilityError(
            f"the draft head {path} was made for another model: it reads the layers {layers}, but"
            f" {target.facts.name} has {count} layers",
            "choose the head that was published for this model",
            code="head_mismatch",
        )
    return layers


def head_memory(
    context_tokens: int,
    *,
    weight_bytes: int,
    token_bytes: int,
    vocabulary: int,
    state_size: int,
    bytes_per_logit: int,
    batch_tokens: int = BATCH_TOKENS,
) -> MemoryEstimate:
    """Estimate a head's memory, including the hidden-state log that it reads.

    llama.cpp runs the head on the GPU if there is one, but the log and the logits stay in main memory.

    Args:
        context_tokens: Size of the head's KV cache in tokens.
        weight_bytes: Size of the weights that are loaded for the head.
        token_bytes: Size of one KV cell in bytes.
        vocabulary: Number of tokens in the head's vocabulary.
        state_size: Number of hidden-state values logged per token.
        bytes_per_logit: Approximate compute buffer size per batch token and vocabulary entry.
        batch_tokens: Maximum number of tokens per pass.
    """
    pool = GPU if has_own_memory() else MEMORY
    return MemoryEstimate(
        context_tokens,
        "f16",
        (
            MemoryPart("weights", weight_bytes, pool),
            MemoryPart("cache", token_bytes * context_tokens, pool, per_reply=True),
            MemoryPart("compute", batch_tokens * vocabulary * bytes_per_logit, pool),
            MemoryPart("compute", MAX_LOGGED_TOKENS * state_size * 4, per_reply=True),
            # Each reply that shares a pass copies its own logits.
            MemoryPart("output", batch_tokens * vocabulary * 4, per_reply=True),
        ),
    )


_Kind: TypeAlias = Literal["encode", "prefill", "draft"]


class HeadPass(NamedTuple):
    """The kind and inputs of a head's pass.

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
    """The results of a head's pass.

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
        """Run a pass of the head. See `LlamaContext.run` for the errors."""


class _PairBatch(Batch):
    """A batch of tokens, each paired with a hidden state."""

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
        mtp: Whether to run only the multi-token prediction layers of `weights`. llama.cpp aborts unless the
            weights were loaded with these layers.
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
        nextn().switch(self._context, True, True)

    def select_mtp_layer(self, layer: int) -> None:
        """Make later passes run the MTP layer with this index."""
        nextn().select_layer(self._context, layer)

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
        return copied_rows(nextn().address(self._context), count, self._state_size)

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
