"""Load a GGUF model for concurrent replies that share its weights and forward passes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llamacpp.context import LlamaContext, LoraAdapters, adapter_bytes
from edgespec.backends.llamacpp.context_plan import parse_kv_types
from edgespec.backends.llamacpp.context_planning import cache_variant, plan_context
from edgespec.backends.llamacpp.embedding import Pooling
from edgespec.backends.llamacpp.head_target import HeadTarget, SharedHeads
from edgespec.backends.llamacpp.image_encoder import NO_PROJECTOR, ImageEncoder, ImagePart, open_encoder
from edgespec.backends.llamacpp.kv_cells import KvCells
from edgespec.backends.llamacpp.kv_sequences import export_text, import_text
from edgespec.backends.llamacpp.loading import describe, free_weights, load_all, threads_for, with_more_memory
from edgespec.backends.llamacpp.metadata import vocabulary_size
from edgespec.backends.llamacpp.mtp_files import unloaded_bytes
from edgespec.backends.llamacpp.probe import probe
from edgespec.backends.llamacpp.shared_context import (
    ContextSlot,
    SharedContext,
    check_slots,
    max_pass_tokens,
    why_not_shared,
)
from edgespec.backends.llamacpp.vocabulary import LlamaVocabulary
from edgespec.engine.logits import HostLogits
from edgespec.engine.tree import TokenTree
from edgespec.errors import (
    BackendError,
    CancelledError,
    CapabilityError,
    ContextFullError,
    MemoryBudgetError,
    ModelFileError,
)
from edgespec.model.base import Head, LanguageModel, LoadOptions, LowBit, Progress, SelfDraft, Snapshot
from edgespec.model.base_model import check_progress, split_last_batch
from edgespec.model.image import Image
from edgespec.model.image_tokens import PreparedImage, contains_image
from edgespec.model.memory_estimate import check_draft_width
from edgespec.model.model_facts import ModelFacts

__all__ = ["SlotModel", "load_slots"]


def load_slots(
    path: str, name: str, options: LoadOptions, progress: Progress | None = None
) -> Sequence[LanguageModel]:
    """Load a GGUF model once for `options.parallel` concurrent replies.

    Returns:
        One model per reply. The models share weights and forward passes, but each has its own KV cache and
        must be closed.

    Raises:
        CapabilityError: Replies cannot share the passes of this model.
        OptionError: An option is invalid for this model.
        EdgespecError: See `load` for the other errors.
    """
    if options.kv_type != "auto":
        parse_kv_types(options.kv_type)
    weights, stream = load_all(path, name, options, progress)
    context: LlamaContext | None = None
    encoder: ImageEncoder | None = None
    try:
        if not vocabulary_size(weights):
            raise ModelFileError(
                f"{path} has no vocabulary", "choose a complete language model", code="model_file_incomplete"
            )
        if why := why_not_shared(weights):
            raise CapabilityError(
                f"{name} cannot generate several replies at once: {why}",
                "omit --parallel",
                code="parallel_not_supported",
            )
        plan = plan_context(weights, with_more_memory(path, options, stream))
        check_slots(plan, options)
        adapters = LoraAdapters(weights, options.adapters)
        context = LlamaContext(
            *(weights, options, plan, threads_for(weights, options)), adapters=adapters, stream=stream
        )
        encoder = open_encoder(weights, options)
        result = probe(context, weights, options)
        max_width = min(result.capabilities.max_width, max_pass_tokens(context))
        heads = result.capabilities.self_draft_methods - {LowBit.method}
        capabilities = replace(result.capabilities, max_width=max_width, self_draft_methods=heads)
        vocabularies = [LlamaVocabulary(weights) for _ in range(plan.slots)]
        facts = describe(
            weights, path, name, plan.share, vocabularies[0], replace(result, capabilities=capabilities)
        )
        facts = replace(
            facts,
            weight_bytes=facts.weight_bytes
            - (stream.saved_bytes if stream else 0)
            - (0 if options.own_head else unloaded_bytes(Path(path)))
            + adapter_bytes(options.adapters),
            cache_variant=cache_variant(weights, plan.share),
            adapters=options.adapters,
            sees_images=encoder is not None,
        )

        def free() -> None:
            if encoder:
                encoder.close()
            free_weights(weights, stream)

        shared = SharedContext(context, free)
        for slot in shared.slots:
            slot.has_wide_images = encoder is not None and encoder.has_wide_positions
    except BaseException:
        if context:
            context.close()
        if encoder:
            encoder.close()
        free_weights(weights, stream)
        raise
    loaded_heads = SharedHeads()
    return [
        SlotModel(facts, slot, vocabulary, weights, options, loaded_heads, encoder)
        for slot, vocabulary in zip(shared.slots, vocabularies, strict=True)
    ]


class SlotModel(HeadTarget):
    """One reply's view of a GGUF model that several concurrent replies share.

    Each reply can use its model in its own thread. Passes of different replies are batched, but a failure or
    cancellation affects only the reply that caused it. The context cannot be resized.

    Args:
        facts: The model's facts, with the reply's share of the context.
        slot: The reply's slot in the shared context.
        vocabulary: The reply's own tokenizer. Closed by `close`.
        weights: The llama_model handle.
        options: The options that the model was loaded with.
        heads: The heads loaded for the model.
        encoder: The model's image projector, or None if it has none.
    """

    why_blind = NO_PROJECTOR

    def __init__(
        self,
        facts: ModelFacts,
        slot: ContextSlot,
        vocabulary: LlamaVocabulary,
        weights: Any,
        options: LoadOptions,
        heads: SharedHeads,
        encoder: ImageEncoder | None = None,
    ) -> None:
        self.facts, self.options, self.weights = facts, options, [weights]
        self.vocabulary = self._vocabulary = vocabulary
        self._slot, self._pooling = slot, Pooling.of(weights)
        self.slot, self.max_plan = slot.index, slot.plan
        self._cells = KvCells(slot, options.max_branches)
        self._heads, self._tree_states = heads, []
        self._encoder = encoder

    @property
    def length(self) -> int:
        return self._cells.length

    @property
    def threads(self) -> int:
        return self._slot.threads

    @property
    def max_threads(self) -> int:
        return self._slot.max_threads if self._slot.adapts_threads else 0

    def fix_threads(self, fixed: bool) -> None:
        self._slot.shared.fix_threads(fixed)

    def watch_memory(self, spare_bytes: Callable[[], int]) -> None:
        self._slot.shared.watch_memory(spare_bytes)

    def set_max_threads(self, threads: int) -> None:
        self._slot.shared.set_max_threads(threads)

    def prepare_image(self, image: Image) -> PreparedImage:
        self._check(0)
        return self._encoder.prepare(image) if self._encoder else super().prepare_image(image)

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        self._check(len(tokens))
        self._cells.end_round()
        if self._encoder is None or not contains_image(tokens):
            self._append_text(tokens, progress)
            return
        for run, part_progress in self._encoder.runs(tokens, progress):
            if isinstance(run, ImagePart):
                self._append_image(run, self._encoder)
                check_progress(part_progress)
            else:
                self._append_text(run, part_progress)

    def _append_image(self, part: ImagePart, encoder: ImageEncoder) -> None:
        rows, size, start = encoder.encode(part), self._slot.whole.batch_tokens, self.length
        positions = part.positions_from(self._slot.position(start))
        try:
            for at in range(0, len(rows), size):
                self._slot.append_image(
                    part.tokens[at : at + size],
                    rows[at : at + size],
                    positions[:, at : at + size],
                    is_causal=part.is_causal,
                )
        except (BackendError, ContextFullError, CancelledError):
            self._cut(start)
            raise
        if encoder.has_wide_positions:
            self._slot.add_image(start, len(rows), part.position_count)
        self._cells.length += len(rows)

    def _append_text(self, tokens: Sequence[int], progress: Progress | None) -> None:
        done = 0
        while done < len(tokens):
            batch = tokens[done : done + self._slot.batch_tokens]
            try:
                part = self._slot.append(batch, self.length)
            except (BackendError, ContextFullError, CancelledError):
                self._cells.truncate(self.length)
                raise
            if self.logs.states:
                self.logs.append(self.length, part.states)
            self._cells.length += len(batch)
            done += len(batch)
            if progress and not progress("reading the prompt", done / len(tokens)):
                raise CancelledError("prompt processing was cancelled")

    def prefill_prompt(self, tokens: Sequence[int], progress: Progress | None = None) -> HostLogits:
        self._check(len(tokens))
        before, batch, part_progress = split_last_batch(tokens, self._slot.batch_tokens, progress)
        self.prefill(before, part_progress)
        try:
            part = self._slot.append(batch, self.length, outputs=1)
            check_progress(progress)
        except (BackendError, ContextFullError, CancelledError):
            self._cells.truncate(self.length)
            raise
        if self.logs.states:
            self.logs.append(self.length, part.states[:-1])
            self._tree_states = [part.states[-1]]
        self._cells.length += len(batch) - 1
        self._cells.place_tree(TokenTree.chain(batch[-1]), 0)
        return HostLogits(part.rows, part.pass_tokens - 1)

    def embed(self, tokens: Sequence[int], progress: Progress | None = None) -> NDArray[np.float32]:
        text = self._pooling.whole_text(tokens)
        self._check(len(text))
        batch_tokens = min(self._slot.batch_tokens, self._slot.max_width)
        try:
            return self._pooling.embed(text, self._slot.run_states, batch_tokens, progress)
        finally:
            self._cut(0)

    def verify(self, tree: TokenTree, first: int = 0) -> HostLogits:
        try:
            self._check(tree.width)
            check_draft_width(tree.width, self._slot.max_width)
            if first == 0:
                self._cells.end_round()
            positions, sequences = self._cells.place_tree(tree, first)
            part = self._slot.run(tree.tokens[first:], positions, sequences)
        except (BackendError, ContextFullError, CancelledError):
            self._cells.end_round()
            raise
        if self.logs.states:
            self._tree_states[first:] = part.states
        return HostLogits(part.rows, part.pass_tokens - len(positions))

    def commit(self, path: tuple[int, ...]) -> None:
        self._check(0)
        self._log_commit(path)
        self._cells.commit(path)

    def truncate(self, length: int) -> None:
        self._check(0)
        self._cut(min(length, self.length))

    def _cut(self, length: int) -> None:
        """Truncate the KV cache to the first `length` tokens, and discard drafted tokens."""
        self._cells.truncate(length)
        self.logs.truncate(length)

    def _end_round(self) -> None:
        self._cells.end_round()

    def remove_range(self, start: int, end: int) -> None:
        self._check(0)
        if not self._slot.shared.can_shift:
            raise CapabilityError(
                f"{self.facts.name} cannot move cached keys to other positions",
                "truncate the cache, and process the remaining tokens again",
                code="rollback_not_supported",
            )
        self._cells.end_round()
        end = min(end, self.length)
        if start < end:
            self._slot.remove_range(start, end)
            self._cells.length -= end - start
        self.logs.clear()

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:
        self._check(0)
        self._cells.end_round()
        start, end = self._span(start, end)
        return Snapshot(end, export_text(self._slot, start, end), start)

    def restore(self, snapshot: Snapshot) -> None:
        self._check(0)
        self._cut(self.length if snapshot.start else 0)
        start, length = snapshot.start, snapshot.length
        if not (
            self.length == start <= length <= self._slot.tokens
            and import_text(self._slot, memoryview(snapshot.data), start, length)
        ):
            self._cut(min(start, self.length))
            raise BackendError(
                "the saved KV cache belongs to another model, or does not fit in the context",
                "process the prompt again",
                code="state_not_restored",
            )
        self._cells.length = length

    def resize(self, context_tokens: int) -> None:
        """Raise MemoryBudgetError if `context_tokens` exceeds the context's fixed size."""
        self._check_size(context_tokens)
        if context_tokens > self._slot.tokens:
            raise MemoryBudgetError(
                f"with --parallel, the context cannot grow beyond {self._slot.tokens:,} tokens per reply",
                "load the model again with a larger --context",
                code="context_fixed",
            )
        self._cells.end_round()

    @property
    def context(self) -> LlamaContext:
        return self._slot.whole

    def _tap_states(self) -> None:
        self._slot.shared.tap_states(self.slot, self.logs.states)

    def _allocate_for_states(self) -> None:
        self._slot.shared.allocate_for_states()

    def self_draft(self, method: SelfDraft) -> LanguageModel:
        self._check(0)
        if isinstance(method, Head):
            return self._head_view(method)
        raise CapabilityError(
            f"{self.facts.name} cannot be its own draft model while it generates several replies at once",
            "omit --parallel, or choose another method, such as model or suffix",
            code="parallel_not_supported",
        )

    def set_adapter_scales(self, scales: Sequence[float]) -> None:  # noqa: ARG002
        raise CapabilityError(
            f"the adapter scales of {self.facts.name} are fixed while it generates several replies at once"
            " (--parallel)",
            "omit --parallel, or load the model with other scales in --adapter",
            code="parallel_not_supported",
        )

    def interrupt(self, enabled: bool) -> None:
        self._slot.set_interrupt(enabled)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._slot.clear()
        # Free the weights only once no slot is tokenizing text.
        self._vocabulary.close(self._slot.shared.release)
        gc.collect()
