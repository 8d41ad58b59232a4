"""How large a context to make, of what, and what it will take."""

from __future__ import annotations

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
    "choose_context",
    "choose_split_contexts",
    "kv_bytes",
    "plan_context",
    "plan_split_contexts",
    "remembers_by_state",
    "split_load_options",
    "work_bytes",
]

# Where the library can keep the states after each of the last tokens of a pass: of so many, if all copies
# of a state, which each come with as many, stay this small. Writing them is part of every pass.
UNDO_TOKENS = 8
_SMALL_STATES_BYTES = 128 * 2**20
_F16 = KvTypes("f16", "f16")
# The library keeps room for the logits of all rows whose hidden states are read, though nobody wants those:
# for a lower half so much at most, or as much as the fewest rows take that are worth a pass.
_UNREAD_BYTES = 16 * 2**20
_FEWEST_ROWS = 16
# A saved cell begins with its position, and its sequence.
_CELL_BYTES = 12


@dataclass(frozen=True, slots=True)
class States:
    """What one sequence remembers: a state of fixed size, and keys and values for each token.

    keeps_earlier: the library can keep the states after the last few tokens of a pass.
    """

    state_bytes: int
    f16_bytes_per_token: int
    keeps_earlier: bool


def plan_context(weights: Any, options: LoadOptions) -> ContextPlan:
    """What context to make.

    Raises MemoryBudgetError when it does not fit what is there for it, OptionError for an unknown kv_type.
    """
    states = _measured(weights, options) if remembers_by_state(weights) else None
    plan = choose_context(weights, options, states)
    fixed = _fixed_bytes(states, plan)
    asked = requested_context(options, library().llama_model_n_ctx_train(weights))
    _check_room(plan.kv_bytes, asked, plan.token_bytes, fixed, library().llama_model_size(weights), options)
    return plan


def remembers_by_state(weights: Any) -> bool:
    """Whether all or some of its layers do: then `States` have to be known."""
    return bool(library().llama_model_is_recurrent(weights) or library().llama_model_is_hybrid(weights))


def choose_context(weights: Any, options: LoadOptions, states: States | None) -> ContextPlan:
    """What context to make wherever there is room for it. states: None for a memory of keys and values only.

    Raises OptionError for an unknown kv_type.
    """
    # Asked for less than whole blocks, llama.cpp would refuse passes that fit what it made, by aborting.
    wanted = round_up_to_block(requested_context(options, library().llama_model_n_ctx_train(weights)))
    if states is None:
        same_type = has_latent_attention(weights)
        types = choose_kv_types(options, kv_bytes(weights, _F16, wanted), same_type=same_type)
        # One sequence for each branch, and a spare one for moving cells.
        plan = _with_rows(ContextPlan(wanted, types, options.max_branches + 1), options.max_logit_rows)
        if prefill_kernel_differs(types, options, threads_for(weights, options)) and not options.is_draft:
            plan = _with_rows(plan, min(SMALL_KERNEL_MAX_ROWS, plan.rows))
        return replace(
            plan, kv_bytes=kv_bytes(weights, types, wanted), token_bytes=kv_bytes_per_token(weights, types)
        )
    types = choose_kv_types(options, states.f16_bytes_per_token * wanted)
    # The sequence that runs, and the checkpoints.
    plan = _with_rows(ContextPlan(wanted, types, MAX_CHECKPOINTS + 1, recurrent=True), options.max_logit_rows)
    if states.keeps_earlier and _fixed_bytes(states, plan) * (1 + UNDO_TOKENS) <= _SMALL_STATES_BYTES:
        plan = replace(plan, undo_tokens=UNDO_TOKENS)
    per_token = types.bytes_per_token(states.f16_bytes_per_token)
    return replace(plan, kv_bytes=wanted * per_token + _fixed_bytes(states, plan), token_bytes=per_token)


def _with_rows(plan: ContextPlan, rows: int | None) -> ContextPlan:
    """With logits for so many rows of a pass: the library wants one for each sequence."""
    return plan if rows is None else replace(plan, rows=max(rows, plan.sequences))


def _fixed_bytes(states: States | None, plan: ContextPlan) -> int:
    """What the memory takes however short the text is."""
    return states.state_bytes * plan.sequences * (1 + plan.undo_tokens) if states else 0


def kv_bytes(weights: Any, types: KvTypes, tokens: int) -> int:
    """What keys and values of so many tokens take: whole blocks, sliding windows kept whole, no states."""
    return round_up_to_block(tokens) * kv_bytes_per_token(weights, types)


def plan_split_contexts(
    lower: Any, upper: Any, weight_bytes: int, options: LoadOptions
) -> tuple[ContextPlan, ContextPlan]:
    """What contexts to make for a model in two halves, the same as for the whole one; see `plan_context`.

    weight_bytes: of both halves, what they share counted once.
    """
    plans = choose_split_contexts(lower, upper, options)
    total, wanted = sum(plan.kv_bytes for plan in plans), plans[0].tokens
    asked = requested_context(options, library().llama_model_n_ctx_train(lower))
    beside = weight_bytes + work_bytes(lower, options)
    _check_room(total, asked, total // wanted, 0, beside, options)
    return plans


def choose_split_contexts(lower: Any, upper: Any, options: LoadOptions) -> tuple[ContextPlan, ContextPlan]:
    """`choose_context` for both halves of a model."""
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
    """What the lower half's logits take, once where they are computed and once where they are read."""
    return 2 * _logits_bytes(lower, min(MAX_WIDTH, _lower_rows(lower, options)))


def split_load_options(lower: Any, options: LoadOptions) -> tuple[LoadOptions, LoadOptions]:
    """For each half, with as many rows as its passes have at most: the upper one gives logits of them all."""
    below, above = _lower_rows(lower, options), min(MAX_WIDTH, options.batch_tokens)
    return replace(options, batch_tokens=below), replace(options, batch_tokens=above)


def _lower_rows(lower: Any, options: LoadOptions) -> int:
    fitting = _UNREAD_BYTES // _logits_bytes(lower, 1) // _FEWEST_ROWS * _FEWEST_ROWS
    # The library makes room for the logits of a row in each sequence, whatever is asked for.
    return min(options.batch_tokens, max(fitting, _FEWEST_ROWS, options.max_branches + 1))


def _logits_bytes(weights: Any, rows: int) -> int:
    lib = library()
    return int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(weights))) * 4 * rows


def _check_room(
    kv_bytes: int, asked: int, per_token: int, fixed: int, weight_bytes: int, options: LoadOptions
) -> None:
    """Raises MemoryBudgetError when a cache does not fit beside its weights."""
    limit = options.memory_bytes if options.memory_bytes is not None else psutil.virtual_memory().available
    left = max(0, limit - weight_bytes)
    if kv_bytes > left:
        fits = max(0, left - fixed) // per_token // BLOCK_TOKENS * BLOCK_TOKENS if per_token else 0
        raise cache_too_large_error(asked, kv_bytes, left, fits)


def _measured(weights: Any, options: LoadOptions) -> States:
    """The sizes, from a small context: metadata does not tell which layers remember how.

    With a sliding window the state and the window's keys are not told apart, so no earlier states there.
    """
    small = ContextPlan(BLOCK_TOKENS, _F16, 1, undo_tokens=UNDO_TOKENS)
    context = LlamaContext(weights, replace(options, batch_tokens=BLOCK_TOKENS), small, threads=1)
    try:
        context.append([0], 0)
        with_one = context.state_bytes()
        context.append([0], 1)
        per_token = context.state_bytes() - with_one
        # What is kept of a cell beside its keys and values is not in the cache.
        per_token = max(0, per_token - _CELL_BYTES)
        state = with_one - per_token if context.window else context.state_bytes(recurrent_only=True)
        return States(state, per_token, context.undo_tokens > 0 and not context.window)
    finally:
        context.close()
