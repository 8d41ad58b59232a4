"""Implement `LanguageModel` for GGUF models."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from edgespec.backends.base import (
    EarlyExit,
    LanguageModel,
    LoadOptions,
    ModelFacts,
    Progress,
    SelfDraft,
    SkippedLayers,
    Snapshot,
    Vocabulary,
)
from edgespec.backends.base_model import BaseModel, in_batches
from edgespec.backends.llamacpp.checkpoints import StateCheckpoint, StateCheckpoints
from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.backends.llamacpp.context_planning import plan_context
from edgespec.backends.llamacpp.kv_cells import KvCells
from edgespec.backends.llamacpp.kv_types import parse_kv_types
from edgespec.backends.llamacpp.loading import describe, load_weights, threads_for
from edgespec.backends.llamacpp.lowbit import load_low_bit_view
from edgespec.backends.llamacpp.native import library
from edgespec.backends.llamacpp.probe import ProbeResult, probe
from edgespec.backends.llamacpp.resizing import (
    cache_variant,
    check_resize_fits,
    initial_plan,
    rebuild_context,
)
from edgespec.backends.llamacpp.shared_target import SharedTarget
from edgespec.backends.llamacpp.snapshots import snapshot_from_bytes, snapshot_to_bytes
from edgespec.backends.llamacpp.vocabulary import LlamaVocabulary
from edgespec.backends.memory_check import round_up_to_block
from edgespec.backends.replay import ReplayModel
from edgespec.engine.logits import HostLogits
from edgespec.engine.tree import TokenTree
from edgespec.errors import (
    BackendError,
    CancelledError,
    CapabilityError,
    ContextFullError,
    ModelFileError,
)

__all__ = ["LlamaCppModel", "load"]


def load(path: str, name: str, options: LoadOptions, progress: Progress | None = None) -> LanguageModel:
    """Load a GGUF model.

    Args:
        path: The GGUF file, or the first file of a model in several parts.
        name: The model's name, used in progress reports and error messages.
        options: The load options.
        progress: Called repeatedly while the weights are loaded. Returns False to cancel.

    Returns:
        The model, wrapped in a `ReplayModel` if it can only be rolled back with checkpoints.

    Raises:
        ModelFileError: The file is not a GGUF file, is damaged, or has an unsupported architecture.
        MemoryBudgetError: The weights or the context exceed the memory budget or cannot be allocated.
        OptionError: An option is invalid for this model.
        BackendMissingError: llama-cpp-python is not installed.
        CancelledError: `progress` returned False.
    """
    if options.kv_type != "auto":
        parse_kv_types(options.kv_type)  # Report invalid types before loading, which may take minutes.
    weights = load_weights(path, name, options, progress)
    try:
        model = LlamaCppModel(weights, path, name, options)
    except BaseException:
        library().llama_model_free(weights)
        raise
    result = model.probe_result
    return ReplayModel(model, result.capabilities.reason, result.undo_tokens) if result.replays else model


class LlamaCppModel(BaseModel):
    """A GGUF model that runs in a single context.

    A model with recurrent layers can only verify chains, so its additional sequences hold checkpoints instead
    of branches.

    Args:
        weights: The llama_model handle, which `close` frees.
        path: The GGUF file.
        name: The model's name.
        options: The load options.

    Attributes:
        probe_result: The capabilities that were measured when the model was loaded.

    Raises:
        ModelFileError: The model has no vocabulary or cannot generate text.
        MemoryBudgetError: The context exceeds the memory budget or cannot be allocated.
        OptionError: An option is invalid for this model.
    """

    def __init__(self, weights: Any, path: str, name: str, options: LoadOptions) -> None:
        self._weights = weights
        self._vocabulary = LlamaVocabulary(weights)
        self.vocabulary: Vocabulary = self._vocabulary
        if self.vocabulary.size == 0:
            raise ModelFileError(f"{path} has no vocabulary", "choose a complete language model")
        max_plan = plan_context(weights, options)
        plan = initial_plan(weights, max_plan, options)
        threads = threads_for(weights, options)
        self._context = LlamaContext(weights, options, plan, threads)
        self._checkpoints = StateCheckpoints(self._context, range(1, plan.sequences))
        try:
            result: ProbeResult = probe(self._context, weights, plan, options, self._checkpoints)
            facts = describe(weights, path, name, max_plan, self.vocabulary, result)
        except BaseException:
            self._context.close()
            raise
        self.probe_result = result
        self._cells = KvCells(self._context, options.max_branches, replays=result.replays)
        self.facts: ModelFacts = replace(
            facts,
            context_tokens=plan.tokens,
            kv_bytes=plan.kv_bytes,
            cache_variant=cache_variant(weights, max_plan),
        )
        self._options, self._max_plan = options, max_plan
        self._recurrent = plan.recurrent
        self._can_shift = plan.kv_types.can_shift_keys and not plan.recurrent and self._context.can_shift
        # Whether a rollback to an earlier recurrent state is pending. llama.cpp applies it in the next pass.
        self._rollback_pending = False

    @property
    def length(self) -> int:
        return self._cells.length

    @property
    def free_tokens(self) -> int:
        return self._context.tokens - self.length

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        self._check(len(tokens))
        self._cells.end_round()
        for batch in in_batches(tokens, self._context.batch_tokens, progress):
            self._rollback_pending = False
            try:
                self._context.append(batch, self.length)
            except (BackendError, ContextFullError, CancelledError):
                self._cells.truncate(self.length)
                raise
            self._cells.length += len(batch)

    def verify(self, tree: TokenTree, first: int = 0) -> HostLogits:
        try:
            self._check(tree.width)
            self._check_shape(tree)
            if first == 0:
                self._cells.end_round()
            positions, sequences = self._cells.place_tree(tree, first)
            self._rollback_pending = False
            rows = self._context.run(tree.tokens[first:], positions, sequences)
        except (BackendError, ContextFullError, CancelledError):
            self._cells.end_round()
            raise
        return HostLogits(rows)

    def _check_shape(self, tree: TokenTree) -> None:
        capabilities = self.facts.capabilities
        replays = self.probe_result.replays
        if not (capabilities.rollback or tree.width == 1 or (replays and tree.is_chain)):
            raise CapabilityError(f"{self.facts.name} cannot verify drafts", capabilities.reason)
        if tree.width > self._context.max_width:
            raise CapabilityError(
                f"a draft of {tree.width} tokens exceeds the limit of {self._context.max_width} per pass",
                "use a shorter --draft-length or fewer --draft-branches",
            )

    def commit(self, path: tuple[int, ...]) -> None:
        self._check(0)
        kept_all = self._cells.commit(path)
        self._rollback_pending = self.probe_result.replays and not kept_all

    def truncate(self, length: int) -> None:
        self._check(0)
        self._checkpoints.release_dropped()
        self._cells.truncate(min(length, self.length))
        self._rollback_pending = self._rollback_pending and self.length > 0

    def remove_range(self, start: int, end: int) -> None:
        self._check(0)
        if not self._can_shift:
            raise CapabilityError(
                f"{self.facts.name} cannot move cached keys to other positions",
                "truncate the cache and prefill the rest again",
            )
        if self._cells.is_tracked:
            raise CapabilityError(
                f"the KV cache of {self.facts.name} is in use by a low-bit draft", "close the draft first"
            )
        self._cells.end_round()
        end = min(end, self.length)
        if start < end:
            self._context.remove_range(start, end)
            self._cells.length -= end - start

    def checkpoint(self) -> StateCheckpoint:
        """Save a checkpoint of the cache. See `StateCheckpoints.save`."""
        self._check(0)
        self._apply_pending_rollback()
        return self._checkpoints.save(self.length)

    def _apply_pending_rollback(self) -> None:
        if self._rollback_pending:
            self._context.apply_rollback()
            self._rollback_pending = False

    def rewind(self, checkpoint: StateCheckpoint) -> None:
        """Roll the cache back to a checkpoint and discard the uncommitted tree."""
        self._check(0)
        self._checkpoints.restore(checkpoint)
        self._cells.length, self._rollback_pending = checkpoint.length, False
        self._cells.clear_round()

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:
        self._check(0)
        self._cells.end_round()
        start, end = self._span(start, end)
        return Snapshot(end, snapshot_to_bytes(self._context, start, end, self._recurrent), start)

    def restore(self, snapshot: Snapshot) -> None:
        self._check(0)
        self._cells.end_round()
        if not snapshot.start:
            self._cells.length, self._rollback_pending = 0, False
            self._context.clear()
        if not self._append_snapshot(snapshot):
            if snapshot.start:
                self._cells.truncate(min(snapshot.start, self.length))
            else:
                self._context.clear()
            raise BackendError("the snapshot does not fit this model and context", "prefill the tokens again")
        self._cells.length = snapshot.length

    def _append_snapshot(self, snapshot: Snapshot) -> bool:
        """Append a snapshot, and return whether it matched and started at the end of the cached tokens."""
        start, length = snapshot.start, snapshot.length
        fits = self.length == start <= length <= self._context.tokens
        return fits and snapshot_from_bytes(self._context, snapshot.data, start, length, self._recurrent)

    def resize(self, context_tokens: int) -> None:
        self._check_size(context_tokens)
        self._cells.end_round()
        context = self._context
        plan = context.plan.with_tokens(round_up_to_block(context_tokens))
        check_resize_fits([context.plan], [plan], self.facts.weight_bytes, self._options)
        self._apply_pending_rollback()
        try:
            rebuild_context(context, plan, self.length, recurrent=self._recurrent)
        finally:
            # The resize invalidated all checkpoints. Free the sequences of those that are no longer
            # referenced.
            self._checkpoints.release_dropped()
            if context.is_lost:
                self._cells.length = 0
                self._now_sized(0, 0)
        self._now_sized(plan.tokens, plan.kv_bytes)

    def self_draft(self, method: SelfDraft) -> LanguageModel:
        self._check(0)
        if isinstance(method, EarlyExit):
            raise CapabilityError(
                f"{self.facts.name} cannot draft by early exit, because it is not split at an exit layer",
                "run `edgespec prepare layerskip` for this model",
            )
        if isinstance(method, SkippedLayers):
            raise CapabilityError(
                f"{self.facts.name} cannot skip layers, because the method swift requires an MLX model",
                "choose another method or load an MLX version of the model",
            )
        view = load_low_bit_view(self._shared_target(), method)
        self._views.add(view)
        return view

    def _shared_target(self) -> SharedTarget:
        return SharedTarget(
            self,
            (self._weights,),
            (self._context,),
            self._cells,
            self._max_plan,
            self._options,
            self.check_open,
        )

    def interrupt(self, enabled: bool) -> None:
        self._context.interrupt.requested = enabled

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._vocabulary.close()
        self._context.close()
        library().llama_model_free(self._weights)
        gc.collect()
