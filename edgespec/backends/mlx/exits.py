"""Where to leave a model early: measured on a short text, weighed by what the layers cost.

Source: LayerSkip (arXiv 2404.16710). A model that was not trained for it rarely says the same half-way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.backends.base import LanguageModel
from edgespec.backends.mlx.model import MlxModel
from edgespec.engine.payoff import best_chain
from edgespec.errors import CapabilityError

__all__ = ["Exit", "ExitTable", "choose_exit"]

_LONGEST_DRAFT = 12


@dataclass(frozen=True, slots=True)
class Exit:
    """One place to leave.

    agreement: how often the best token is the whole model's. cost: a drafted token, in plain steps.
    speed_up: what is to be expected over plain decoding, with `draft_length` tokens drafted a round.
    """

    exit_layer: int
    agreement: float
    cost: float
    draft_length: int
    speed_up: float


@dataclass(frozen=True, slots=True)
class ExitTable:
    """All exits of a model, from the lowest to the highest."""

    exits: tuple[Exit, ...]

    @property
    def best(self) -> Exit:
        return max(self.exits, key=lambda one: one.speed_up)

    @property
    def pays(self) -> bool:
        return self.best.speed_up > 1.0

    @property
    def verdict(self) -> str:
        """One line for people."""
        best = self.best
        right = f"after {best.exit_layer} of {len(self.exits) + 1} layers its best token is the whole model's"
        right = f"{right} {best.agreement:.0%} of the time"
        if not self.pays:
            return f"it was not trained for early exit and it will not pay: {right}"
        return f"{right}: about {best.speed_up:.2f} times as fast, {best.draft_length} tokens drafted a round"


def choose_exit(
    model: LanguageModel, tokens: Sequence[int], first: int = 0, v: Callable[[int], float] = lambda _: 1.0
) -> ExitTable:
    """Try every exit on a text, in one pass through the layers; the cache is left as it is.

    tokens: 64 to 256 of ordinary text, judged from `first` on; they must fit the context. v: what a pass of
    so many rows costs, in plain steps. Raises CapabilityError where this model cannot be left early,
    ContextFullError.
    """
    if not isinstance(model, MlxModel):
        raise CapabilityError(f"{model.facts.name} cannot be left early", "choose another method")
    model.parts.check("layerskip", model.facts)
    said = model.best_by_exit(tokens)
    lower, head = model.parts.layer_bytes()
    exits = []
    for layer in range(1, len(lower)):
        agreement = float(np.mean((said[layer - 1] == said[-1])[first:]))
        exits.append(_estimated(layer, agreement, sum(lower[:layer]), sum(lower[layer:]), head, v))
    return ExitTable(tuple(exits))


def _estimated(
    layer: int, agreement: float, lower: int, upper: int, head: int, v: Callable[[int], float]
) -> Exit:
    """The best draft length and what it gives; lower, upper, head: bytes that are read for them."""
    total = lower + upper + head
    below, drafted = lower / total, (lower + head) / total
    # The pass that verifies goes on where the drafts left; the last of them has not run at all.
    length, speed_up = best_chain(
        agreement, lambda k: k * drafted + below + (1 - below) * v(k + 1), _LONGEST_DRAFT
    )
    return Exit(layer, agreement, drafted, length, speed_up)
