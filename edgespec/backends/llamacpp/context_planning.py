"""Plan the size, KV-cache types and memory use of llama.cpp contexts, and resize them.

llama.cpp cannot resize a context in place, so a resize exports its cells, allocates a new context and
imports the cells. The format of exported cells is independent of the context size, so the cells are
bit-identical after a resize. The old memory is freed before the new memory is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil

from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.backends.llamacpp.context_plan import (
    MAX_WIDTH,
    ContextPlan,
    KvTypes,
    choose_kv_types,
    has_latent_attention,
    kv_bytes_per_token,
)
from edgespec.backends.llamacpp.devices import in_main_memory
from edgespec.backends.llamacpp.metadata import (
    architecture_metadata,
    has_compressed_keys,
    has_state,
    sliding_window,
    vocabulary_size,
)
from edgespec.backends.llamacpp.native import library
from edgespec.backends.replay import MAX_CHECKPOINTS
from edgespec.errors import BackendError, MemoryBudgetError
from edgespec.model.base import LoadOptions
from edgespec.model.memory_estimate import (
    BLOCK_TOKENS,
    cache_too_large_error,
    initial_context,
    requested_context,
    round_up_to_block,
)
from edgespec.system.heap import release_free_memory

__all__ = [
    "UNDO_TOKENS",
    "States",
    "cache_variant",
    "check_contexts_fit",
    "check_resize_fits",
    "choose_context",
    "choose_split_contexts",
    "initial_plan",
    "kv_bytes",
    "logits_bytes",
    "longrope_switch_tokens",
    "measure_compressed_keys",
    "plan_context",
    "plan_split_contexts",
    "rebuild_context",
    "split_load_options",
    "work_bytes",
]

# Number of recent tokens that llama.cpp can undo. It keeps a copy of the recurrent state for each of them.
UNDO_TOKENS = 8
# Maximum total size in bytes of the recurrent states kept for rollback. The limit is low because every
# forward pass writes all of these states.
_SMALL_STATES_BYTES = 128 * 2**20
_F16 = KvTypes("f16", "f16")
# Maximum logits buffer size of LayerSkip's lower layers, in bytes. This limits their batch size.
_UNREAD_BYTES = 16 * 2**20
# Minimum batch size of LayerSkip's lower layers, in tokens.
_FEWEST_ROWS = 16
# Size in bytes of an exported KV cell's header, which stores the cell's position and sequence ids.
_CELL_BYTES = 12
# DeepSeek-V4's compression ratios: the numbers of tokens that are combined into one compressed key. llama.cpp
# supports only these two, and allocates the cells for compressed keys in whole blocks.
_SHORT_RATIO, _LONG_RATIO = 4, 128


@dataclass(frozen=True, slots=True)
class States:
    """The memory needed by a model with recurrent layers or compressed keys.

    Attributes:
        state_bytes: The size of a sequence's recurrent state in bytes, independent of the context length.
        f16_bytes_per_token: The size of a token's keys and values in bytes if they are stored as f16.
        keeps_earlier: Whether llama.cpp keeps earlier recurrent states, so that recent tokens can be rolled
            back.
        padding_bytes: The size of unused KV cells in bytes, independent of the context length.
        checkpoint_bytes: The size in bytes of a checkpoint in main memory, or 0 if checkpoints are llama.cpp
            sequences.
    """

    state_bytes: int
    f16_bytes_per_token: int
    keeps_earlier: bool
    padding_bytes: int = 0
    checkpoint_bytes: int = 0


def plan_context(weights: Any, options: LoadOptions) -> ContextPlan:
    """Return the context plan of a loaded model. Raises MemoryBudgetError if it does not fit in memory."""
    plan = choose_context(weights, options, _measured(weights, options) if has_state(weights) else None)
    check_contexts_fit([plan], library().llama_model_size(weights), options)
    return plan


def choose_context(weights: Any, options: LoadOptions, states: States | None) -> ContextPlan:
    """Return a model's context plan for the load options, without checking that it fits in memory."""
    wanted = round_up_to_block(requested_context(options, library().llama_model_n_ctx_train(weights)))
    same_type = has_latent_attention(weights)
    if states is None:
        types = choose_kv_types(options, same_type=same_type)
        # Reserve one llama.cpp sequence per branch of the draft tree, one for moving KV cells, and one for
        # `WindowSlot`.
        slots, sequences = options.parallel, options.max_branches + 1
        sequences += slots > 1 and library().llama_model_n_swa(weights) > 0
        whole = ContextPlan(wanted * slots, types, sequences * slots, slots=slots)
        plan = _with_rows(whole, options.max_logit_rows)
        return replace(
            plan,
            kv_bytes=kv_bytes(weights, types, plan.tokens),
            token_bytes=kv_bytes_per_token(weights, types),
        )
    types = choose_kv_types(options, same_type=same_type)
    # Reserve one llama.cpp sequence for the committed tokens and one per checkpoint.
    sequences, checkpoint_bytes = 1 + MAX_CHECKPOINTS, 0
    if states.checkpoint_bytes:
        sequences, checkpoint_bytes = 1, MAX_CHECKPOINTS * states.checkpoint_bytes
    whole = ContextPlan(wanted, types, sequences, recurrent=True, checkpoint_bytes=checkpoint_bytes)
    plan = _with_rows(whole, options.max_logit_rows)
    if states.keeps_earlier and states.state_bytes * sequences * (1 + UNDO_TOKENS) <= _SMALL_STATES_BYTES:
        plan = replace(plan, undo_tokens=UNDO_TOKENS)
    per_token = types.bytes_per_token(states.f16_bytes_per_token)
    state_bytes = states.state_bytes * sequences * (1 + plan.undo_tokens)
    fixed_bytes = state_bytes + states.padding_bytes + checkpoint_bytes
    return replace(plan, kv_bytes=wanted * per_token + fixed_bytes, token_bytes=per_token)


def _with_rows(plan: ContextPlan, rows: int | None) -> ContextPlan:
    return plan if rows is None else replace(plan, rows=max(rows, plan.sequences))


def kv_bytes(weights: Any, types: KvTypes, tokens: int) -> int:
    """Return the size in bytes of a KV cache for `tokens` tokens, rounded up to whole blocks of cells.

    Recurrent states are not included. Layers with sliding-window attention count in full, because they
    also store all tokens.
    """
    return round_up_to_block(tokens) * kv_bytes_per_token(weights, types)


def plan_split_contexts(
    lower: Any, upper: Any, weight_bytes: int, options: LoadOptions
) -> tuple[ContextPlan, ContextPlan]:
    """Return context plans for the lower and upper layers of a model that was split for LayerSkip.

    Raises:
        MemoryBudgetError: The contexts do not fit in memory together with `weight_bytes`.
    """
    plans = choose_split_contexts(lower, upper, options)
    check_contexts_fit(plans, weight_bytes + work_bytes(lower, options), options)
    return plans


def choose_split_contexts(lower: Any, upper: Any, options: LoadOptions) -> tuple[ContextPlan, ContextPlan]:
    """Return plans for a split model's lower and upper layers, without checking that they fit in memory."""
    wanted = round_up_to_block(requested_context(options, library().llama_model_n_ctx_train(lower)))
    types = choose_kv_types(options)
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
    """Return the size of the logits buffers of a model that was split for LayerSkip, in bytes."""
    return 2 * logits_bytes(lower, min(MAX_WIDTH, _lower_rows(lower, options)))


def split_load_options(lower: Any, options: LoadOptions) -> tuple[LoadOptions, LoadOptions]:
    """Return load options for a split model's lower and upper layers, which differ only in `batch_tokens`."""
    below, above = _lower_rows(lower, options), min(MAX_WIDTH, options.batch_tokens)
    return replace(options, batch_tokens=below), replace(options, batch_tokens=above)


def _lower_rows(lower: Any, options: LoadOptions) -> int:
    fitting = _UNREAD_BYTES // logits_bytes(lower, 1) // _FEWEST_ROWS * _FEWEST_ROWS
    return min(options.batch_tokens, max(fitting, _FEWEST_ROWS, options.max_branches + 1))


def logits_bytes(weights: Any, rows: int) -> int:
    """Return the size of the logits for `rows` tokens, in bytes."""
    return vocabulary_size(weights) * 4 * rows


def check_contexts_fit(plans: Sequence[ContextPlan], other_bytes: int, options: LoadOptions) -> None:
    """Raise MemoryBudgetError if the contexts plus `other_bytes` exceed the memory limit."""
    limit = options.memory_bytes if options.memory_bytes is not None else psutil.virtual_memory().available
    left = max(0, limit - other_bytes)
    total_bytes, token_bytes = sum(plan.kv_bytes for plan in plans), sum(plan.token_bytes for plan in plans)
    if total_bytes > left:
        tokens, slots = plans[0].tokens, plans[0].slots
        left_for_tokens = max(0, left - (total_bytes - tokens * token_bytes))
        block = BLOCK_TOKENS * slots
        fitting = left_for_tokens // token_bytes // block * BLOCK_TOKENS if token_bytes else 0
        raise cache_too_large_error(tokens, total_bytes, left, fitting)


def _measured(weights: Any, options: LoadOptions) -> States:
    """Measure the sizes of a model's KV cells and recurrent state, which are not in its metadata."""
    if has_compressed_keys(weights):
        return measure_compressed_keys(weights, options)
    small = ContextPlan(BLOCK_TOKENS, _F16, 1, undo_tokens=UNDO_TOKENS)
    context = LlamaContext(weights, replace(options, batch_tokens=BLOCK_TOKENS), small, threads=1)
    try:
        context.append([0], 0)
        with_one = context.state_bytes()
        context.append([0], 1)
        per_token = context.state_bytes() - with_one
        per_token = max(0, per_token - _CELL_BYTES)
        state = with_one - per_token if context.window else context.state_bytes(recurrent_only=True)
        return States(state, per_token, context.undo_tokens > 0 and not context.window)
    finally:
        context.close()


def measure_compressed_keys(weights: Any, options: LoadOptions) -> States:
    """Measure the KV cache sizes of a model with compressed keys, without running any tokens."""
    sizes = []
    # The second context is the smallest one that needs a second block for keys that combine four tokens each.
    for tokens in (BLOCK_TOKENS, BLOCK_TOKENS * (1 + _SHORT_RATIO)):
        small = ContextPlan(tokens, _F16, 1)
        context = LlamaContext(weights, replace(options, batch_tokens=BLOCK_TOKENS), small, threads=1)
        sizes.append(context.total_state_bytes)
        state_bytes = context.state_bytes(recurrent_only=True)
        context.close()
    short_bytes = (sizes[1] - sizes[0]) // BLOCK_TOKENS
    long_bytes = max(0, (sizes[0] - state_bytes) // BLOCK_TOKENS - short_bytes)
    raw_bytes = kv_bytes_per_token(weights, _F16)
    return States(
        state_bytes,
        raw_bytes + (short_bytes * _LONG_RATIO // _SHORT_RATIO + long_bytes) // _LONG_RATIO,
        keeps_earlier=True,
        padding_bytes=BLOCK_TOKENS * (short_bytes + long_bytes),
        checkpoint_bytes=state_bytes + sliding_window(weights) * raw_bytes,
    )


def initial_plan(weights: Any, max_plan: ContextPlan, options: LoadOptions) -> ContextPlan:
    """Return the plan for the context's initial size. The context can later grow up to `max_plan`."""
    if options.initial_context_tokens is None:
        return max_plan
    return max_plan.with_tokens(
        initial_context(max_plan.tokens, options.initial_context_tokens, longrope_switch_tokens(weights))
    )


def cache_variant(weights: Any, max_plan: ContextPlan) -> str:
    """Return a string that identifies the format of cached keys and values.

    KV cells can be moved only between contexts with equal strings. A changed string invalidates prefix caches
    on disk.
    """
    switch = longrope_switch_tokens(weights)
    variant = f", turned for more than {switch}" if 0 < switch < max_plan.tokens else ""
    return max_plan.kv_types.text + variant


def longrope_switch_tokens(weights: Any) -> int:
    """Return the context size above which LongRoPE (arXiv 2402.13753) uses its long-context factors.

    The result is 0 if the model does not use LongRoPE. The factors are baked into the cached keys, so a
    resize must not cross this size.
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
                f"cannot resize the context: there is not enough memory to copy {length:,} cached tokens",
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
            f"the {length:,} cached tokens were lost while the context was being resized",
            "send the message again",
        )
