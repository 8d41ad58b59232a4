"""Decide whether rounding explains the first difference between two replies.

Quantised kernels give slightly different logits for passes over different numbers of tokens. Two replies can
therefore differ where two tokens have nearly equal logits.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LanguageModel
from edgespec.engine.logits import HostLogits, Logits
from edgespec.engine.noise import Stream, gumbel
from edgespec.engine.processors import LogitsProcessor, apply_chain
from edgespec.engine.sampling import Sampler
from edgespec.engine.sampling_params import SamplingParams
from edgespec.engine.tree import TokenTree

__all__ = [
    "MAX_ROUNDING_ERROR",
    "Alone",
    "Rescored",
    "is_near_tie",
    "largest_difference",
    "logit_rows",
    "rescore",
    "score_gap",
]

# Largest rounding error, in logits, that can explain a difference between replies. Correct kernels have much
# smaller errors, so a larger one indicates a bug.
MAX_ROUNDING_ERROR = 1.0
# Maximum number of tokens over which the rounding error is measured.
_MAX_ROWS = 64


class Rescored(NamedTuple):
    """The logits at one token position, computed by passes over different numbers of tokens.

    Attributes:
        plain: Logits of a single-token pass, float32 [vocab].
        wide: Logits of each pass that is compared with `plain`, float32 [vocab] per pass.
        error: Largest difference between `plain` and any of `wide`, at this position or an earlier one.
    """

    plain: NDArray[np.float32]
    wide: list[NDArray[np.float32]]
    error: float

    def joined(self, other: Rescored) -> Rescored:
        """Combine the measurements with those of `other`, which are for the same position."""
        return Rescored(self.plain, [*self.wide, *other.wide], max(self.error, other.error))

    def constrained(self, processors: Sequence[LogitsProcessor]) -> Rescored:
        """Return the same logits without the tokens that constraints forbid at this position."""

        def applied(row: NDArray[np.float32]) -> NDArray[np.float32]:
            tokens, logits = apply_chain(processors, (np.arange(len(row)), row.astype(np.float64)))
            allowed = np.full_like(row, -np.inf)
            allowed[tokens] = logits
            return allowed

        return Rescored(applied(self.plain), [applied(row) for row in self.wide], self.error)


def rescore(
    model: LanguageModel,
    prompt: Sequence[int],
    reply: Sequence[int],
    widths: Sequence[int],
    *,
    batch_sizes: Sequence[int] = (),
) -> Rescored:
    """Measure how much a model's logits depend on the number of tokens per pass.

    Overwrites the model's KV cache.

    Args:
        model: The model.
        prompt: Tokens of the prompt.
        reply: The first tokens of the reply.
        widths: Sizes of verify passes, in tokens, to compare with single-token passes.
        batch_sizes: Sizes of prefill passes, in tokens, to compare with a single prefill pass.

    Returns:
        The logits after the last token of `reply`, and the largest difference that was found.
    """
    plain = logit_rows(model, prompt, reply)
    widest = max(1, model.facts.context_tokens - len(prompt) - len(reply) + 1)
    wide = [logit_rows(model, prompt, reply, width=min(width, widest)) for width in widths]
    wide += [logit_rows(model, prompt, reply, passes=Alone(batch)) for batch in batch_sizes]
    error = max((largest_difference(plain, rows) for rows in wide), default=0.0)
    return Rescored(plain[-1], [rows[-1] for rows in wide], error)


class Alone:
    """Runs the passes over a rescored text, without other replies in the same context.

    Args:
        batch_tokens: Maximum number of prompt tokens per pass.
    """

    def __init__(self, batch_tokens: int = sys.maxsize) -> None:
        self.batch_tokens = batch_tokens

    def before_pass(self, model: LanguageModel) -> int:  # noqa: ARG002
        """Prepare the context for the next pass, and return the maximum number of prompt tokens in it."""
        return self.batch_tokens

    def verify(self, model: LanguageModel, tree: TokenTree) -> Logits:
        """Run a verify pass of `model`."""
        return model.verify(tree)


def logit_rows(
    model: LanguageModel,
    prompt: Sequence[int],
    reply: Sequence[int],
    *,
    width: int = 1,
    passes: Alone | None = None,
) -> NDArray[np.float32]:
    """Compute the logits after the tokens of a reply again. Overwrites the model's KV cache.

    Args:
        model: The model.
        prompt: Tokens of the prompt.
        reply: The first tokens of the reply.
        width: Number of tokens per verify pass.
        passes: Runs the passes. By default, a single pass prefills the prompt.

    Returns:
        The logits after the last tokens of `reply`, at most 64 of them, as float32 [tokens, vocab].
    """
    passes = passes or Alone()
    model.truncate(0)
    while model.length < len(prompt) - 1:
        end = min(model.length + passes.before_pass(model), len(prompt) - 1)
        model.prefill(prompt[model.length : end])
    tokens = [prompt[-1], *reply]
    everything = np.arange(model.facts.vocab_size)
    rows: list[NDArray[np.float32]] = []
    for start in range(0, len(tokens), width):
        real = tokens[start : start + width]
        passes.before_pass(model)
        tree = TokenTree.chain(real[0], [*real[1:], *[real[-1]] * (width - len(real))])
        logits = passes.verify(model, tree)
        rows += [logits.at(row, everything).astype(np.float32) for row in range(len(real))]
        del rows[:-_MAX_ROWS]
        model.commit(tuple(range(1, len(real))))
    return np.stack(rows)


def largest_difference(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Return the largest absolute difference between two arrays, or infinity if one contains a NaN."""
    with np.errstate(invalid="ignore"):
        distance = np.where(a == b, np.float32(0), np.abs(a - b))
    return float(np.where(np.isnan(distance), np.float32(np.inf), distance).max())


def is_near_tie(
    rescored: Rescored, params: SamplingParams, seed: int, history: Sequence[int], plain: int, other: int
) -> bool:
    """Return whether the measured rounding error explains why two replies differ.

    This is the case if each reply's token can be sampled from logits that differ from `rescored.plain` by at
    most `rescored.error`.

    Args:
        rescored: The logits at the first difference.
        params: Sampling settings.
        seed: Seed of the replies.
        history: Tokens of the prompt and the common part of the replies.
        plain: First token of plain decoding that differs.
        other: Token of the other reply at the same position.
    """
    if not rescored.error <= MAX_ROUNDING_ERROR:
        return False

    def sampled(row: NDArray[np.float32]) -> int:
        return Sampler(params, seed, history).token(HostLogits(row[None]), 0)

    def favoured(token: int, over: int) -> bool:
        moved = rescored.plain.copy()
        moved[token] += np.float32(rescored.error)
        moved[over] -= np.float32(rescored.error)
        return sampled(moved) == token

    return favoured(plain, other) and (
        favoured(other, plain) or any(sampled(row) == other for row in rescored.wide)
    )


def score_gap(
    row: NDArray[np.float32], params: SamplingParams, seed: int, history: Sequence[int], a: int, b: int
) -> float:
    """Return the difference between two tokens' scores, which are logits with penalties and random noise."""
    temperature = params.temperature or 1.0
    unfiltered = replace(params, temperature=temperature, **SamplingParams.disabled_filters())
    sampler = Sampler(unfiltered, seed, history)
    tokens, scores = sampler.scores(HostLogits(row[None]), 0)
    if params.temperature == 0:
        scores = scores - gumbel(seed, Stream.TOKEN, sampler.position, tokens)
    places = np.searchsorted(tokens, [a, b])
    return float(abs(scores[places[0]] - scores[places[1]])) * temperature
