"""Plan the size, KV-cache types and memory use of llama.cpp contexts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil

from edgespec.backends.base import LoadOptions
from edgespec.backends.llamacpp.context import MAX_WIDTH, ContextPlan, LlamaContext
from edgespec.backends.llamacpp.kv_types import (
    SMALL_KERNEL_MAX_ROWS,
    KvTypes,
    choose_kv_types,
    has_latent_attention,
    kv_bytes_per_token,
    prefill_kernel_differs,
)
from edgespec.backends.llamacpp.loading import threads_for
from edgespec.backends.llamacpp.metadata import has_state, vocabulary_size
from edgespec.backends.llamacpp.native import library
from edgespec.backends.memory_check import (
    BLOCK_TOKENS,
    cache_too_large_error,
    requested_context,
    round_up_to_block,
)
from edgespec.backends.replay import MAX_CHECKPOINTS

__all__ = [
    "UNDO_TOKENS",
    "States",
    "check_contexts_fit",
    "choose_context",
    "choose_split_contexts",
    "kv_bytes",
    "logits_bytes",
    "plan_context",
    "plan_split_contexts",
    "split_load_options",
    "work_bytes",
]

# llama.cpp can keep the recurrent state after each of the last `UNDO_TOKENS` tokens in a pass, for rollback.
# Every pass writes these copies, so the feature is only used if their total size is at most
# `_SMALL_STATES_BYTES`.
UNDO_TOKENS = 8
_SMALL_STATES_BYTES = 128 * 2**20
_F16 = KvTypes("f16", "f16")
# llama.cpp allocates logits for every row whose hidden state is read, although the lower part of a split
# model never uses them. Limit the rows per pass to keep these logits within `_UNREAD_BYTES`, but allow at
# least `_FEWEST_ROWS` rows.
_UNREAD_BYTES = 16 * 2**20
_FEWEST_ROWS = 16
# Size of an exported KV cell's header, which stores its position and sequence ids.
_CELL_BYTES = 12


@dataclass(frozen=True, slots=True)
class States:
    """The memory that a model with recurrent layers needs per sequence.

    Attributes:
        state_bytes: The size of the recurrent state, which is independent of the context length.
        f16_bytes_per_token: The size of the keys and values per token in f16.
        keeps_earlier: Whether llama.cpp can roll back the last `UNDO_TOKENS` tokens by keeping earlier
            recurrent states.
    """

    state_bytes: int
    f16_bytes_per_token: int
    keeps_earlier: bool


def plan_context(weights: Any, options: LoadOptions) -> ContextPlan:
    """Return a context plan for a loaded model. Raises MemoryBudgetError if it does not fit in memory."""
    plan = choose_context(weights, options, _measured(weights, options) if has_state(weights) else None)
    check_contexts_fit([plan], library().llama_model_size(weights), options)
    return plan


def choose_context(weights: Any, options: LoadOptions, states: States | None) -> ContextPlan:
    """Return a context plan for the options, without checking that it fits in memory."""
    # Request whole blocks. llama.cpp allocates whole blocks anyway, but aborts if a pass exceeds the
    # requested size.
    wanted = round_up_to_block(requested_context(options, library().llama_model_n_ctx_train(weights)))
    if states is None:
        same_type = has_latent_attention(weights)
        types = choose_kv_types(options, kv_bytes(weights, _F16, wanted), same_type=same_type)
        # Each branch of the draft tree needs a sequence, and moving cells needs a scratch sequence.
        plan = _with_rows(ContextPlan(wanted, types, options.max_branches + 1), options.max_logit_rows)
        if prefill_kernel_differs(types, options, threads_for(weights, options)) and not options.is_draft:
            plan = _with_rows(plan, min(SMALL_KERNEL_MAX_ROWS, plan.rows))
        return replace(
            plan, kv_bytes=kv_bytes(weights, types, wanted), token_bytes=kv_bytes_per_token(weights, types)
        )
    types = choose_kv_types(options, states.f16_bytes_per_token * wanted)
    # Sequence 0 contains the tokens, and each checkpoint needs a sequence.
    plan = _with_rows(ContextPlan(wanted, types, MAX_CHECKPOINTS + 1, recurrent=True), options.max_logit_rows)
    if states.keeps_earlier and _fixed_bytes(states, plan) * (1 + UNDO_TOKENS) <= _SMALL_STATES_BYTES:
        plan = replace(plan, undo_tokens=UNDO_TOKENS)
    per_token = types.bytes_per_token(states.f16_bytes_per_token)
    return replace(plan, kv_bytes=wanted * per_token + _fixed_bytes(states, plan), token_bytes=per_token)


def _with_rows(plan: ContextPlan, rows: int | None) -> ContextPlan:
    """Return the plan with at most `rows` rows of logits per pass, but at least one row per sequence."""
    return plan if rows is None else replace(plan, rows=max(rows, plan.sequences))


def _fixed_bytes(states: States | None, plan: ContextPlan) -> int:
    """Return the total size of the recurrent states in bytes, which is independent of the context length."""
    return states.state_bytes * plan.sequences * (1 + plan.undo_tokens) if states else 0


def kv_bytes(weights: Any, types: KvTypes, tokens: int) -> int:
    """Return the size of the KV cache in bytes for `tokens` rounded up to whole blocks.

    Recurrent states are not included. Layers with a sliding window count as if they kept all tokens.
    """
    return round_up_to_block(tokens) * kv_bytes_per_token(weights, types)


def plan_split_contexts(
    lower: Any, upper: Any, weight_bytes: int, options: LoadOptions
) -> tuple[ContextPlan, ContextPlan]:
    """Return the context plans for the lower and the upper part of a split model."""
    plans = choose_split_contexts(lower, upper, options)
    check_contexts_fit(plans, weight_bytes + work_bytes(lower, options), options)
    return plans


def choose_split_contexts(lower: Any, upper: Any, options: LoadOptions) -> tuple[ContextPlan, ContextPlan]:
    """Return context plans for both parts of a split model, without checking that they fit in memory."""
    wanted = round_up_to_block(requested_context(options, library().llama_model_n_ctx_train(lower)))
    types = choose_kv_types(options, sum(kv_bytes(half, _F16, wanted) for half in (lower, upper)))
    first, second = (
        ContextPlan(
            wanted,
            types,
            options.max_branches + 1,
            kv_bytes=kv_bytes(half, types, wanted),
            token_bytes=kv_bytes_per_token(half, types),
        )
        for half in (lower, upper)
    )
    return first, second


def work_bytes(lower: Any, options: LoadOptions) -> int:
    """Return the memory in bytes for the logits of a split model's lower part and for a copy of them."""
    return 2 * logits_bytes(lower, min(MAX_WIDTH, _lower_rows(lower, options)))


def split_load_options(lower: Any, options: LoadOptions) -> tuple[LoadOptions, LoadOptions]:
    """Return the load options for both parts of a split model, which differ only in `batch_tokens`."""
    below, above = _lower_rows(lower, options), min(MAX_WIDTH, options.batch_tokens)
    return replace(options, batch_tokens=below), replace(options, batch_tokens=above)


def _lower_rows(lower: Any, options: LoadOptions) -> int:
    fitting = _UNREAD_BYTES // logits_bytes(lower, 1) // _FEWEST_ROWS * _FEWEST_ROWS
    # Allow one row per sequence, because llama.cpp allocates logits for at least that many rows.
    return min(options.batch_tokens, max(fitting, _FEWEST_ROWS, options.max_branches + 1))


def logits_bytes(weights: Any, rows: int) -> int:
    """Return the size of `rows` rows of logits in bytes."""
    return vocabulary_size(weights) * 4 * rows


def check_contexts_fit(plans: Sequence[ContextPlan], other_bytes: int, options: LoadOptions) -> None:
    """Raise MemoryBudgetError if the contexts and `other_bytes` do not fit in memory together."""
    limit = options.memory_bytes if options.memory_bytes is not None else psutil.virtual_memory().available
    left = max(0, limit - other_bytes)
    total_bytes, token_bytes = sum(plan.kv_bytes for plan in plans), sum(plan.token_bytes for plan in plans)
    if total_bytes > left:
        tokens = plans[0].tokens
        # Subtract the recurrent states, which take the same memory in a shorter context.
        left_for_tokens = max(0, left - (total_bytes - tokens * token_bytes))
        fitting = left_for_tokens // token_bytes // BLOCK_TOKENS * BLOCK_TOKENS if token_bytes else 0
        raise cache_too_large_error(tokens, total_bytes, left, fitting)


def _measured(weights: Any, options: LoadOptions) -> States:
    """Measure the state sizes in a small context, because the model's metadata does not contain them.

    If the model also has sliding-window layers, llama.cpp reports only their combined size with the recurrent
    state. The size of the state is then unknown, so earlier states are not kept for rollback.
    """
    small = ContextPlan(BLOCK_TOKENS, _F16, 1, undo_tokens=UNDO_TOKENS)
    context = LlamaContext(weights, replace(options, batch_tokens=BLOCK_TOKENS), small, threads=1)
    try:
        context.append([0], 0)
        with_one = context.state_bytes()
        context.append([0], 1)
        per_token = context.state_bytes() - with_one
        # Subtract the header of the exported cell, which is not stored in the cache.
        per_token = max(0, per_token - _CELL_BYTES)
        state = with_one - per_token if context.window else context.state_bytes(recurrent_only=True)
        return States(state, per_token, context.undo_tokens > 0 and not context.window)
    finally:
        context.close()
