"""Recompute the logits along a given text and compare them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.logits import Logits
from edgespec.engine.tree import TokenTree
from edgespec.model.base import LanguageModel

__all__ = ["MAX_ROWS", "Alone", "largest_difference", "logit_rows"]

# Maximum number of tokens whose logits are compared. This bounds memory use: with a vocabulary of 262,144
# tokens, each row of logits takes 1 MiB.
MAX_ROWS = 64


class Alone:
    """Runs passes over a text while no other reply is in the context.

    Args:
        batch_tokens: Maximum number of prompt tokens per pass.
    """

    def __init__(self, batch_tokens: int = sys.maxsize) -> None:
        self.batch_tokens = batch_tokens

    def before_pass(self, model: LanguageModel) -> int:  # noqa: ARG002
        """Prepare the context for the next pass, and return how many prompt tokens it may contain."""
        return self.batch_tokens

    def verify(self, model: LanguageModel, tree: TokenTree) -> Logits:
        """Run a verify pass of `model`."""
        return model.verify(tree)


def logit_rows(
    model: LanguageModel, prompt: Sequence[int], reply: Sequence[int], passes: Alone | None = None
) -> NDArray[np.float32]:
    """Compute the logits along a reply with single-token passes.

    Overwrites the model's KV cache.

    Args:
        model: The model.
        prompt: Tokens of the prompt.
        reply: The first tokens of the reply.
        passes: Runs the passes. By default, a single pass prefills the prompt.

    Returns:
        The logits after up to 64 last tokens of `reply`, as float32 [tokens, vocab].
    """
    passes = passes or Alone()
    model.truncate(0)
    while model.length < len(prompt) - 1:
        end = min(model.length + passes.before_pass(model), len(prompt) - 1)
        model.prefill(prompt[model.length : end])
    everything = np.arange(model.facts.vocab_size)
    rows: list[NDArray[np.float32]] = []
    for token in (prompt[-1], *reply):
        passes.before_pass(model)
        logits = passes.verify(model, TokenTree.chain(token))
        rows.append(logits.at(0, everything).astype(np.float32))
        del rows[:-MAX_ROWS]
        model.commit(())
    return np.stack(rows)


def largest_difference(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Return the largest absolute difference between two arrays, or infinity if one contains a NaN."""
    with np.errstate(invalid="ignore"):
        distance = np.where(a == b, np.float32(0), np.abs(a - b))
    return float(np.where(np.isnan(distance), np.float32(np.inf), distance).max(initial=0.0))
