"""Where to leave a model early: how often each exit agrees with the whole model, weighed by what it costs.

GgufModel: LayerSkip (arXiv 2404.16710). A model that was not trained for it rarely says the same half-way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.costs.curve import CostFunction, assumed_cost
from edgespec.engine.draft_length import best_draft_length

__all__ = ["EXIT_WIDTHS", "Exit", "ExitTable", "exit_table"]

_LONGEST_DRAFT = 12
# Rows of the passes that a table weighs: those of its drafts, the root included.
EXIT_WIDTHS = range(1, _LONGEST_DRAFT + 2)
# An exit that agrees as often as this was meant to be one.
_TRAINED = 0.6


@dataclass(frozen=True, slots=True)
class Exit:
    """One place to leave: after `exit_layer` layers.

    agreement: how often its best token is the whole model's. cost: a drafted token, in plain steps.
    speed_up: what is to be expected over plain decoding (1.0: nothing), with `draft_length` tokens drafted
    a round.
    """

    exit_layer: int
    agreement: float
    cost: float
    draft_length: int
    speed_up: float

    @property
    def pays(self) -> bool:
        """Whether it is expected to be faster than plain decoding on this machine."""
        return self.speed_up > 1.0

    @property
    def shortfall(self) -> str:
        """Why it does not pay, in words that go on after the model's name; none where it does."""
        if self.pays:
            return ""
        why = "gains nothing from" if self.agreement >= _TRAINED else "was not trained for"
        return f"{why} early exit, so it will not pay here"

    def to_json(self) -> dict[str, float]:
        """The numbers as a JSON object."""
        return {
            "exit_layer": self.exit_layer,
            "agreement": round(self.agreement, 4),
            "cost": round(self.cost, 4),
            "draft_length": self.draft_length,
            "speed_up": round(self.speed_up, 3),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Exit:
        """What `to_json` gave."""
        return cls(**value)


@dataclass(frozen=True, slots=True)
class ExitTable:
    """Exits of a model of `layer_count` layers, from the lowest to the highest; at least one."""

    exits: tuple[Exit, ...]
    layer_count: int

    @property
    def best(self) -> Exit:
        """The exit of the largest expected speed-up, the lowest of equals."""
        return max(self.exits, key=lambda one: one.speed_up)

    @property
    def pays(self) -> bool:
        """Whether the best exit is expected to be faster than plain decoding on this machine."""
        return self.best.pays

    @property
    def verdict(self) -> str:
        """One line for people, that goes on after the model's name and a colon."""
        best = self.best
        right = (
            f"after {best.exit_layer} of {self.layer_count} layers its best token is the whole model's"
            f" {best.agreement:.0%} of the time"
        )
        if best.pays:
            return f"{right}: about {best.speed_up:.2f}x with {best.draft_length} tokens drafted a round"
        return f"it {best.shortfall}: {right}, which would give {best.speed_up:.2f}x"


def exit_table(
    agreements: Mapping[int, float],
    layer_bytes: Sequence[int],
    head_bytes: int,
    v: CostFunction = assumed_cost,
) -> ExitTable:
    """What each exit is worth, by the bytes that are read for its passes.

    agreements: by exit layer, how often its best token is the whole model's; exits lie between the first
    layer and the last. layer_bytes: of each layer; head_bytes: of what a pass reads after the last one.
    v: what a pass of so many rows costs on the whole model, in plain steps.
    """
    total = sum(layer_bytes) + head_bytes
    exits = []
    for layer, agreement in sorted(agreements.items()):
        below = sum(layer_bytes[:layer]) / total
        exits.append(_weighed(layer, agreement, below, below + head_bytes / total, v))
    return ExitTable(tuple(exits), len(layer_bytes))


def _weighed(layer: int, agreement: float, below: float, drafted: float, v: CostFunction) -> Exit:
    """The best draft length and what it gives. below: the share of a plain step that the layers below the
    exit take; drafted: the same with the head, for a drafted token."""
    # The pass that verifies goes on where the drafts left; the last of them has not run at all.
    length, speed_up = best_draft_length(
        agreement, lambda k: k * drafted + below + (1 - below) * v(k + 1), _LONGEST_DRAFT
    )
    return Exit(layer, agreement, drafted, length, speed_up)
