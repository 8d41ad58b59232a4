"""The base class for GGUF models, which run in one llama.cpp context, or in two if the model is split."""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.backends.llamacpp.context_plan import ContextPlan, choose_kv_types, has_latent_attention
from edgespec.backends.llamacpp.context_planning import check_resize_fits, rebuild_context
from edgespec.backends.llamacpp.kv_cells import KvCells
from edgespec.backends.llamacpp.kv_sequences import (
    export_text,
    first_part,
    import_text,
    merge_kv,
    sized_parts,
)
from edgespec.backends.llamacpp.metadata import LlamaVocabulary
from edgespec.backends.llamacpp.native import library
from edgespec.backends.llamacpp.shared_context import ContextSlot
from edgespec.engine.logits import HostLogits
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, CancelledError, CapabilityError, ContextFullError
from edgespec.model.base import (
    EarlyExit,
    Head,
    LanguageModel,
    LoadOptions,
    LowBit,
    Progress,
    SelfDraft,
    Snapshot,
    Vocabulary,
)
from edgespec.model.base_model import BaseModel, SelfDraftView, in_batches
from edgespec.model.memory_estimate import check_draft_width, round_up_to_block

__all__ = ["GgufModel"]


class GgufModel(BaseModel):
    """A GGUF model that runs in one llama.cpp context, or in two contexts for its lower and upper layers.

    With two contexts, both hold the same committed tokens, and the upper layers' context computes the logits.
    Subclasses set `facts`.

    Attributes:
        cells: The KV cells of the context that computes the model's logits.
        max_plan: The size and layout of the KV cache at the maximum context length.
        options: The options that the model was loaded with.
        streamed_layers: Indices of the layers whose feed-forward weights are read from disk in every pass.
        low_bit_error: Why the model cannot draft with a low-bit copy of itself, or None if it can.
    """

    def __init__(
        self,
        weights: Sequence[Any],
        contexts: Sequence[LlamaContext | ContextSlot],
        cells: Sequence[KvCells],
        max_plan: ContextPlan,
        options: LoadOptions,
    ) -> None:
        self.weights, self._contexts, self._all_cells = weights, contexts, cells
        self.cells, self._context = cells[-1], self._contexts[-1]
        self.max_plan, self.options = max_plan, options
        self.streamed_layers: tuple[int, ...] = ()
        self.low_bit_error: CapabilityError | None = None
        self._vocabulary = LlamaVocabulary(weights[0])
        self.vocabulary: Vocabulary = self._vocabulary
        self._recurrent = max_plan.recurrent
        self._can_shift = (
            max_plan.kv_types.can_shift_keys
            and not self._recurrent
            and all(context.can_shift for context in self._contexts)
        )

    @property
    def length(self) -> int:
        return self.cells.length

    @property
    def free_tokens(self) -> int:
        room = min(context.tokens for context in self._contexts) - self.length
        return room - self.facts.capabilities.padding_tokens

    @property
    def threads(self) -> int:
        return self._context.threads

    @property
    def max_threads(self) -> int:
        return self._context.max_threads

    def set_max_threads(self, threads: int) -> None:
        for context in self._contexts:
            context.set_max_threads(threads)

    def fix_threads(self, fixed: bool) -> None:
        for context in self._contexts:
            context.fix_threads(fixed)

    def watch_memory(self, spare_bytes: Callable[[], int]) -> None:
        for context in self._contexts:
            context.watch_memory(spare_bytes)

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        self._check(len(tokens))
        self._end_round()
        for batch in self._batches(tokens, progress):
            try:
                self._append(batch)
            except (BackendError, ContextFullError, CancelledError):
                # Truncate the KV cells but not the hidden-state logs: after a rollback, a recurrent model
                # reprocesses tokens whose hidden states are already known.
                for cells in self._all_cells:
                    cells.truncate(self.length)
                raise
            self.cells.length += len(batch)

    def _batches(self, tokens: Sequence[int], progress: Progress | None) -> Iterator[Sequence[int]]:
        """Split a prompt into the tokens of each pass. See `in_batches`."""
        return in_batches(tokens, self._context.batch_tokens, progress)

    @abstractmethod
    def _append(self, tokens: Sequence[int]) -> None:
        """Append tokens to the KV cache without computing their logits."""

    def _run(
        self, tree: TokenTree, first: int, run: Callable[[TokenTree, int], NDArray[np.float32]]
    ) -> HostLogits:
        """Run a token tree with `run`, and remove its tokens from the KV cache if that fails."""
        try:
            self._check(tree.width)
            self._check_shape(tree)
            if first == 0:
                self.cells.end_round()
            return HostLogits(run(tree, first), self._context.other_tokens)
        except (BackendError, ContextFullError, CancelledError):
            self._end_round()
            raise

    def _check_shape(self, tree: TokenTree) -> None:
        check_draft_width(tree.width, self._context.max_width)

    def truncate(self, length: int) -> None:
        self._check(0)
        self._cut(min(length, self.length))

    def _cut(self, length: int) -> None:
        """Truncate the KV cache to the first `length` tokens, and discard drafted tokens."""
        for cells in self._all_cells:
            cells.truncate(length)
        self.logs.truncate(self.length)

    def _end_round(self) -> None:
        """Remove rejected tokens from the KV cache."""
        for cells in self._all_cells:
            cells.end_round()

    def remove_range(self, start: int, end: int) -> None:
        self._check(0)
        if not self._can_shift:
            raise CapabilityError(
                f"{self.facts.name} cannot move cached keys to other positions",
                "truncate the cache, and process the remaining tokens again",
                code="rollback_not_supported",
            )
        if self.cells.is_tracked:
            raise CapabilityError(
                f"the KV cache of {self.facts.name} is in use by a low-bit draft model",
                "close the draft model first",
            )
        self._end_round()
        end = min(end, self.length)
        if start < end:
            for cells in self._all_cells:
                cells.context.remove_range(start, end)
                cells.length -= end - start

    def repeat_cached(self, end: int) -> bool:
        self._check(0)
        self._end_round()
        count = self.length
        if self._recurrent or self.cells.is_tracked:
            return False
        if not all(context.repeat_cells(count, end) for context in self._contexts):
            self._cut(count)
            return False
        for cells in self._all_cells:
            cells.length = max(end, count)
        return True

    def use_attention(self, options: LoadOptions) -> bool:
        self._check(0)
        self._cut(0)
        types = choose_kv_types(options, same_type=has_latent_attention(self.weights[0]))
        # Models with slots are not compared with other options.
        contexts = cast("Sequence[LlamaContext]", self._contexts)
        changes = [context.use_attention(types, options.flash_attention) for context in contexts]
        return any(changes)

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:
        self._check(0)
        self._end_round()
        start, end = self._span(start, end)
        *lower, last = (
            export_text(context, start, end, recurrent=self._recurrent) for context in self._contexts
        )
        return Snapshot(end, b"".join([*sized_parts(lower), last]), start)

    def restore(self, snapshot: Snapshot) -> None:
        self._check(0)
        self._end_round()
        if not snapshot.start:
            self._cut(0)
        start, length, data = snapshot.start, snapshot.length, memoryview(snapshot.data)
        fits = self.length == start <= length <= self._context.tokens
        for context in self._contexts:
            own, data = (data, data[:0]) if context is self._context else first_part(data)
            fits = fits and import_text(context, own, start, length, recurrent=self._recurrent)
        if not fits:
            self._cut(min(start, self.length))
            raise BackendError(
                "the saved KV cache belongs to another model, or does not fit in the context",
                "process the prompt again",
                code="state_not_restored",
            )
        for cells in self._all_cells:
            cells.length = length

    def resize(self, context_tokens: int) -> None:
        self._check_size(context_tokens)
        self._end_round()
        # Models with slots override this method.
        contexts = cast("Sequence[LlamaContext]", self._contexts)
        before = [context.plan for context in contexts]
        after = [plan.with_tokens(round_up_to_block(context_tokens)) for plan in before]
        check_resize_fits(before, after, self.facts.weight_bytes, self.options)
        try:
            for context, plan in zip(contexts, after, strict=True):
                rebuild_context(context, plan, self.length, recurrent=self._recurrent)
        except BaseException:
            for context, plan in zip(contexts, before, strict=True):
                if not context.is_lost:
                    rebuild_context(context, plan, self.length, recurrent=self._recurrent)
            # Notify the heads even if the size is unchanged, because their contexts may still refer to the
            # old context.
            self._now_sized(before[0].tokens, sum(plan.kv_bytes for plan in before))
            raise
        finally:
            if any(context.is_lost for context in contexts):
                self._cut(0)
                self._now_sized(0, 0)
        self._now_sized(after[0].tokens, sum(plan.kv_bytes for plan in after))

    def self_draft(self, method: SelfDraft) -> LanguageModel:
        self._check(0)
        view: SelfDraftView[Any]
        if isinstance(method, Head):
            view = self._head(method)
        elif isinstance(method, EarlyExit):
            view = self._early_exit_view(method.exit_layer)
        else:
            view = self._low_bit_view(method)
        self._views.add(view)
        return view

    @abstractmethod
    def _low_bit_view(self, method: LowBit) -> SelfDraftView[Any]:
        """Load a low-bit copy of the model that drafts using the model's KV cells."""

    def _early_exit_view(self, exit_layer: int) -> SelfDraftView[Any]:
        raise CapabilityError(
            f"{self.facts.name} cannot draft by exiting early after layer {exit_layer}, because it was not"
            " prepared for this",
            f"run `edgespec prepare layerskip --exit {exit_layer}` for this model",
            code="early_exit_not_supported",
        )

    def _head(self, method: Head) -> SelfDraftView[Any]:  # noqa: ARG002
        raise CapabilityError(
            f"{self.facts.name} cannot use a draft head, because it was prepared for early exit, so its lower"
            " and upper layers run separately",
            "load the original model file, or use --head none",
            code="head_not_supported",
        )

    def export_cells(self, start: int, end: int) -> Sequence[bytes | memoryview]:
        """Return the KV cells of all layers at positions [start, end), in llama.cpp's export format.

        Raises:
            CapabilityError: The model is split into two parts, and their KV cells cannot be merged.
        """
        lower, *upper = (context.export_cells(0, start, end) for context in self._contexts)
        return merge_kv(lower, upper[0], self.facts.name) if upper else lower

    def interrupt(self, enabled: bool) -> None:
        for context in self._contexts:
            context.set_interrupt(enabled)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for context in cast("Sequence[LlamaContext]", self._contexts):
            context.close()
        first, *others = self.weights
        for weights in others:
            library().llama_model_free(weights)
        self._vocabulary.close(partial(library().llama_model_free, first))
        gc.collect()
