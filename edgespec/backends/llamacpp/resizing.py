"""A context of another size that has_memory the same: saved, made anew, put back.

The library cannot make a context larger. What a sequence has_memory does not depend on the size, so it comes
back to the bit. The memory is freed before the new one is made: both are never there at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psutil

from edgespec.backends.base import LoadOptions
from edgespec.backends.llamacpp.context import ContextPlan, LlamaContext
from edgespec.backends.llamacpp.devices import in_main_memory
from edgespec.backends.llamacpp.metadata import metadata
from edgespec.backends.memory_check import BLOCK_TOKENS, cache_too_large_error, initial_context
from edgespec.errors import BackendError, MemoryBudgetError
from edgespec.files import format_bytes
from edgespec.heap import release_free_memory

__all__ = ["cache_variant", "check_resize_fits", "initial_plan", "longrope_switch_tokens", "rebuild_context"]


def initial_plan(weights: Any, whole: ContextPlan, options: LoadOptions) -> ContextPlan:
    """The context to begin with, of one that is to become as large as `whole`."""
    if options.initial_context_tokens is None:
        return whole
    return whole.with_tokens(
        initial_context(whole.tokens, options.initial_context_tokens, longrope_switch_tokens(weights))
    )


def cache_variant(weights: Any, whole: ContextPlan) -> str:
    """What a context that is to become as large as `whole` holds in another form than one of another size."""
    turning = longrope_switch_tokens(weights)
    return whole.kv_types.text + (f", turned for more than {turning}" if 0 < turning < whole.tokens else "")


def longrope_switch_tokens(weights: Any) -> int:
    """With LongRoPE (arXiv 2402.13753) a context beyond this turns keys by other factors; 0 for other models.

    What is cached was turned by those of its time: a context must not come to be beyond it.
    """
    arch = metadata(weights, "general.architecture") or ""
    if metadata(weights, f"{arch}.rope.scaling.type") not in (None, "longrope"):
        return 0
    return int(metadata(weights, f"{arch}.rope.scaling.original_context_length") or 0)


def check_resize_fits(
    before: Sequence[ContextPlan], after: Sequence[ContextPlan], weight_bytes: int, options: LoadOptions
) -> None:
    """Raises MemoryBudgetError when contexts that are to be made larger do not fit the memory."""
    wanted, held = sum(plan.kv_bytes for plan in after), sum(plan.kv_bytes for plan in before)
    if wanted <= held:
        return
    if options.memory_bytes is not None and wanted > options.memory_bytes - weight_bytes:
        left = max(0, options.memory_bytes - weight_bytes)
        per_token = sum(plan.token_bytes for plan in after)
        fits = after[0].tokens - -(-(wanted - left) // per_token) if per_token else 0
        raise cache_too_large_error(
            after[0].tokens, wanted, left, max(0, fits) // BLOCK_TOKENS * BLOCK_TOKENS
        )
    # What is saved meanwhile is no more than what is freed. Cards with memory of their own say so themselves.
    available = int(psutil.virtual_memory().available)
    if wanted > available and in_main_memory(options):
        raise MemoryBudgetError(
            f"a context of {after[0].tokens} tokens takes {format_bytes(wanted)} of memory"
            f" and {format_bytes(available)} are free",
            "close other programs or use a smaller --context",
        )


def rebuild_context(
    context: LlamaContext, plan: ContextPlan, length: int, *, recurrent: bool = False
) -> None:
    """Give a context, whose sequence 0 holds `length` tokens, the size of `plan`; all other sequences go.

    Whatever goes wrong, it has its former size and content again. Raises MemoryBudgetError. Where there is
    no memory for that either the context is lost, as it says.
    """
    former = context.plan
    if plan == former and not context.is_lost:
        return
    saved: Sequence[memoryview] = ()
    if length:
        try:
            saved = [context.export_sequence()] if recurrent else context.export_cells(0, 0, length)
        except MemoryError as error:
            raise MemoryBudgetError(
                f"there is no memory for a copy of {length} cached tokens",
                "close other programs or use a smaller --context",
            ) from error
    try:
        _fill(context, plan, saved, length, recurrent)
    except BaseException:
        _fill(context, former, saved, length, recurrent)
        raise
    # The former memory and the copy: the heap would keep them beside the new one.
    saved = ()
    release_free_memory()


def _fill(
    context: LlamaContext, plan: ContextPlan, saved: Sequence[memoryview], length: int, recurrent: bool
) -> None:
    context.allocate(plan)
    if saved and not (
        context.import_sequence(saved[0]) if recurrent else context.import_cells(saved, 0, length)
    ):
        raise BackendError(f"{length} cached tokens could not be put back", "send the message again")
