"""Load a GGUF model that runs in a llama.cpp context of its own, or one that concurrent replies share.

The models of concurrent replies share its weights and forward passes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.backends.llamacpp.context import LlamaContext, LoraAdapters
from edgespec.backends.llamacpp.context_planning import initial_plan, plan_context, rebuild_context
from edgespec.backends.llamacpp.devices import on_cpu
from edgespec.backends.llamacpp.first_layers import first_layers_of_each_kind
from edgespec.backends.llamacpp.head_target import HeadTarget, SharedHeads, describe_target
from edgespec.backends.llamacpp.image_encoder import ImageEncoder, open_encoder
from edgespec.backends.llamacpp.kv_cells import Checkpoint, Checkpoints, KvCells
from edgespec.backends.llamacpp.loading import free_weights, load_all, threads_for, with_more_memory
from edgespec.backends.llamacpp.lowbit import load_low_bit_view
from edgespec.backends.llamacpp.probe import probe
from edgespec.backends.llamacpp.shared_context import (
    ContextSlot,
    SharedContext,
    check_slots,
    max_pass_tokens,
    why_not_shared,
)
from edgespec.backends.llamacpp.weight_stream import WeightStream
from edgespec.backends.replay import ReplayModel
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, CancelledError, CapabilityError, MemoryBudgetError
from edgespec.model.base import LanguageModel, LoadOptions, LowBit, Progress
from edgespec.model.base_model import SelfDraftView
from edgespec.model.model_facts import ModelFacts

__all__ = ["LlamaCppModel", "SlotModel", "load", "load_slots"]


def load(path: str, name: str, options: LoadOptions, progress: Progress | None = None) -> LanguageModel:
    """Load a GGUF model.

    Returns:
        The model, wrapped in a `ReplayModel` if it can only be rolled back with checkpoints.

    Raises:
        ModelFileError: The file is not a GGUF file, is damaged, or has an unsupported architecture.
        MemoryBudgetError: The weights or the context exceed the memory budget or cannot be allocated.
        OptionError: An option is invalid for this model.
        BackendMissingError: llama-cpp-python is not installed.
        CancelledError: `progress` returned False.
    """
    weights, stream = load_all(path, name, options, progress)
    try:
        model = LlamaCppModel(weights, path, name, options, stream)
    except BaseException:
        free_weights(weights, stream)
        raise
    result = model.probe_result
    return ReplayModel(model, result.capabilities.reason, result.undo_tokens) if result.replays else model


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
    weights, stream = load_all(path, name, options, progress)
    context: LlamaContext | None = None
    encoder: ImageEncoder | None = None
    try:
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
        result = replace(result, capabilities=capabilities)

        def free() -> None:
            if encoder:
                encoder.close()
            free_weights(weights, stream)

        shared, loaded_heads = SharedContext(context, free), SharedHeads()
        models = [SlotModel(weights, slot, options, loaded_heads, encoder) for slot in shared.slots]
        facts = describe_target(weights, path, name, plan.share, result, models[0], stream)
    except BaseException:
        if context:
            context.close()
        if encoder:
            encoder.close()
        free_weights(weights, stream)
        raise
    for model in models:
        model.facts = facts
    return models


class LlamaCppModel(HeadTarget):
    """A GGUF model that runs in a llama.cpp context of its own.

    A model with recurrent layers cannot verify draft trees, so its extra llama.cpp sequences hold checkpoints
    instead of branches.
    """

    _context: LlamaContext

    def __init__(
        self, weights: Any, path: str, name: str, options: LoadOptions, stream: WeightStream | None = None
    ) -> None:
        max_plan = plan_context(weights, with_more_memory(path, options, stream))
        plan = initial_plan(weights, max_plan, options)
        self._adapters = LoraAdapters(weights, options.adapters)
        self._path, self._stream = Path(path), stream
        context = LlamaContext(
            *(weights, options, plan, threads_for(weights, options)), adapters=self._adapters, stream=stream
        )
        encoder: ImageEncoder | None = None
        try:
            encoder = open_encoder(weights, options)
            context.has_wide_images = encoder is not None and encoder.has_wide_positions
            self.probe_result = result = probe(context, weights, options)
            cells = KvCells(context, options.max_branches, replays=result.replays)
            super().__init__(weights, context, cells, max_plan, options, SharedHeads(), encoder)
            self.streamed_layers = stream.layers if stream else ()
            facts = describe_target(weights, path, name, max_plan, result, self, stream)
            self.facts: ModelFacts = replace(facts, context_tokens=plan.tokens, kv_bytes=plan.kv_bytes)
        except BaseException:
            context.close()
            if encoder:
                encoder.close()
            raise
        self._checkpoints = Checkpoints(context)

    def set_adapter_scales(self, scales: Sequence[float]) -> None:
        self._check(0)
        self._adapters.scales = tuple(scales)
        self._context.apply_adapters()

    def _check_shape(self, tree: TokenTree) -> None:
        capabilities = self.facts.capabilities
        replays = self.probe_result.replays
        if not (capabilities.rollback or tree.width == 1 or (replays and tree.is_chain)):
            raise CapabilityError(f"{self.facts.name} cannot verify drafts", capabilities.reason)
        super()._check_shape(tree)

    def _commit_cells(self, path: tuple[int, ...]) -> None:
        kept_all = self.cells.commit(path)
        self._context.is_rolling_back = self.probe_result.replays and not kept_all

    def _cut(self, length: int) -> None:
        self._checkpoints.release_dropped()
        super()._cut(length)
        self._context.is_rolling_back = self._context.is_rolling_back and self.length > 0

    @property
    def context(self) -> LlamaContext:
        return self._context

    def close(self) -> None:
        if self._stream:
            self._stream.close()
        if self.encoder and not self._closed:
            self.encoder.close()
        super().close()

    def run_first_layers(self, enabled: bool) -> bool:
        self._check(0)
        self._cut(0)
        # Layers on different devices run different kernels, so the first layers would not be representative.
        # The first layers may have no adapter weights although others do.
        can_run = enabled and on_cpu(self.options) and not (self._recurrent or self.options.adapters)
        count = first_layers_of_each_kind(self._path) if can_run else 0
        if not count and not self._context.runs_first_layers:
            return False
        try:
            self._context.run_first_layers(count)
        except MemoryBudgetError:
            raise
        except BackendError:
            # llama.cpp does not name the layer outputs of all architectures.
            self._context.run_first_layers(0)
            return False
        return count > 0

    def _allocate_for_states(self) -> None:
        if self._context.is_stale:
            if self._context.is_lost:
                self._cut(0)
            rebuild_context(self._context, self._context.plan, self.length, recurrent=self._recurrent)
            self._now_sized(self.facts.context_tokens, self.facts.kv_bytes)

    def _low_bit_view(self, method: LowBit) -> SelfDraftView[Any]:
        return load_low_bit_view(self, method)

    def checkpoint(self) -> Checkpoint:
        """Save the state after the committed tokens, and return a checkpoint to pass to `rewind`."""
        self._check(0)
        self._context.apply_rollback()
        return self._checkpoints.save(self.length)

    def rewind(self, checkpoint: Checkpoint) -> None:
        """Restore the state at a checkpoint, and discard all later tokens."""
        self._check(0)
        self._checkpoints.restore(checkpoint)
        self.cells.length, self._context.is_rolling_back = checkpoint.length, False
        self.cells.clear_round()

    def resize(self, context_tokens: int) -> None:
        self._check(0)
        self._context.apply_rollback()
        try:
            super().resize(context_tokens)
        finally:
            # Free the llama.cpp sequences of checkpoints that are no longer in use.
            self._checkpoints.release_dropped()


class SlotModel(HeadTarget):
    """One reply's view of a GGUF model that several concurrent replies share.

    Each reply can use its model in its own thread. Passes of different replies are batched, but a failure or
    cancellation affects only the reply that caused it. The context cannot be resized.
    """

    _context: ContextSlot

    def __init__(
        self,
        weights: Any,
        slot: ContextSlot,
        options: LoadOptions,
        heads: SharedHeads,
        encoder: ImageEncoder | None,
    ) -> None:
        slot.has_wide_images = encoder is not None and encoder.has_wide_positions
        cells = KvCells(slot, options.max_branches)
        super().__init__(weights, slot, cells, slot.plan, options, heads, encoder)
        self.slot = slot.index

    def _batches(self, tokens: Sequence[int], progress: Progress | None) -> Iterator[Sequence[int]]:
        # Other replies can begin and end between two passes, which changes the size of the next batch.
        done = 0
        while done < len(tokens):
            batch = tokens[done : done + self._context.batch_tokens]
            yield batch
            done += len(batch)
            if progress and not progress("reading the prompt", done / len(tokens)):
                raise CancelledError("prompt processing was cancelled")

    def repeat_cached(self, end: int) -> bool:  # noqa: ARG002
        self._check(0)
        return False

    def resize(self, context_tokens: int) -> None:
        """Raise MemoryBudgetError if `context_tokens` exceeds the context's fixed size."""
        self._check_size(context_tokens)
        if context_tokens > self._context.tokens:
            raise MemoryBudgetError(
                f"with --parallel, the context cannot grow beyond {self._context.tokens:,} tokens per reply",
                "load the model again with a larger --context",
                code="context_fixed",
            )
        self._end_round()

    @property
    def context(self) -> LlamaContext:
        return self._context.whole

    def _allocate_for_states(self) -> None:
        self._context.shared.allocate_for_states()

    def _early_exit_view(self, exit_layer: int) -> SelfDraftView[Any]:  # noqa: ARG002
        raise self._only_one_reply()

    def _low_bit_view(self, method: LowBit) -> SelfDraftView[Any]:  # noqa: ARG002
        raise self._only_one_reply()

    def _only_one_reply(self) -> CapabilityError:
        return CapabilityError(
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

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._context.clear()
        # Free the weights only once no slot is tokenizing text.
        self._vocabulary.close(self._context.shared.release)
        gc.collect()
