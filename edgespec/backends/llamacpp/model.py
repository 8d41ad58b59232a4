"""A GGUF model behind the LanguageModel Protocol."""

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
    """Load a GGUF file.

    Raises ModelFileError (not a GGUF, damaged, unknown architecture), MemoryBudgetError, OptionError,
    BackendMissingError, and CancelledError when `progress` returns False.
    """
    if options.kv_type != "auto":
        parse_kv_types(options.kv_type)  # before minutes of loading, not after
    weights = load_weights(path, name, options, progress)
    try:
        model = LlamaCppModel(weights, path, name, options)
    except BaseException:
        library().llama_model_free(weights)
        raise
    found = model.found
    return ReplayModel(model, found.capabilities.reason, found.undo_tokens) if found.replays else model


class LlamaCppModel(BaseModel):
    """One GGUF model with one KV cache.

    Where its tokens are is kept by `KvCells`. With a recurrent memory there are chains only, and the
    sequences beside sequence 0 hold checkpoints.
    """

    def __init__(self, weights: Any, path: str, name: str, options: LoadOptions) -> None:
        self._weights = weights
        self._vocabulary = LlamaVocabulary(weights)
        self.vocabulary: Vocabulary = self._vocabulary
        if self.vocabulary.size == 0:
            raise ModelFileError(
                f"{path} has no vocabulary", "choose a file that holds a whole language model"
            )
        whole = plan_context(weights, options)
        plan = initial_plan(weights, whole, options)
        threads = threads_for(weights, options)
        self._context = LlamaContext(weights, options, plan, threads)
        self._checkpoints = StateCheckpoints(self._context, range(1, plan.sequences))
        try:
            self.found: ProbeResult = probe(self._context, weights, plan, options, self._checkpoints)
            facts = describe(weights, path, name, whole, self.vocabulary, self.found)
        except BaseException:
            self._context.close()
            raise
        self._cells = KvCells(self._context, options.max_branches, replays=self.found.replays)
        self.facts: ModelFacts = replace(
            facts,
            context_tokens=plan.tokens,
            kv_bytes=plan.kv_bytes,
            cache_variant=cache_variant(weights, whole),
        )
        self._options, self._whole = options, whole
        self._recurrent = plan.recurrent
        self._forgets = plan.kv_types.can_shift_keys and not plan.recurrent and self._context.can_shift
        # A drop of the last pass's tokens chose an earlier state, and no pass has taken it up yet.
        self._chosen = False

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
            self._chosen = False
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
            self._chosen = False
            rows = self._context.run(tree.tokens[first:], positions, sequences)
        except (BackendError, ContextFullError, CancelledError):
            self._cells.end_round()
            raise
        return HostLogits(rows)

    def _check_shape(self, tree: TokenTree) -> None:
        able = self.facts.capabilities
        if not (able.rollback or tree.width == 1 or (self.found.replays and tree.is_chain)):
            raise CapabilityError(f"{self.facts.name} cannot verify drafts", able.reason)
        if tree.width > self._context.max_width:
            raise CapabilityError(f"a tree of {tree.width} tokens is wider than {self._context.max_width}")

    def commit(self, path: tuple[int, ...]) -> None:
        self._check(0)
        whole = self._cells.commit(path)
        self._chosen = self.found.replays and not whole

    def truncate(self, length: int) -> None:
        self._check(0)
        self._checkpoints.release_dropped()
        self._cells.truncate(min(length, self.length))
        self._chosen = self._chosen and self.length > 0

    def remove_range(self, start: int, end: int) -> None:
        self._check(0)
        if not self._forgets:
            raise CapabilityError(f"{self.facts.name} cannot move its keys to other positions")
        if self._cells.is_tracked:
            raise CapabilityError(f"{self.facts.name} has lent its keys to a draft", "close the draft first")
        self._cells.end_round()
        end = min(end, self.length)
        if start < end:
            self._context.remove_range(start, end)
            self._cells.length -= end - start

    def checkpoint(self) -> StateCheckpoint:
        """The memory now; shared until it is written to."""
        self._check(0)
        self._take_up()
        return self._checkpoints.save(self.length)

    def _take_up(self) -> None:
        """Make an earlier state that was chosen the present one."""
        if self._chosen:
            self._context.apply_rollback()
            self._chosen = False

    def rewind(self, checkpoint: StateCheckpoint) -> None:
        """Make the memory what it was; ends the round, whatever became of it."""
        self._check(0)
        self._checkpoints.restore(checkpoint)
        self._cells.length, self._chosen = checkpoint.length, False
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
            self._cells.length, self._chosen = 0, False
            self._context.clear()
        if not self._put_down(snapshot):
            if snapshot.start:
                self._cells.truncate(min(snapshot.start, self.length))
            else:
                self._context.clear()
            raise BackendError("the saved state does not fit this model and context", "compute it again")
        self._cells.length = snapshot.length

    def _put_down(self, snapshot: Snapshot) -> bool:
        """Append it; False where the cache does not end there, or it does not fit."""
        start, length = snapshot.start, snapshot.length
        fits = self.length == start <= length <= self._context.tokens
        return fits and snapshot_from_bytes(self._context, snapshot.data, start, length, self._recurrent)

    def resize(self, context_tokens: int) -> None:
        self._check_size(context_tokens)
        self._cells.end_round()
        context = self._context
        plan = context.plan.with_tokens(round_up_to_block(context_tokens))
        check_resize_fits([context.plan], [plan], self.facts.weight_bytes, self._options)
        self._take_up()
        try:
            rebuild_context(context, plan, self.length, recurrent=self._recurrent)
        finally:
            # The sequences of checkpoints are empty now, and those that nobody holds may be taken again.
            self._checkpoints.release_dropped()
            if context.is_lost:
                self._cells.length = 0
                self._now_sized(0, 0)
        self._now_sized(plan.tokens, plan.kv_bytes)

    def self_draft(self, method: SelfDraft) -> LanguageModel:
        self._check(0)
        if isinstance(method, EarlyExit):
            raise CapabilityError(
                f"{self.facts.name} cannot draft for itself by early exit: it is loaded in one piece",
                "run `edgespec prepare layerskip` on its file",
            )
        if isinstance(method, SkippedLayers):
            raise CapabilityError(
                f"{self.facts.name} cannot draft for itself without some layers: that takes an MLX model",
                "choose another method",
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
            self._whole,
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
