"""What a loaded model gives to a view that drafts on its keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.backends.base import LanguageModel, LoadOptions, ModelFacts
from edgespec.backends.llamacpp.cells import Cells
from edgespec.backends.llamacpp.context import ContextPlan, LlamaContext
from edgespec.backends.llamacpp.joined import join

__all__ = ["TargetParts", "lift_whole"]


@dataclass(frozen=True, slots=True)
class TargetParts:
    """The parts of a loaded target: in tuples those of both its halves, the lower layers first, or of all.

    cells: those of them all. check_open: raises ClosedError when they are gone.
    """

    model: LanguageModel
    weights: tuple[Any, ...]
    contexts: tuple[LlamaContext, ...]
    cells: Cells
    plan: ContextPlan
    options: LoadOptions
    check_open: Callable[[], None]

    @property
    def facts(self) -> ModelFacts:
        """Of the whole model."""
        return self.model.facts

    @property
    def length(self) -> int:
        """Tokens in its memory."""
        return self.model.length

    @property
    def room(self) -> int:
        """How many more tokens its context takes."""
        return self.model.room

    def lift(self, start: int, end: int) -> Sequence[bytes | memoryview]:
        """The cells of positions [start, end) in all layers, as `LlamaContext.lift` gives them."""
        return lift_whole(self.contexts, start, end, self.facts.name)


def lift_whole(
    contexts: Sequence[LlamaContext], start: int, end: int, name: str
) -> Sequence[bytes | memoryview]:
    """The cells [start, end) of a model in one context, or in two; see `joined`. Raises CapabilityError."""
    lower, *upper = (context.lift(0, start, end) for context in contexts)
    return join(lower, upper[0], name) if upper else lower
