"""Draft with a low-bit copy of the target model that reuses the target's KV cells.

This implements QSpec (arXiv 2410.11305), or SubSpec (arXiv 2509.18344) if only the target's streamed
weights have a low-bit copy. The target's verified cells overwrite the draft model's, so the draft model never
needs a prefill. With a sparse attention window, the draft model attends only to the first and last tokens, so
its memory does not grow with the context (MagicDec, arXiv 2408.11049).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.backends.llamacpp.context_plan import ContextPlan, kv_bytes_per_token
from edgespec.backends.llamacpp.context_planning import check_contexts_fit, check_resize_fits, rebuild_context
from edgespec.backends.llamacpp.gguf_model import GgufModel
from edgespec.backends.llamacpp.kv_cells import KvCells
from edgespec.backends.llamacpp.loading import (
    describe,
    load_vocabulary,
    load_weights,
    threads_for,
)
from edgespec.backends.llamacpp.metadata import all_metadata, has_state, vocabulary_size
from edgespec.backends.llamacpp.mtp_files import unloaded_bytes
from edgespec.backends.llamacpp.native import library
from edgespec.backends.llamacpp.probe import ProbeResult
from edgespec.backends.llamacpp.substitutes import load_substituted, loaded_bytes
from edgespec.engine.logits import HostLogits
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, CancelledError, CapabilityError, ContextFullError, MemoryBudgetError
from edgespec.model.base import LoadOptions, LowBit
from edgespec.model.base_model import SelfDraftView
from edgespec.model.memory_estimate import (
    check_draft_width,
    check_weights_fit,
    round_up_to_block,
)
from edgespec.system.heap import release_free_memory

__all__ = [
    "WINDOW_EXTRA_TOKENS",
    "LowBitView",
    "check_can_share_cache",
    "load_low_bit_view",
    "partial_copy_options",
]

# Number of KV cells reserved for drafted tokens if the draft model has an attention window.
_DRAFT_TOKENS = 64
# Number of tokens by which the draft model's attention window advances at a time.
_WINDOW_STEP_TOKENS = 64
# Number of KV cells that a draft model needs in addition to its attention window and attention sinks (the
# first tokens of the text).
WINDOW_EXTRA_TOKENS = _WINDOW_STEP_TOKENS + _DRAFT_TOKENS
_ALL_TOKENS = 1 << 62
# The maximum number of KV cells to copy from the target at once. Small chunks need little memory and can be
# interrupted quickly.
_COPY_CHUNK_TOKENS = 256
# Maximum number of tokens in a pass of a draft model that shares weights with the target. The limit was
# chosen to allow all but unusually wide draft trees. It is low because each token needs memory for logits and
# intermediate results, and memory is scarce when the target is streamed.
_SHARED_ROWS = 96
_LAYER_COUNTS = ("block_count", "leading_dense_block_count")


def partial_copy_options(options: LoadOptions) -> LoadOptions:
    """Return the load options of a draft model that shares weights with the target."""
    rows = min(options.batch_tokens, _SHARED_ROWS, options.max_logit_rows or _SHARED_ROWS)
    return replace(options, adapters=(), projector="", batch_tokens=rows, max_logit_rows=rows)


def check_can_share_cache(path: Path) -> None:
    """Check that a low-bit copy of a GGUF model could draft using the original model's KV cache.

    Raises:
        CapabilityError: The model has recurrent layers.
        ModelFileError: The file cannot be loaded.
    """
    model = load_vocabulary(str(path))
    try:
        if has_state(model):
            raise CapabilityError(
                f"{path.name} does not support the lowbit method, because it has recurrent layers",
                "use a method that does not need a copy of the model, such as suffix",
                code="lowbit_not_supported",
            )
    finally:
        library().llama_model_free(model)


def load_low_bit_view(target: GgufModel, method: LowBit) -> LowBitView:
    """Load a low-bit copy of the target and return a draft model that uses the target's KV cells."""
    if method.copy is None:
        raise CapabilityError(
            f"no low-bit copy of {target.facts.name} was specified",
            "create one with `edgespec prepare lowbit`",
            code="lowbit_not_supported",
        )
    if target.low_bit_error is not None:
        raise target.low_bit_error
    target.check_can_draft(LowBit.method)
    capabilities = target.facts.capabilities
    if LowBit.method not in capabilities.self_draft_methods:
        # If the model can roll back, `reason` explains another missing feature.
        reason = "its KV cells cannot be copied" if capabilities.rollback else capabilities.reason
        raise CapabilityError(
            f"{target.facts.name} does not support lowbit: {reason}",
            "choose another method",
            code="lowbit_not_supported",
        )
    # `LoadOptions.for_draft` explains why `mmap` is off while layers are streamed.
    options = replace(
        target.options, adapters=(), mmap=target.options.mmap and not target.options.streamed_layers
    )
    if options.memory_bytes is not None:
        left = options.memory_bytes - target.facts.weight_bytes - target.facts.max_kv_bytes
        options = replace(options, memory_bytes=max(0, left))
    name = f"{target.facts.name} (low-bit copy)"
    if method.is_partial:
        options = partial_copy_options(options)
        streamed = target.streamed_layers
        weight_bytes = loaded_bytes(Path(method.copy), streamed)
        check_weights_fit(name, weight_bytes, options)
        weights = load_substituted(
            target.weights[0], target.facts.path, Path(method.copy), streamed, name, options
        )
    else:
        weights = load_weights(method.copy, name, options, None)
        weight_bytes = library().llama_model_size(weights)
        weight_bytes -= 0 if options.own_head else unloaded_bytes(Path(method.copy))
    try:
        _check_same_model(target.weights, weights, method.copy)
        return LowBitView(target, weights, weight_bytes, method.copy, method, options, name)
    except BaseException:
        library().llama_model_free(weights)
        raise


def _check_same_model(weights: Sequence[Any], copy: Any, path: str) -> None:
    target, other = _identity(weights), _identity([copy])
    for key in target | other:
        if target.get(key) != other.get(key):
            raise CapabilityError(
                f"{path} is not a copy of the model: its {key} is {other.get(key)}, but the model's is"
                f" {target.get(key)}",
                "make a copy of the model with `edgespec prepare lowbit`",
                code="model_mismatch",
            )


def _identity(weights: Sequence[Any]) -> dict[str, str]:
    """Return the metadata that all quantisations of a model have in common."""
    parts = [all_metadata(part) for part in weights]
    architecture = parts[0].get("general.architecture", "")
    shape = {key: value for key, value in parts[0].items() if key.startswith(f"{architecture}.")}
    for key in (f"{architecture}.{name}" for name in _LAYER_COUNTS):
        if key in shape:
            shape[key] = str(sum(int(part[key]) for part in parts))
    vocabulary, text = library().llama_model_get_vocab(weights[0]), library().llama_vocab_get_text
    size = vocabulary_size(weights[0])
    tokens = sha256(b"\0".join(text(vocabulary, token) for token in range(size))).hexdigest()[:16]
    return {"architecture": architecture, **shape, "vocabulary size": f"{size:,}", "vocabulary hash": tokens}


def _plan(
    target: GgufModel, weights: Any, weight_bytes: int, method: LowBit, options: LoadOptions
) -> ContextPlan:
    tokens = target.max_plan.tokens
    if method.window_tokens is not None:
        windowed = method.sink_tokens + method.window_tokens + WINDOW_EXTRA_TOKENS
        tokens = min(tokens, round_up_to_block(windowed))
    per_token = kv_bytes_per_token(weights, target.max_plan.kv_types)
    plan = replace(target.max_plan, tokens=tokens, kv_bytes=tokens * per_token, token_bytes=per_token)
    if options.max_logit_rows is not None:
        plan = replace(plan, rows=max(plan.sequences, min(plan.rows, options.max_logit_rows)))
    check_contexts_fit([plan], weight_bytes, options)
    return plan


class LowBitView(SelfDraftView[GgufModel]):
    """A draft model with the weights of a low-bit copy and the KV cells of the target.

    `weight_bytes` is the copy's memory use. Closing the view frees `weights`.

    Its KV cache contains copies of the target's cells, followed by the drafted tokens. With an attention
    window, only the cells of the first tokens and of the tokens in the window are copied. Without one, all
    cells are copied, and the cache is resized together with the target's.
    """

    def __init__(
        self,
        target: GgufModel,
        weights: Any,
        weight_bytes: int,
        path: str,
        method: LowBit,
        options: LoadOptions,
        name: str,
    ) -> None:
        super().__init__(target)
        self._weights = weights
        self.vocabulary = target.vocabulary
        max_plan = _plan(target, weights, weight_bytes, method, options)
        full = self._has_full_context = (
            method.window_tokens is None or max_plan.tokens == target.max_plan.tokens
        )
        self._sinks = 0 if full else method.sink_tokens
        self._window = _ALL_TOKENS if full or method.window_tokens is None else method.window_tokens
        self._begin = self._sinks
        threads = threads_for(weights, options)
        plan = max_plan.with_tokens(target.facts.context_tokens) if full else max_plan
        self._context = LlamaContext(weights, options, plan, threads)
        self._cells = KvCells(self._context, options.max_branches)
        self._unchanged = target.cells.track_prefix()
        try:
            self._check_cells_arrive_unchanged()
        except BaseException:
            target.cells.untrack_prefix(self._unchanged)
            self._context.close()
            raise
        width = (
            self._context.max_width
            if full
            else plan.tokens - self._sinks - self._window - _WINDOW_STEP_TOKENS
        )
        capabilities = target.facts.capabilities
        max_width = min(width, capabilities.max_width)
        capabilities = replace(capabilities, max_width=max_width, self_draft_methods=frozenset())
        result = ProbeResult(capabilities, "overwritten")
        facts = describe(weights, path, name, max_plan, self.vocabulary, result)
        self.facts = replace(
            facts,
            weight_bytes=weight_bytes,
            context_tokens=target.facts.context_tokens,
            requested_context_tokens=target.max_plan.tokens,
            kv_bytes=plan.kv_bytes,
            notice="",
        )
        self._options = options

    @property
    def free_tokens(self) -> int:
        room = self._target.free_tokens
        return max(0, min(room, self._context.tokens - self.length)) if self._has_full_context else room

    def resized(self) -> None:
        """Resize the draft model's context to match the target's, or keep its size if memory is short."""
        super().resized()
        if not self._has_full_context:
            return
        if not self.facts.context_tokens:
            # The target lost its KV cache, so free the copy's as well until the target's is reallocated. With
            # a size of 0, llama.cpp would allocate the trained context length.
            self._cells.truncate(0)
            self._context.release()
            self.facts = replace(self.facts, kv_bytes=0)
            return
        plan = self._context.plan.with_tokens(self.facts.context_tokens)
        try:
            check_resize_fits([self._context.plan], [plan], self.facts.weight_bytes, self._options)
            self._cells.truncate(min(self._cells.length, self._unchanged.tokens))
            rebuild_context(self._context, plan, self._cells.length)
        except MemoryBudgetError:
            pass
        finally:
            if self._context.is_lost:
                self._cells.length = 0
        self.facts = replace(self.facts, kv_bytes=self._context.plan.kv_bytes)

    def _check_cells_arrive_unchanged(self) -> None:
        target = self._target
        if is_empty := target.length == 0:
            target.prefill([0, 0])
        count = min(2, target.length)
        try:
            parts = target.export_cells(0, count)
        finally:
            if is_empty:
                target.truncate(0)
        handed = (
            self._context.import_cells(parts, 0, count) and self._context.export_cells(0, 0, count) == parts
        )
        if not handed or not np.isfinite(self._context.run([0], [count], [[0]])).all():
            raise CapabilityError(
                f"the low-bit copy cannot use the KV cache of {target.facts.name}",
                "recreate the copy with `edgespec prepare lowbit`",
                code="lowbit_not_supported",
            )
        self._cells.truncate(0)

    def verify(self, tree: TokenTree, first: int = 0) -> HostLogits:
        self._check()
        try:
            self._check_fits(tree.width)
            check_draft_width(tree.width, self.facts.capabilities.max_width)
            if first == 0:
                self._copy_target_cells()
            positions, sequences = self._cells.place_tree(tree, first)
            return HostLogits(self._context.run(tree.tokens[first:], positions, sequences))
        except (BackendError, ContextFullError, CancelledError):
            self._cells.end_round()
            raise

    def _copy_target_cells(self) -> None:
        cells, length = self._cells, self._target.length
        passed = (length - self._window - self._sinks) // _WINDOW_STEP_TOKENS * _WINDOW_STEP_TOKENS
        begin = self._sinks + max(0, passed)
        same = min(cells.length, self._unchanged.tokens)
        if same < cells.length and self._begin > self._sinks:
            # After a rollback, the attention window can include tokens whose KV cells were removed, so copy
            # all cells again.
            same = 0
        if begin > self._begin and self._context.window:
            # Removing old KV cells would leave gaps in sliding-window layers, so copy all cells again.
            same = 0
        try:
            cells.truncate(same)
            if same <= self._sinks:
                self._copy_range(same, min(self._sinks, length))
            elif begin > self._begin:
                self._context.drop(0, self._begin, min(begin, same))
            self._begin = begin
            self._copy_range(max(begin, cells.length), length)
        except BaseException:
            self._context.clear()
            cells.truncate(0)
            raise
        cells.length = self._unchanged.tokens = length

    def _copy_range(self, start: int, end: int) -> None:
        for begin in range(start, end, _COPY_CHUNK_TOKENS):
            if self._context.interrupt.requested:
                raise CancelledError("the model's computation was cancelled")
            stop = min(begin + _COPY_CHUNK_TOKENS, end)
            if not self._context.import_cells(self._target.export_cells(begin, stop), begin, stop):
                raise BackendError(
                    f"{stop - begin} tokens in the KV cache of {self._target.facts.name} cannot be copied"
                    " to the draft model",
                    "choose another --method",
                )
            self._cells.length = stop

    def interrupt(self, enabled: bool) -> None:
        self._context.set_interrupt(enabled)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._target.cells.untrack_prefix(self._unchanged)
        self._context.close()
        library().llama_model_free(self._weights)
        release_free_memory()
