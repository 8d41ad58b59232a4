"""Comparison of early-exit layers: how often each agrees with the whole model, and the speed-up it gives.

Source: LayerSkip (arXiv 2404.16710). Models that were not trained for early exit rarely agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.costs.curve import CostFunction, assumed_cost
from edgespec.engine.draft_length import best_draft_length

__all__ = ["EXIT_WIDTHS", "Exit", "ExitTable", "evaluate_exits"]

_MAX_DRAFT_LENGTH = 12
# Widths of verify passes that are compared: the root and up to 12 drafted tokens.
EXIT_WIDTHS = range(1, _MAX_DRAFT_LENGTH + 2)
# Agreement from which a model counts as trained for early exit. Chosen.
_TRAINED_AGREEMENT = 0.6


@dataclass(frozen=True, slots=True)
class Exit:
    """An early exit of a model.

    Attributes:
        exit_layer: Layers that run before the exit.
        agreement: Share of positions where the exit's most likely token is the whole model's.
        cost: Cost of drafting a token, in target steps.
        draft_length: Draft length with the largest expected speed-up.
        speed_up: Expected speed over plain decoding with that draft length.
    """

    exit_layer: int
    agreement: float
    cost: float
    draft_length: int
    speed_up: float

    @property
    def saves_time(self) -> bool:
        """Whether drafting with this exit is expected to be faster than plain decoding on this machine."""
        return self.speed_up > 1.0

    @property
    def problem(self) -> str:
        """Why the exit saves no time, as a predicate of the model's name; empty if it does."""
        if self.saves_time:
            return ""
        if self.agreement >= _TRAINED_AGREEMENT:
            return "gains no speed from early exit on this machine"
        return "was not trained for early exit, so drafting with it would save no time"

    def to_json(self) -> dict[str, float]:
        """Return the attributes as a JSON object, rounded."""
        return {
            "exit_layer": self.exit_layer,
            "agreement": round(self.agreement, 4),
            "cost": round(self.cost, 4),
            "draft_length": self.draft_length,
            "speed_up": round(self.speed_up, 3),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Exit:
        """Return the exit that `to_json` wrote."""
        return cls(**value)


@dataclass(frozen=True, slots=True)
class ExitTable:
    """All measured exits of a model.

    Attributes:
        exits: The exits in ascending order of layers; at least one.
        layer_count: Layers of the model.
    """

    exits: tuple[Exit, ...]
    layer_count: int

    @property
    def best(self) -> Exit:
        """The exit with the largest expected speed-up; the lowest one on ties."""
        return max(self.exits, key=lambda each: each.speed_up)

    @property
    def saves_time(self) -> bool:
        """Whether the best exit is expected to be faster than plain decoding on this machine."""
        return self.best.saves_time

    @property
    def summary(self) -> str:
        """The best exit in one line, to be shown after the model's name and a colon."""
        best = self.best
        agreement = (
            f"after {best.exit_layer} of {self.layer_count} layers it predicts the model's next token"
            f" {best.agreement:.0%} of the time"
        )
        if best.saves_time:
            return f"{agreement}: speed-up about {best.speed_up:.2f}x with {best.draft_length} drafted tokens"
        return f"it {best.problem}: {agreement} (speed-up {best.speed_up:.2f}x)"


def evaluate_exits(
    agreements: Mapping[int, float],
    layer_bytes: Sequence[int],
    head_bytes: int,
    v: CostFunction = assumed_cost,
) -> ExitTable:
    """Compare exits by their expected speed-up. The cost of a pass is the share of bytes that it reads.

    Args:
        agreements: By exit layer, the share of positions where the exit agrees with the whole model.
        layer_bytes: Weights of each layer.
        head_bytes: Weights that a pass reads after the last layer.
        v: Cost of a verify pass of the whole model by width, in target steps.
    """
    total = sum(layer_bytes) + head_bytes
    exits = []
    for layer, agreement in sorted(agreements.items()):
        lower_cost = sum(layer_bytes[:layer]) / total
        exits.append(_evaluate_exit(layer, agreement, lower_cost, lower_cost + head_bytes / total, v))
    return ExitTable(tuple(exits), len(layer_bytes))


def _evaluate_exit(
    layer: int, agreement: float, lower_cost: float, draft_cost: float, v: CostFunction
) -> Exit:
    """Find the best draft length of an exit.

    Args:
        layer: The exit layer.
        agreement: Share of positions where the exit agrees with the whole model.
        lower_cost: Cost of the layers below the exit, in target steps.
        draft_cost: Cost of a drafted token: these layers and the head.
        v: Cost of a verify pass of the whole model by width, in target steps.
    """
    # The verify pass continues from the layers that the drafts have run. Only the last drafted token has not
    # run through the lower layers yet.
    length, speed_up = best_draft_length(
        agreement, lambda k: k * draft_cost + lower_cost + (1 - lower_cost) * v(k + 1), _MAX_DRAFT_LENGTH
    )
    return Exit(layer, agreement, draft_cost, length, speed_up)
