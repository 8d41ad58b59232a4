"""Compare the speeds of two kinds of attention kernels of a loaded model.

Kernels that give the same bits for all pass widths can be slower than others. The difference grows with the
length of the context, and is larger for prompts than for single tokens.
"""

from __future__ import annotations

from time import perf_counter as now
from typing import NamedTuple

import numpy as np

from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError
from edgespec.loading.constants import (
    FILLING_TOKENS,
    LONGEST_CONTEXT,
    MAX_COMPARISONS,
    MIN_EXACT_SPEED,
    SLOW_PASS_SECONDS,
    TIMED_PROMPT_TOKENS,
    TIMED_STEPS,
)
from edgespec.model.base import LanguageModel, LoadOptions, Progress

__all__ = ["AttentionSpeed", "compare_attention"]


class AttentionSpeed(NamedTuple):
    """The speed in a long context as a fraction of the speed with other attention kernels.

    Attributes:
        decoding: Speed of single-token passes.
        prompt: Speed of reading prompts.
    """

    decoding: float
    prompt: float


def compare_attention(
    model: LanguageModel, options: LoadOptions, other: LoadOptions, progress: Progress | None = None
) -> AttentionSpeed | None:
    """Return the speed of a model relative to its speed with the attention kernels of other options.

    The cache is empty afterwards.

    Args:
        model: The loaded model. Its passes must not be restricted or padded.
        options: The options that the model was loaded with.
        other: The options that select the other kernels.
        progress: Called between measurements. Returning False cancels them.

    Returns:
        The speeds, or None if both options select the same kernels.

    Raises:
        CancelledError: `progress` returned False, or the model was interrupted.
    """
    # Reading weights from disk takes so long that the speed of attention does not matter.
    if options.streamed_layers or not model.use_attention(other):
        return None
    best = AttentionSpeed(0.0, 0.0)
    # Threads must not follow the machine's load while one of the kernels runs.
    model.fix_threads(True)
    try:
        for number in range(MAX_COMPARISONS):
            seconds = {}
            for is_other in (True, False) if number % 2 == 0 else (False, True):
                model.use_attention(other if is_other else options)
                seconds[is_other] = _seconds(model, progress)
            ratios = (there / here for there, here in zip(seconds[True], seconds[False], strict=True))
            best = max(best, AttentionSpeed(*ratios))
            if best.decoding >= MIN_EXACT_SPEED:
                break
    finally:
        model.fix_threads(False)
        model.use_attention(options)
    return best


def _seconds(model: LanguageModel, progress: Progress | None) -> tuple[float, float]:
    """Return the durations of a single-token pass and of reading a prompt in a long context."""
    if progress and not progress("measuring the speed of the model", 0.0):
        raise CancelledError("the speed measurement was cancelled")
    _fill(model)
    # The first pass after a change of kernels is slower.
    step_seconds = min([_step_seconds(model) for _ in range(1 + TIMED_STEPS)][1:])
    # All layers have the same attention, so the first ones show how much faster prompts are read.
    is_partial = model.run_first_layers(True)
    try:
        if not is_partial and step_seconds > SLOW_PASS_SECONDS:
            return step_seconds, step_seconds
        _fill(model)
        return step_seconds, min(_prompt_seconds(model) for _ in range(2))
    finally:
        model.run_first_layers(False)


def _fill(model: LanguageModel) -> None:
    """Fill the context, but leave room for the tokens to time and for one more copy of the repeated ones."""
    end = min(LONGEST_CONTEXT, model.free_tokens - TIMED_PROMPT_TOKENS - FILLING_TOKENS)
    model.prefill(_tokens(model, FILLING_TOKENS))
    if end > FILLING_TOKENS:
        model.repeat_cached(end)


def _step_seconds(model: LanguageModel) -> float:
    length, began = model.length, now()
    model.verify(TokenTree.chain(_tokens(model, 1)[0])).at(0, np.array([0]))
    seconds = now() - began
    model.truncate(length)
    return seconds


def _prompt_seconds(model: LanguageModel) -> float:
    length, tokens = model.length, _tokens(model, min(TIMED_PROMPT_TOKENS, model.free_tokens))
    began = now()
    model.prefill(tokens)
    seconds = now() - began
    model.truncate(length)
    return seconds


def _tokens(model: LanguageModel, count: int) -> list[int]:
    vocab_size = model.facts.vocab_size
    tokens: list[int] = np.random.default_rng(1).integers(vocab_size // 8, vocab_size, count).tolist()
    return tokens
