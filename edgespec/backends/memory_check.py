"""Whether weights, a context and more tokens fit what is there for them."""

from __future__ import annotations

from typing import Protocol

from edgespec.backends.base import LoadOptions, ModelFacts
from edgespec.errors import ContextFullError, MemoryBudgetError
from edgespec.files import format_bytes

__all__ = [
    "BLOCK_TOKENS",
    "cache_too_large_error",
    "check_tokens_fit",
    "check_weights_fit",
    "initial_context",
    "requested_context",
    "round_up_to_block",
]

_USUAL_CONTEXT_TOKENS = 8192
# Both libraries make their caches in blocks of so many tokens.
BLOCK_TOKENS = 256


def round_up_to_block(tokens: int) -> int:
    """So many tokens in whole blocks: asked for less, a library would round up by itself."""
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS


class _Limited(Protocol):
    facts: ModelFacts

    @property
    def length(self) -> int: ...

    @property
    def free_tokens(self) -> int: ...


def initial_context(whole_tokens: int, initial_context_tokens: int, longrope_switch_tokens: int) -> int:
    """Return the context size to allocate at load, in tokens.

    Args:
        whole_tokens: The size that the context may grow to.
        initial_context_tokens: The preferred initial size.
        longrope_switch_tokens: Contexts above this size use other LongRoPE factors, so a context that grows
            beyond it must start beyond it. 0 if all sizes are alike.
    """
    if longrope_switch_tokens < whole_tokens:
        initial_context_tokens = max(initial_context_tokens, longrope_switch_tokens + 1)
    return min(whole_tokens, round_up_to_block(initial_context_tokens))


def requested_context(options: LoadOptions, trained_tokens: int) -> int:
    """How many tokens of context to make: those asked for, or the usual number, if trained for as many.

    trained_tokens: 0 where the model does not say.
    """
    if options.choose_context_tokens:
        return options.choose_context_tokens(trained_tokens)
    return options.context_tokens or min(trained_tokens or _USUAL_CONTEXT_TOKENS, _USUAL_CONTEXT_TOKENS)


def check_weights_fit(name: str, weight_bytes: int, options: LoadOptions) -> None:
    """Raises MemoryBudgetError when the weights alone are more than what was given."""
    if options.memory_bytes is not None and weight_bytes > options.memory_bytes:
        raise MemoryBudgetError(
            f"the weights of {name} take {format_bytes(weight_bytes)}"
            f" and {format_bytes(options.memory_bytes)} are there for them",
            "choose a smaller model or quantisation, or give more with --memory",
        )


def check_tokens_fit(model: _Limited, more: int) -> None:
    """Raises ContextFullError when the context does not take so many tokens more."""
    if more > model.free_tokens:
        raise ContextFullError(
            f"{model.length} + {more} tokens do not fit the context of {model.facts.context_tokens}",
            "use a larger --context",
        )


def cache_too_large_error(
    context_tokens: int, wanted_bytes: int, left_bytes: int, fitting_tokens: int
) -> MemoryBudgetError:
    """What to raise for a cache that does not fit. fitting_tokens: the context that would; 0 for none."""
    return MemoryBudgetError(
        f"the cache for {context_tokens:,} tokens of context takes {format_bytes(wanted_bytes)}"
        f" and {format_bytes(max(0, left_bytes))} are left for it",
        f"use --context {fitting_tokens} or less"
        if fitting_tokens
        else "choose a smaller model or give more with --memory",
    )
