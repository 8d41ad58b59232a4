"""Choose the exit layer for early-exit drafting (LayerSkip, arXiv 2404.16710) by agreement and cost.

Only models trained for early exit make good predictions from their lower layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgespec.engine.draft_length import best_draft_length
from edgespec.methods.constants import MAX_EXIT_DRAFT_LENGTH, MIN_TRAINED_AGREEMENT
from edgespec.methods.costs.curve import CostFunction, assumed_cost

__all__ = ["EXIT_WIDTHS", "Exit", "ExitTable", "exit_table"]

# Measure the cost of verify passes with these numbers of tokens.
EXIT_WIDTHS = range(1, MAX_EXIT_DRAFT_LENGTH + 2)


@dataclass(frozen=True, slots=True)
class Exit:
    """A possible exit layer and its expected speed-up.

    Attributes:
        exit_layer: Number of layers run in a draft pass.
        agreement: Fraction of positions where these layers predict the same token as the full model.
        cost: Cost of drafting a token, as a multiple of the cost of a single-token pass of the full model.
        draft_length: Draft length with the highest expected speed-up.
        speed_up: Expected speed-up over plain decoding. 1.0 means no speed-up.
    """

    exit_layer: int
    agreement: float
    cost: float
    draft_length: int
    speed_up: float

    @property
    def is_faster(self) -> bool:
        return self.speed_up > 1.0

    @property
    def shortfall(self) -> str:
        """Why early exit is not faster than plain decoding, for the user, or an empty string."""
        if self.is_faster:
            return ""
        reason = "does not benefit from" if self.agreement >= MIN_TRAINED_AGREEMENT else "was not trained for"
        return f"{reason} early exit, so it would not be faster here ({self.speed_up:.2f}x)"

    def to_json(self) -> dict[str, float]:
        return {
            "exit_layer": self.exit_layer,
            "agreement": round(self.agreement, 4),
            "cost": round(self.cost, 4),
            "draft_length": self.draft_length,
            "speed_up": round(self.speed_up, 3),
        }


@dataclass(frozen=True, slots=True)
class ExitTable:
    """A model's possible exit layers, from the lowest to the highest, with their expected speed-ups."""

    exits: tuple[Exit, ...]
    layer_count: int

    @property
    def best(self) -> Exit:
        """The exit layer with the highest expected speed-up. Ties favour the lowest layer."""
        return max(self.exits, key=lambda one: one.speed_up)

    @property
    def is_faster(self) -> bool:
        return self.best.is_faster

    @property
    def verdict(self) -> str:
        """User-facing summary of whether early exit is faster."""
        best = self.best
        accuracy = (
            f"after {best.exit_layer} of {self.layer_count} layers it predicts the full model's token"
            f" {best.agreement:.0%} of the time"
        )
        if best.is_faster:
            return f"{accuracy}: about {best.speed_up:.2f}x with a draft length of {best.draft_length}"
        return f"it {best.shortfall}: {accuracy}"


def exit_table(
    agreements: Mapping[int, float],
    layer_bytes: Sequence[int],
    head_bytes: int,
    v: CostFunction = assumed_cost,
) -> ExitTable:
    """Estimate the speed-up of drafting with each exit layer.

    Args:
        agreements: Agreement with the full model for each exit layer, from 1 to the number of layers - 1.
        layer_bytes: Weight bytes of each layer.
        head_bytes: Weight bytes of the output head, which is read after the last layer.
        v: Returns the cost of a verify pass of a given width, as a multiple of the cost of a single-token
            pass.
    """
    total = sum(layer_bytes) + head_bytes
    exits = []
    for layer, agreement in sorted(agreements.items()):
        lower_cost = sum(layer_bytes[:layer]) / total
        draft_cost = lower_cost + head_bytes / total

        def cost(length: int, lower_cost: float = lower_cost, draft_cost: float = draft_cost) -> float:
            # The verify pass reuses the lower layers' results for all tokens but the last drafted one.
            return length * draft_cost + lower_cost + (1 - lower_cost) * v(length + 1)

        length, speed_up = best_draft_length(agreement, cost, MAX_EXIT_DRAFT_LENGTH)
        exits.append(Exit(layer, agreement, draft_cost, length, speed_up))
    return ExitTable(tuple(exits), len(layer_bytes))
