"""Load a GGUF model for concurrent replies that share its weights and forward passes."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from edgespec.backends.llamacpp.context import LlamaContext, LoraAdapters
from edgespec.backends.llamacpp.context_plan import parse_kv_types
from edgespec.backends.llamacpp.context_planning import plan_context
from edgespec.backends.llamacpp.head_target import HeadTarget, SharedHeads, describe_target
from edgespec.backends.llamacpp.image_encoder import ImageEncoder, open_encoder
from edgespec.backends.llamacpp.kv_cells import KvCells
from edgespec.backends.llamacpp.loading import free_weights, load_all, threads_for, with_more_memory
from edgespec.backends.llamacpp.probe import probe
from edgespec.backends.llamacpp.shared_context import (
    ContextSlot,
    SharedContext,
    check_slots,
    max_pass_tokens,
    why_not_shared,
)
from edgespec.errors import CancelledError, CapabilityError, MemoryBudgetError
from edgespec.model.base import LanguageModel, LoadOptions, LowBit, Progress
from edgespec.model.base_model import SelfDraftView

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
