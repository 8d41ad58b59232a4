"""Measure how often partial models predict the same token as the full model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from edgespec.backends.mlx.evaluation import evaluate
from edgespec.backends.mlx.layer_caches import CacheCheckpoint, LayerCaches
from edgespec.backends.mlx.layers import HiddenStateHooks, LayerList
from edgespec.backends.mlx.pass_layout import PassLayout

__all__ = ["BestTokens", "PartialModelScorer"]

# The most likely next token for each token in a pass, as an array [tokens].
BestTokens: TypeAlias = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class _WholeModelScore:
    """Predictions of the full model for the most recent cached tokens."""

    checkpoint: CacheCheckpoint
    tokens: tuple[int, ...]
    best: BestTokens


class PartialModelScorer:
    """Run partial models on known tokens without changing the rows of the caches.

    The offsets of the caches do change. The caller must restore them after each call.
    """

    def __init__(
        self,
        forward: Callable[[mx.array, AbstractContextManager[None]], mx.array],
        caches: LayerCaches,
        layout: PassLayout,
    ) -> None:
        """Create a scorer.

        Args:
            forward: Function that runs tokens [n] inside a context manager and returns logits [n, vocab].
            caches: The model's caches.
            layout: The pass layout that the caches use.
        """
        self._forward = forward
        self._caches = caches
        self._layout = layout
        self._whole: _WholeModelScore | None = None

    def agreement(
        self, checkpoint: CacheCheckpoint, tokens: Sequence[int], partial_model: AbstractContextManager[None]
    ) -> float:
        """Return how often (0 to 1) a partial model predicts the same token as the full model.

        Args:
            checkpoint: Checkpoint of the current caches. The predictions of the full model are reused if the
                checkpoint and the tokens are the same as in the last call.
            tokens: The most recent cached tokens.
            partial_model: Context manager inside which passes use the partial model.
        """
        start = checkpoint.length - len(tokens)
        whole = self._whole
        if not whole or whole.checkpoint is not checkpoint or whole.tokens != tuple(tokens):
            best = self._best_tokens(tokens, start, nullcontext())
            whole = self._whole = _WholeModelScore(checkpoint, tuple(tokens), best)
        return float(np.mean(self._best_tokens(tokens, start, partial_model) == whole.best))

    def best_by_exit(
        self, start: int, tokens: Sequence[int], layers: LayerList, hooks: HiddenStateHooks
    ) -> list[BestTokens]:
        """Return the predictions of each early exit for `tokens`, which start at position `start`."""
        self._best_tokens(tokens, start, hooks.on(range(hooks.count)))
        return [
            self._best_tokens(
                tokens, start, layers.replaced(layers.resumed_at(hooks.count, hooks.outputs[layer]))
            )
            for layer in range(hooks.count)
        ]

    def _best_tokens(
        self, tokens: Sequence[int], start: int, partial_model: AbstractContextManager[None]
    ) -> BestTokens:
        try:
            self._caches.set_offset(start)
            self._layout.set_chain(start)
            self._layout.scratch = True
            best = mx.argmax(self._forward(mx.array(list(tokens)), partial_model), axis=-1)
            evaluate(best)
            return np.array(best)
        finally:
            self._layout.scratch = False
