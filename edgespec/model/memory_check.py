"""Choose context sizes, and check that models fit in memory, prompts in a context, and drafts in a pass."""

from __future__ import annotations

from typing import Protocol

from edgespec.errors import CapabilityError, ContextFullError, MemoryBudgetError
from edgespec.model.base import LoadOptions
from edgespec.model.model_facts import ModelFacts
from edgespec.system.files import format_bytes

__all__ = [
    "BLOCK_TOKENS",
    "cache_too_large_error",
    "check_tokens_fit",
    "check_weights_fit",
    "initial_context",
    "requested_context",
    "round_up_to_block",
]

# Default context size in tokens, unless the model was trained for a smaller one.
_DEFAULT_CONTEXT_TOKENS = 8192
# llama.cpp and mlx-lm allocate their KV caches in multiples of this many tokens.
BLOCK_TOKENS = 256


class _Context(Protocol):
    """The context of a model or draft model."""

    facts: ModelFacts

    @property
    def length(self) -> int: ...

    @property
    def free_tokens(self) -> int: ...


def round_up_to_block(tokens: int) -> int:
    """Round a context size up to a multiple of `BLOCK_TOKENS`."""
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS


def initial_context(whole_tokens: int, initial_context_tokens: int, longrope_switch_tokens: int) -> int:
    """Return the context size in tokens to allocate when a model is loaded.

    Args:
        whole_tokens: The maximum size that the context can grow to.
        initial_context_tokens: The preferred initial size.
        longrope_switch_tokens: Contexts above this size use different LongRoPE factors, so a context that
            will grow beyond it must also start above it. 0 if all sizes use the same factors.
    """
    if longrope_switch_tokens < whole_tokens:
        initial_context_tokens = max(initial_context_tokens, longrope_switch_tokens + 1)
    return min(whole_tokens, round_up_to_block(initial_context_tokens))


def requested_context(options: LoadOptions, trained_tokens: int) -> int:
    """Return the requested context size, or the default for a model trained for `trained_tokens`."""
    if options.choose_context_tokens:
        return options.choose_context_tokens(trained_tokens)
    return options.context_tokens or min(trained_tokens or _DEFAULT_CONTEXT_TOKENS, _DEFAULT_CONTEXT_TOKENS)


def check_weights_fit(name: str, weight_bytes: int, options: LoadOptions) -> None:
    """Raise MemoryBudgetError if the weights alone exceed the memory limit."""
    if options.memory_bytes is not None and weight_bytes > options.memory_bytes:
        raise MemoryBudgetError(
            f"the weights of {name} take {format_bytes(weight_bytes)},"
            f" which exceeds the limit of {format_bytes(options.memory_bytes)}",
            "choose a smaller model or quantisation, or raise --memory",
        )


def check_tokens_fit(model: _Context, more: int) -> None:
    """Raise ContextFullError if the model's context has no room for `more` tokens."""
    if more > model.free_tokens:
        raise ContextFullError(
            f"{model.length:,} cached tokens and {more:,} new tokens exceed the context of"
            f" {model.facts.context_tokens:,} tokens",
            "use a larger --context",
        )


def check_draft_width(width: int, max_width: int) -> None:
    """Raise CapabilityError if a draft tree of `width` tokens is too large for one pass."""
    if width > max_width:
        raise CapabilityError(
            f"a draft of {width} tokens exceeds the limit of {max_width} per pass",
            "use a shorter --draft-length or fewer --draft-branches",
            code="draft_too_wide",
        )


def cache_too_large_error(
    context_tokens: int, wanted_bytes: int, left_bytes: int, fitting_tokens: int
) -> MemoryBudgetError:
    """Return the error to raise for a KV cache of `wanted_bytes` that does not fit in memory.

    The message suggests the largest context that fits, unless `fitting_tokens` is 0.
    """
    return MemoryBudgetError(
        f"the KV cache for a context of {context_tokens:,} tokens takes {format_bytes(wanted_bytes)},"
        f" but only {format_bytes(max(0, left_bytes))} is left",
        f"use --context {fitting_tokens} or less"
        if fitting_tokens
        else "choose a smaller model or raise --memory",
    )
