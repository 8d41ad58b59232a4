"""Resize a context by exporting its cells, allocating a new context and importing the cells.

llama.cpp cannot resize a context in place. The format of exported cells is independent of the context size,
so the cells are bit-identical after a resize. The old memory is freed before the new memory is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.backends.llamacpp.context_plan import ContextPlan
from edgespec.backends.llamacpp.context_planning import check_contexts_fit
from edgespec.backends.llamacpp.devices import in_main_memory
from edgespec.backends.llamacpp.metadata import architecture_metadata
from edgespec.errors import BackendError, MemoryBudgetError
from edgespec.model.base import LoadOptions
from edgespec.model.memory_check import initial_context
from edgespec.system.heap import release_free_memory

__all__ = ["cache_variant", "check_resize_fits", "initial_plan", "longrope_switch_tokens", "rebuild_context"]


def initial_plan(weights: Any, max_plan: ContextPlan, options: LoadOptions) -> ContextPlan:
    """Return the plan for a context's initial size, from which it can grow to the size in `max_plan`."""
    if options.initial_context_tokens is None:
        return max_plan
    return max_plan.with_tokens(
        initial_context(max_plan.tokens, options.initial_context_tokens, longrope_switch_tokens(weights))
    )


def cache_variant(weights: Any, max_plan: ContextPlan) -> str:
    """Return a string that identifies the format of cached keys and values.

    KV cells can be moved only between contexts with the same string. When the string changes, prefix caches
    on disk become invalid.
    """
    switch = longrope_switch_tokens(weights)
    variant = f", turned for more than {switch}" if 0 < switch < max_plan.tokens else ""
    return max_plan.kv_types.text + variant


def longrope_switch_tokens(weights: Any) -> int:
    """Return the context size above which LongRoPE (arXiv 2402.13753) uses its factors for long contexts.

    Returns 0 if the model does not use LongRoPE. The factors are baked into the cached keys, so a resize must
    not cross this size.
    """
    if architecture_metadata(weights, "rope.scaling.type") not in (None, "longrope"):
        return 0
    return int(architecture_metadata(weights, "rope.scaling.original_context_length") or 0)


def check_resize_fits(
    before: Sequence[ContextPlan], after: Sequence[ContextPlan], weight_bytes: int, options: LoadOptions
) -> None:
    """Raise MemoryBudgetError if resized contexts would exceed the memory budget or the available memory."""
    if sum(plan.kv_bytes for plan in after) <= sum(plan.kv_bytes for plan in before):
        return
    if options.memory_bytes is not None:
        check_contexts_fit(after, weight_bytes, options)
    elif in_main_memory(options):
        # Count only the new KV caches: the weights are already loaded, and the old KV caches will be freed.
        check_contexts_fit(after, 0, options)


def rebuild_context(
    context: LlamaContext, plan: ContextPlan, length: int, *, recurrent: bool = False
) -> None:
    """Resize a context, or reallocate it if it is stale.

    Keeps sequence 0 and removes all other llama.cpp sequences.

    On failure, the old size and contents are restored. If that fails too, the context has no KV cache
    (`LlamaContext.is_lost`).

    Raises:
        MemoryBudgetError: The new context or the copy of the KV cells cannot be allocated.
    """
    old_plan = context.plan
    if plan == old_plan and not context.is_stale:
        return
    saved: Sequence[memoryview] = ()
    if length:
        try:
            saved = [context.export_sequence()] if recurrent else context.export_cells(0, 0, length)
        except MemoryError as error:
            raise MemoryBudgetError(
                f"the context cannot be resized: a copy of {length:,} cached tokens cannot be allocated",
                "close other programs or use a smaller --context",
                code="out_of_memory",
            ) from error
    try:
        _fill(context, plan, saved, length, recurrent)
    except BaseException:
        _fill(context, old_plan, saved, length, recurrent)
        raise
    # Free the saved KV cells and return their memory to the operating system.
    saved = ()
    release_free_memory()


def _fill(
    context: LlamaContext, plan: ContextPlan, saved: Sequence[memoryview], length: int, recurrent: bool
) -> None:
    """Allocate a context's KV cache and import the saved KV cells."""
    context.allocate(plan)
    if saved and not (
        context.import_sequence(saved[0]) if recurrent else context.import_cells(saved, 0, length)
    ):
        raise BackendError(
            f"the cache of {length:,} tokens was lost when the context was resized", "send the message again"
        )
