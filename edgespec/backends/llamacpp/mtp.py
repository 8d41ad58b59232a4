"""Draft with multi-token prediction (MTP, arXiv 2412.19437).

Many models contain MTP layers, which have their own KV cache. Gemma 4 instead has assistants, which are MTP
heads that come in separate files and read the target's KV cache.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.head_view import HeadView, check_finite, check_sizes
from edgespec.backends.llamacpp.context_plan import ContextPlan, KvTypes
from edgespec.backends.llamacpp.context_planning import check_contexts_fit
from edgespec.backends.llamacpp.head import PairHead
from edgespec.backends.llamacpp.head_loading import (
    BATCH_TOKENS,
    HeadFile,
    HeadParts,
    HeadPass,
    PairContext,
    head_memory,
    head_options,
    load_head_file,
)
from edgespec.backends.llamacpp.head_target import HeadTarget, SharedHead
from edgespec.backends.llamacpp.loading import check_file, describe, threads_for
from edgespec.backends.llamacpp.mtp_files import (
    ASSISTANT,
    MtpLayers,
    check_assistant,
    check_same_model,
    is_assistant,
    read_mtp_layers,
)
from edgespec.backends.llamacpp.native import library
from edgespec.backends.llamacpp.probe import ProbeResult
from edgespec.backends.llamacpp.state_taps import nextn_api
from edgespec.engine.logits import HostLogits
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError, MemoryBudgetError
from edgespec.model.base import Head, LoadOptions
from edgespec.model.formats.gguf_header import read_header
from edgespec.model.formats.gguf_metadata import read_gguf_info
from edgespec.model.hidden_states import POST_NORM
from edgespec.model.memory_estimate import MemoryEstimate
from edgespec.model.model_facts import Capabilities

__all__ = ["estimate_head", "load_head"]

# Approximate compute buffer size of a head in bytes, per batch token and vocabulary entry.
_COMPUTE_BYTES_PER_LOGIT = 4
_F16 = KvTypes("f16", "f16")


def load_head(target: HeadTarget, head: Head) -> SharedHead:
    """Load MTP layers from a file, or use those in the target's own file if the head has no path.

    Raises:
        CapabilityError: The file was made for a different target, llama.cpp cannot run its MTP layers, or
            concurrent replies cannot share them.
        ModelFileError: The file is damaged.
        MemoryBudgetError: The head does not fit in memory.
    """
    if nextn_api() is None:
        raise CapabilityError(
            "this version of llama.cpp cannot run MTP layers separately from the model",
            "choose another method, or install the version of llama-cpp-python that edgespec was tested with",
            code="head_not_supported",
        )
    path = head.path
    if path is not None and is_assistant(path):
        return _load_assistant(target, head, path)
    file = path or Path(target.facts.path)
    layers = read_mtp_layers(file)
    if layers.count > 1 and target.options.parallel > 1:
        # All layers of a context share its KV cells, but concurrent replies would run different layers.
        raise CapabilityError(
            f"the {layers.count} MTP layers of {file.name} cannot draft for several replies at once",
            "omit --parallel, or choose another method, such as suffix",
            code="parallel_not_supported",
        )

    def make(weights: Any, options: LoadOptions, name: str) -> HeadFile:
        plan = plan_mtp_context(layers, options)
        check_contexts_fit([plan], check_file(str(path)) if path else 0, options)

        def open_context(head_file: HeadFile, target: HeadTarget, _row_size: int) -> PairContext:
            threads = threads_for(weights, options)
            return PairContext(weights, options, head_file.plan_for(target), threads, mtp=True)

        def make_view(parts: HeadParts) -> PairHead:
            view = PairHead(parts, layers=layers.count)
            if path is None:
                # `weights` covers the whole target, not just its MTP layers.
                view.facts = replace(view.facts, weight_bytes=layers.weight_bytes)
            return view

        states = layers.graph.states_read(library().llama_model_n_layer(target.weights[0]))
        owns_weights = path is not None
        return HeadFile(
            weights, file, file, name, options, plan, states, open_context, make_view, owns_weights
        )

    if path is None:
        if not target.options.own_head:
            raise CapabilityError(
                f"{target.facts.name} was loaded without its MTP layers",
                f"load the model with --method {head.method} (the option `method`)",
                code="mtp_missing",
            )
        name = f"the MTP layers of {target.facts.name}"
        return make(target.weights[0], head_options(target), name)
    check_same_model(path, Path(target.facts.path), target.facts.name)

    def make_from_file(weights: Any, options: LoadOptions, name: str) -> HeadFile:
        n_embd = library().llama_model_n_embd
        check_sizes(target, file, [("hidden states", n_embd(target.weights[0]), n_embd(weights))])
        return make(weights, options, name)

    return load_head_file(target, head, target.facts.architecture, "a file with MTP layers", make_from_file)


def estimate_head(head: Head, target: Path, context_tokens: int) -> MemoryEstimate:
    """Estimate the memory that MTP layers need. See `HeadNetwork`."""
    path = head.path
    if path is not None and is_assistant(path):
        return _estimate_assistant(path, context_tokens)
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


def _load_assistant(target: HeadTarget, head: Head, path: Path) -> SharedHead:
    check_assistant(path, Path(target.facts.path), target.facts.name)
    if target.options.parallel > 1:
        # The head reads the KV cells of the target's first llama.cpp sequence, which belongs to a single
        # reply.
        raise CapabilityError(
            f"the Gemma 4 assistant {path.name} cannot draft for several replies at once",
            "omit --parallel, or choose another method, such as suffix",
            code="parallel_not_supported",
        )

    def make(weights: Any, options: LoadOptions, name: str) -> HeadFile:
        # One sequence is enough, because the head reads only the target's sequence 0.
        plan = ContextPlan(0, target.max_plan.kv_types, sequences=1, rows=BATCH_TOKENS)
        return HeadFile(
            *(weights, path, path, name, options, plan),
            states=(POST_NORM,),
            open_context=_open_assistant_context,
            make_view=_checked_assistant,
        )

    return load_head_file(target, head, ASSISTANT, "a Gemma 4 assistant", make)


def _checked_assistant(parts: HeadParts) -> _AssistantHead:
    """Create a view of an assistant. Raises ModelFileError if its logits are not finite."""
    head, target = _AssistantHead(parts), parts.target
    if target.length or not target.free_tokens:
        return head
    try:
        # `HeadFile` cannot check this head's logits while the target's cache is empty.
        target.prefill([0])
        check_finite(head, parts.file.path)
    except BaseException:
        head.close()
        raise
    finally:
        target.truncate(0)
    return head


def _estimate_assistant(path: Path, context_tokens: int) -> MemoryEstimate:
    return head_memory(
        context_tokens,
        weight_bytes=check_file(str(path)),
        token_bytes=0,
        vocabulary=read_gguf_info(path).vocab_size,
        state_size=read_header(path).architecture_number("embedding_length_out"),
        bytes_per_logit=_COMPUTE_BYTES_PER_LOGIT,
    )


class _AssistantHead(HeadView[HeadTarget]):
    """A head whose layers attend to the KV cells of the target's committed tokens.

    Its input is a token and the preceding hidden state. For the last emitted token, this is the target's
    hidden state. For draft tokens, it is the head's own hidden state after the parent in the draft tree. The
    head stores no keys and values, so it runs all nodes of a draft tree at the position of the last emitted
    token.

    The head therefore needs no prefill, commit or rollback. It must not run while the target verifies a
    draft.
    """

    def __init__(self, parts: HeadParts) -> None:
        target, context, file = parts.target, parts.context, parts.file
        super().__init__(target, parts.log, parts.release)
        assert isinstance(context, PairContext)
        self._context = context
        capabilities = Capabilities(
            rollback=True,
            tree=target.facts.capabilities.tree,
            max_width=context.max_width,
            max_branches=file.options.max_branches,
        )
        result = ProbeResult(capabilities, "nothing to roll back")
        facts = describe(file.handle, str(file.path), file.name, context.plan, self.vocabulary, result)
        self.facts = replace(facts, vocab_size=self.vocabulary.size, notice="")
        # The head's own hidden state after each node of the current draft tree.
        self._own_states: NDArray[np.float32] = np.empty((0, self.log.row_size), np.float32)

    @property
    def free_tokens(self) -> int:
        return 0 if self._context.is_lost else self._target.free_tokens

    @property
    def threads(self) -> int:
        return self._context.threads

    def _run_tree(self, tree: TokenTree, first: int) -> HostLogits:
        self._own_states = self._own_states[:first]
        # Run each node in a later pass than its parent, because it takes the hidden state after the parent as
        # input.
        *earlier, last = tree.independent_ranges(first)
        rows = [self._run(tree, *nodes).copy() for nodes in earlier]
        logits = self._run(tree, *last)
        return HostLogits(np.concatenate([*rows, logits]) if rows else logits)

    def _run(self, tree: TokenTree, first: int, end: int) -> NDArray[np.float32]:
        """Run the nodes [first, end) and return their logits, which the next pass overwrites.

        Their parents must have been run already.
        """
        position, count = self.length, end - first
        states = (
            self._own_states[np.array(tree.parents[first:end])] if first else self._logged_states(position, 1)
        )
        rows = self._context.compute(
            HeadPass("draft", tree.tokens[first:end], states, [position] * count, [(0,)] * count)
        )
        self._own_states = np.concatenate([self._own_states, rows.states])
        # Attention divides by zero if there are no committed tokens, which happens only during warm-up.
        return rows.logits if position else np.zeros_like(rows.logits)

    def interrupt(self, enabled: bool) -> None:
        self._context.set_interrupt(enabled)

    def close(self) -> None:
        if not self._closed:
            self._target.context.kv_readers.remove(self._context)
        super().close()


def _open_assistant_context(file: HeadFile, target: HeadTarget, _row_size: int) -> PairContext:
    """Return a context for a head that reads the target's KV cells."""
    shared, options = target.context, file.options
    plan = file.max_plan.with_tokens(shared.tokens)
    # Save the target's KV cells, because llama.cpp clears the cache when it creates a context that reads it.
    try:
        cells = shared.export_cells(0, 0, target.length)
    except MemoryError as error:
        raise MemoryBudgetError(
            f"cannot load the draft head: there is not enough memory to copy {target.length:,} cached tokens",
            "close other programs, or load the head before the first prompt",
            code="out_of_memory",
        ) from error
    try:
        threads = threads_for(file.handle, options)
        context = PairContext(file.handle, options, plan, threads, target=shared)
    finally:
        shared.clear()
        if not shared.import_cells(cells, 0, target.length):
            target.truncate(0)
    shared.kv_readers.append(context)
    return context
