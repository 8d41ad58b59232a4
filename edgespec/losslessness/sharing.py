"""Measure how other replies in a shared context change a reply's logits.

There are two legitimate effects, both of them rounding errors. First, attention sums over a reply's KV cells
in memory order, which depends on the other replies. Second, kernels can round differently in passes that also
contain other replies' tokens. The texts of the other replies must have no effect.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import cycle, islice
from typing import NamedTuple

import numpy as np

from edgespec.engine.logits import Logits
from edgespec.engine.tree import TokenTree
from edgespec.losslessness.replay import Alone, largest_difference, logit_rows
from edgespec.model.base import LanguageModel

__all__ = ["SharingErrors", "measure_sharing"]

# Maximum number of measurements. Many may be needed, because on a small model, few placements of the KV cells
# change the logits at all.
_MAX_MEASUREMENTS = 64
# Stop once this many measurements have shown a rounding error. One is enough to tell rounding from a fault.
# The second makes the reported size of the error less accidental. A measurement takes as long as a reply.
_ENOUGH_ERRORS = 2
# Maximum number of times that other replies free KV cells while the reply is computed. The reply's next
# tokens then occupy the freed cells.
_MAX_MOVES = 3
# Number of tokens that each other model keeps in its cache, to expose bugs that make a reply read another
# reply's KV cells.
_KEPT_TOKENS = 32
# Every fourth measurement runs the reply in passes shared with other replies (`_SharedPasses`). The rest vary
# the placement of its KV cells (`_MovingPasses`).
_SHARED_EVERY = 4


class SharingErrors(NamedTuple):
    """The changes in a reply's logits caused by other replies in the same context.

    Attributes:
        largest_difference: Largest difference between the logits of the reply alone and together with the
            others.
        leak: Largest difference caused by the texts of the other replies. Unless it is 0, the reply read KV
            cells of another reply.
    """

    largest_difference: float
    leak: float


def measure_sharing(
    models: Sequence[LanguageModel],
    prompt: Sequence[int],
    reply: Sequence[int],
    others: Sequence[Sequence[int]],
    *,
    width: int,
) -> SharingErrors:
    """Compare the logits of a reply alone with those computed together with other replies.

    Overwrites the KV caches of all models.

    Args:
        models: The models that share the context, at least two. The first one runs the reply.
        prompt: Tokens of the prompt.
        reply: The first tokens of the reply.
        others: Texts for the other models, at least one. They are repeated if necessary.
        width: Number of tokens per verify pass of each other model.
    """
    model, *neighbours = models
    for each in neighbours:
        each.truncate(0)
    plain = logit_rows(model, prompt, reply)
    total = len(prompt) + len(reply)
    leak = _measure_leak(models, prompt, reply, others)
    errors: list[float] = []
    with ThreadPoolExecutor(len(neighbours)) as pool:
        while len(errors) < _MAX_MEASUREMENTS and np.count_nonzero(errors) < _ENOUGH_ERRORS:
            passes: Alone
            if len(errors) % _SHARED_EVERY == 1:
                passes = _SharedPasses(neighbours, others, width, pool)
            else:
                passes = _MovingPasses(models, others, total, seed=len(errors))
            rows = logit_rows(model, prompt, reply, passes=passes)
            errors.append(largest_difference(plain, rows))
            if leak:
                break
    for each in models:
        each.truncate(0)
    return SharingErrors(max(errors), leak)


def _measure_leak(
    models: Sequence[LanguageModel],
    prompt: Sequence[int],
    reply: Sequence[int],
    others: Sequence[Sequence[int]],
) -> float:
    """Return the largest logit difference between two runs that differ only in the other models' texts.

    Both runs use a single CPU thread. The thread count would otherwise follow the machine's load, and can
    change how sums are rounded.
    """
    model = models[0]
    foreign = [[(token + 1) % model.facts.vocab_size for token in text] for text in others]
    threads = model.max_threads
    model.set_max_threads(1)
    try:
        first, second = (
            logit_rows(
                model, prompt, reply, passes=_MovingPasses(models, texts, len(prompt) + len(reply), seed=0)
            )
            for texts in (others, foreign)
        )
    finally:
        model.set_max_threads(threads)
    return largest_difference(first, second)


class _MovingPasses(Alone):
    """Runs passes while neighbours free KV cells, so that later tokens of the text get earlier cells.

    A neighbour is another model that shares the context. At one or more random positions of the text, a
    neighbour frees a random number of its cells.

    Args:
        models: The models that share the context. The first one runs the text.
        texts: The texts of the neighbours.
        total: Number of KV cells that the text needs.
        seed: Seed of the random positions and numbers.
    """

    def __init__(
        self,
        models: Sequence[LanguageModel],
        texts: Sequence[Sequence[int]],
        total: int,
        *,
        seed: int,
    ) -> None:
        super().__init__()
        self._random = np.random.default_rng(seed)
        self._turns, self._total = cycle(models[1:]), total
        count = int(self._random.integers(1, _MAX_MOVES + 1))
        # Make early positions more likely, because replies often continue a short cached prefix.
        self._moves = deque(sorted((total ** self._random.random(count)).astype(int).tolist()))
        # Fill the neighbours' cells first, so that the cells that they free precede those of the text.
        for each in models:
            each.truncate(0)
        for each, text in zip(models[1:], cycle(texts), strict=False):
            each.prefill(list(islice(cycle(text), min(_KEPT_TOKENS + total, each.free_tokens))))

    def before_pass(self, model: LanguageModel) -> int:
        while self._moves and self._moves[0] <= model.length:
            self._moves.popleft()
            neighbour, most = next(self._turns), self._total - model.length
            given_up = int(self._random.integers(1, max(2, most)))
            neighbour.truncate(max(_KEPT_TOKENS, neighbour.length - given_up))
        return self._moves[0] - model.length if self._moves else self._total


class _SharedPasses(Alone):
    """Runs verify passes together with verify passes of neighbours.

    Args:
        neighbours: The other models that share the context.
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
        super().__init__()
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
        """Run the next tokens of a neighbour's text, clearing its context first if it is full."""
        if neighbour.free_tokens < self._width:
            neighbour.truncate(0)
        root, *rest = islice(self._tokens[neighbour], self._width)
        neighbour.verify(TokenTree.chain(root, rest))
        neighbour.commit(tuple(range(1, self._width)))
