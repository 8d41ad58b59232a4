"""Measure how other replies in a shared context change the logits of a reply.

They do so in two ways. Attention adds up the KV cells of a reply in the order of their places in memory,
which depends on the other replies. And kernels can round differently in passes that also contain tokens of
other replies. Both are rounding errors. The texts of the other replies must not matter at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import cycle, islice
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LanguageModel
from edgespec.engine.logits import Logits
from edgespec.engine.tree import TokenTree
from edgespec.losslessness.rescore import Alone, Rescored, largest_difference, logit_rows

__all__ = ["SharingErrors", "measure_sharing"]

# Maximum number of measurements. In small models, few placements of the KV cells change the logits at all.
_MAX_MEASUREMENTS = 64
# Stop after this many measurements with a rounding error.
_ENOUGH_ERRORS = 4
# Measure every fourth time with shared passes instead of moved KV cells.
_SHARED_EVERY = 4


class SharingErrors(NamedTuple):
    """How much the other replies in a context change the logits of a reply.

    Attributes:
        rescored: The logits at one token position, alone and beside other replies. Its error is the largest
            difference between them, at this position or an earlier one.
        leak: Largest difference that only the texts of the other replies caused. Unless it is 0, the reply
            read KV cells of another one.
    """

    rescored: Rescored
    leak: float


def measure_sharing(
    models: Sequence[LanguageModel],
    prompt: Sequence[int],
    reply: Sequence[int],
    others: Sequence[Sequence[int]],
    *,
    width: int,
    explains: Callable[[Rescored], bool],
) -> SharingErrors:
    """Compute the logits after a reply alone, and beside other replies in the same context.

    Overwrites the KV caches of all models.

    Args:
        models: The models that share the context, at least two. The first one runs the reply.
        prompt: Tokens of the prompt.
        reply: The first tokens of the reply.
        others: Texts for the other models, at least one. They are repeated if needed.
        width: Number of tokens per verify pass of each other model.
        explains: Called after each measurement. The first True ends them.
    """
    model, *neighbours = models
    for each in neighbours:
        each.truncate(0)
    plain = logit_rows(model, prompt, reply)
    total = len(prompt) + len(reply)
    random = np.random.default_rng(total)
    foreign = [[(token + 1) % model.facts.vocab_size for token in text] for text in others]
    errors: list[float] = []
    wide: list[NDArray[np.float32]] = []
    leak = 0.0
    with ThreadPoolExecutor(len(neighbours)) as pool:
        while len(errors) < _MAX_MEASUREMENTS and np.count_nonzero(errors) < _ENOUGH_ERRORS:
            size = int(random.integers(1, total // 2 + 2))
            passes: Alone
            if len(errors) % _SHARED_EVERY == 1:
                passes = _SharedPasses(neighbours, others, width, pool)
            else:
                passes = moving = _MovingPasses(neighbours, others, size, total)
            rows = logit_rows(model, prompt, reply, batch=size, passes=passes)
            wide.append(rows[-1])
            errors.append(largest_difference(plain, rows))
            if len(errors) == 1:
                again = _MovingPasses(neighbours, foreign, size, total)
                changed = logit_rows(model, prompt, reply, batch=size, passes=again)
                # The number of threads follows the load of the machine, and can change how sums are rounded.
                leak = largest_difference(rows, changed) if moving.threads == again.threads else 0.0
            if leak or explains(Rescored(plain[-1], wide, max(errors))):
                break
    for each in models:
        each.truncate(0)
    return SharingErrors(Rescored(plain[-1], wide, max(errors)), leak)


class _MovingPasses(Alone):
    """Runs passes in KV cells that neighbours gave up before, so that later tokens get earlier cells.

    Args:
        neighbours: Models that share the context.
        texts: The texts of the neighbours.
        size: Number of KV cells that a neighbour gives up at a time.
        total: Number of KV cells that the text needs.

    Attributes:
        threads: The number of CPU threads before each pass.
    """

    def __init__(
        self, neighbours: Sequence[LanguageModel], texts: Sequence[Sequence[int]], size: int, total: int
    ) -> None:
        self.threads: list[int] = []
        self._turns, self._size, self._next = cycle(neighbours), size, size
        for each, text in zip(neighbours, cycle(texts), strict=False):
            each.truncate(0)
            count = min(ceil(total / len(neighbours)), each.free_tokens)
            each.prefill(list(islice(cycle(text), count)))

    def before_pass(self, model: LanguageModel) -> None:
        self.threads.append(model.threads)
        if model.length >= self._next:
            neighbour = next(self._turns)
            neighbour.truncate(max(0, neighbour.length - self._size))
            self._next = model.length + self._size


class _SharedPasses(Alone):
    """Runs verify passes together with those of neighbours.

    Args:
        neighbours: Models that share the context.
        texts: The texts of the neighbours.
        width: Number of tokens per verify pass of a neighbour.
        pool: Runs the neighbours' passes, each in its own thread.
    """

    def __init__(
        self,
        neighbours: Sequence[LanguageModel],
        texts: Sequence[Sequence[int]],
        width: int,
        pool: Executor,
    ) -> None:
        self._width, self._pool = width, pool
        self._tokens = {each: cycle(text) for each, text in zip(neighbours, cycle(texts), strict=False)}
        for each in neighbours:
            each.truncate(0)

    def verify(self, model: LanguageModel, tree: TokenTree) -> Logits:
        running = [self._pool.submit(self._step, each) for each in self._tokens]
        logits = model.verify(tree)
        for step in running:
            step.result()
        return logits

    def _step(self, neighbour: LanguageModel) -> None:
        """Generate the next tokens of a neighbour's text, and start again where its context is full."""
        if neighbour.free_tokens < self._width:
            neighbour.truncate(0)
        root, *rest = islice(self._tokens[neighbour], self._width)
        neighbour.verify(TokenTree.chain(root, rest))
        neighbour.commit(tuple(range(1, self._width)))
