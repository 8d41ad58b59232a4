"""A GGUF model behind the LanguageModel Protocol."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from edgespec.backends.base import (
    LanguageModel,
    LoadOptions,
    ModelFacts,
    Progress,
    SelfDraft,
    Snapshot,
    Vocabulary,
)
from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.backends.llamacpp.files import default_threads, describe, load_weights
from edgespec.backends.llamacpp.kv_types import parse_kv_types
from edgespec.backends.llamacpp.moments import Moment, Moments
from edgespec.backends.llamacpp.native import library
from edgespec.backends.llamacpp.planning import plan_context
from edgespec.backends.llamacpp.probe import Findings, probe
from edgespec.backends.llamacpp.saved import from_bytes, to_bytes
from edgespec.backends.llamacpp.vocabulary import LlamaVocabulary
from edgespec.backends.replay import ReplayModel
from edgespec.backends.room import check_tokens_fit
from edgespec.engine.logits import HostLogits
from edgespec.engine.tree import TokenTree
from edgespec.errors import (
    BackendError,
    CancelledError,
    CapabilityError,
    ClosedError,
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


class LlamaCppModel:
    """One GGUF model with one KV cache.

    Sequence 0 holds the committed tokens. In a round every branch of the tree is a sequence of its own
    that shares the cells of its ancestors: the first child goes on with its parent's sequence, each
    further child opens a new one. Committing keeps one sequence as the new sequence 0.
    With a recurrent memory there are chains only, and the other sequences hold checkpoints.
    """

    def __init__(self, weights: Any, path: str, name: str, options: LoadOptions) -> None:
        self._weights = weights
        self._max_branches = options.max_branches
        self._closed = False
        self._vocabulary = LlamaVocabulary(weights)
        self.vocabulary: Vocabulary = self._vocabulary
        if self.vocabulary.size == 0:
            raise ModelFileError(
                f"{path} has no vocabulary", "choose a file that holds a whole language model"
            )
        plan = plan_context(weights, options)
        threads = options.threads or default_threads(library().llama_model_size(weights))
        self._context = LlamaContext(weights, options, plan, threads)
        self._moments = Moments(self._context, range(1, plan.sequences))
        try:
            self.found: Findings = probe(self._context, weights, plan, options, self._moments)
            self.facts: ModelFacts = describe(weights, path, name, plan, self.vocabulary, self.found)
        except BaseException:
            self._context.close()
            raise
        self._length = 0
        self._recurrent = plan.recurrent
        # A drop of the last pass's tokens chose an earlier state, and no pass has taken it up yet.
        self._chosen = False
        self._sequence_of: list[int] = []
        self._position_of: list[int] = []

    @property
    def length(self) -> int:
        return self._length

    @property
    def room(self) -> int:
        return self._context.tokens - self._length

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        self._check(len(tokens))
        self._end_round()
        step = self._context.batch_tokens
        for start in range(0, len(tokens), step):
            chunk = tokens[start : start + step]
            self._chosen = False
            try:
                self._context.append(chunk, self._length)
            except (BackendError, ContextFullError, CancelledError):
                self._forget_after(self._length)
                raise
            self._length += len(chunk)
            if progress and not progress("prefill", (start + len(chunk)) / len(tokens)):
                raise CancelledError("cancelled")

    def verify(self, tree: TokenTree, first: int = 0) -> HostLogits:
        try:
            self._check(tree.width)
            if first == 0:
                self._end_round()
            sequences = self._place(tree, first)
            self._chosen = False
            rows = self._context.run(tree.tokens[first:], self._position_of[first:], sequences)
        except (BackendError, ContextFullError, CancelledError):
            self._end_round()
            raise
        return HostLogits(rows)

    def _place(self, tree: TokenTree, first: int) -> list[list[int]]:
        """Give nodes from `first` on a position and a sequence; the sequences that pass through each."""
        able = self.facts.capabilities
        if not (able.rollback or tree.width == 1 or (self.found.replays and tree.is_chain)):
            raise CapabilityError(f"{self.facts.name} cannot verify drafts", able.reason)
        if tree.width > self._context.max_width:
            raise CapabilityError(f"a tree of {tree.width} tokens is wider than {self._context.max_width}")
        passing: list[list[int]] = []
        parented = set(tree.parents[1:first])
        used = max(self._sequence_of, default=0)
        for node in range(first, tree.width):
            parent = tree.parents[node]
            self._position_of.append(self._length if parent < 0 else self._position_of[parent] + 1)
            if parent < 0 or parent not in parented:
                parented.add(parent)
                sequence = 0 if parent < 0 else self._sequence_of[parent]
            else:
                used += 1
                sequence = used
                self._branch(tree, parent, sequence, first, passing)
            self._sequence_of.append(sequence)
            passing.append([sequence])
        return passing

    def _branch(
        self, tree: TokenTree, parent: int, sequence: int, first: int, passing: list[list[int]]
    ) -> None:
        """Open a sequence that shares all ancestors from `parent` up."""
        if sequence >= self._max_branches:
            self._end_round()
            raise CapabilityError(
                f"the tree has more than the {self._max_branches} branches the model was loaded for"
            )
        while parent >= first:
            passing[parent - first].append(sequence)
            parent = tree.parents[parent]
        source, end = (
            (0, self._length) if parent < 0 else (self._sequence_of[parent], self._position_of[parent] + 1)
        )
        self._context.copy(source, sequence, 0, end)

    def commit(self, path: tuple[int, ...]) -> None:
        self._check(0)
        kept = path[-1] if path else 0
        length = self._position_of[kept] + 1
        if kept == len(path):
            # The path is the first nodes of the pass: their cells lie in order already.
            self._chosen = self.found.replays and length < self._position_of[-1] + 1
            self._forget_after(length)
        else:
            self._context.close_ranks(self._sequence_of[kept], self._length, length)
            self._sequence_of, self._position_of = [], []
        self._length = length

    def _end_round(self) -> None:
        if self._sequence_of:
            self._forget_after(self._length)

    def _forget_after(self, length: int) -> None:
        """Keep `length` tokens of sequence 0 and nothing of any branch."""
        for sequence in range(1, max(self._sequence_of, default=0) + 1):
            self._context.drop(sequence, 0)
        if not self._context.drop(0, length) and not self.found.replays:
            # A memory that cannot be cut back: what is left of it is not the beginning of anything.
            self._context.clear()
            self._length = 0
        self._sequence_of, self._position_of = [], []

    def truncate(self, length: int) -> None:
        self._check(0)
        self._moments.tidy()
        self._length = min(length, self._length)
        self._forget_after(self._length)

    def forget(self, start: int, end: int) -> None:
        self._check(0)
        if self._recurrent or not self._context.can_shift:
            raise CapabilityError(f"{self.facts.name} cannot move its keys to other positions")
        self._end_round()
        end = min(end, self._length)
        if start < end:
            self._context.close_up(start, end)
            self._length -= end - start

    def checkpoint(self) -> Moment:
        """The memory now; shared until it is written to."""
        self._check(0)
        if self._chosen:
            self._context.settle()
            self._chosen = False
        return self._moments.take(self._length)

    def rewind(self, checkpoint: Moment) -> None:
        """Make the memory what it was; ends the round, whatever became of it."""
        self._check(0)
        self._moments.go_back(checkpoint)
        self._length, self._chosen = checkpoint.length, False
        self._sequence_of, self._position_of = [], []

    def snapshot(self) -> Snapshot:
        self._check(0)
        self._end_round()
        return Snapshot(self._length, to_bytes(self._context, self._length, self._recurrent))

    def restore(self, snapshot: Snapshot) -> None:
        self._check(0)
        self._end_round()
        self._length = 0
        self._context.clear()
        if not from_bytes(self._context, snapshot.data, snapshot.length, self._recurrent):
            self._context.clear()
            raise BackendError("the saved state does not fit this model and context", "compute it again")
        self._length = snapshot.length

    def run_ahead(self, wanted: bool) -> None:
        pass  # nothing runs in the background

    def follow(self, draft: LanguageModel | None) -> None:
        pass  # nothing runs in the background

    def self_draft(self, how: SelfDraft) -> LanguageModel:
        raise CapabilityError(f"{self.facts.name} cannot draft for itself ({how})")

    def interrupt(self, wanted: bool) -> None:
        self._context.interrupt.wanted = wanted

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._vocabulary.close()
        self._context.close()
        library().llama_model_free(self._weights)
        gc.collect()

    def _check(self, more: int) -> None:
        if self._closed:
            raise ClosedError(f"{self.facts.name} is closed")
        check_tokens_fit(self, more)
