"""What a loaded model gives to a view that drafts on its keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edgespec.backends.base import LoadOptions, ModelFacts, Vocabulary
from edgespec.backends.llamacpp.cells import Cells
from edgespec.backends.llamacpp.context import ContextPlan, LlamaContext

__all__ = ["TargetParts"]


@dataclass(frozen=True, slots=True)
class TargetParts:
    """The parts of a loaded target. check_open: raises ClosedError when they are gone."""

    weights: Any
    context: LlamaContext
    cells: Cells
    plan: ContextPlan
    options: LoadOptions
    facts: ModelFacts
    vocabulary: Vocabulary
    check_open: Callable[[], None]

    @property
    def length(self) -> int:
        """Tokens in its memory."""
        return self.cells.length

    @property
    def room(self) -> int:
        """How many more tokens its context takes."""
        return self.context.tokens - self.cells.length
