"""Passes of which nothing is kept: how well a model would do with less of it."""

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

__all__ = ["Best", "PartialModelScorer"]

# The best token after each token of a pass.
Best: TypeAlias = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class _Scored:
    """What the whole model says after each of the last cached tokens."""

    kept: CacheCheckpoint
    tokens: tuple[int, ...]
    best: Best


class PartialModelScorer:
    """Runs tokens beside the caches of a model; whoever asks puts the memory's offsets right afterwards.

    run: runs tokens with a part of the model, and gives their logits [n, vocab].
    """

    def __init__(
        self,
        run: Callable[[mx.array, AbstractContextManager[None]], mx.array],
        memory: LayerCaches,
        shape: PassLayout,
    ) -> None:
        self._run = run
        self._memory = memory
        self._shape = shape
        self._scored: _Scored | None = None

    def agreement(
        self, kept: CacheCheckpoint, tokens: Sequence[int], part: AbstractContextManager[None]
    ) -> float:
        """How often the best token after each of the last cached tokens is the same with a part only."""
        start = kept.length - len(tokens)
        if not self._scored or self._scored.kept is not kept or self._scored.tokens != tuple(tokens):
            self._scored = _Scored(kept, tuple(tokens), self._best(tokens, start, nullcontext()))
        return float(np.mean(self._best(tokens, start, part) == self._scored.best))

    def best_by_exit(
        self, start: int, tokens: Sequence[int], layers: LayerList, taps: HiddenStateHooks
    ) -> list[Best]:
        """The best token after each of these, run at position `start`, if the model ended with each layer."""
        self._best(tokens, start, taps.on(range(taps.count)))
        return [
            self._best(tokens, start, layers.replaced(layers.after(taps.count, taps.outputs[layer])))
            for layer in range(taps.count)
        ]

    def _best(self, tokens: Sequence[int], start: int, part: AbstractContextManager[None]) -> Best:
        try:
            self._memory.stand(start)
            self._shape.chain(start)
            self._shape.scratch = True
            best = mx.argmax(self._run(mx.array(list(tokens)), part), axis=-1)
            evaluate(best)
            return np.array(best)
        finally:
            self._shape.scratch = False
