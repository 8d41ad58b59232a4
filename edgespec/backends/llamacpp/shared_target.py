"""What a loaded model gives to a view that drafts on its keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.backends.base import LanguageModel, LoadOptions, ModelFacts
from edgespec.backends.llamacpp.context import ContextPlan, LlamaContext
from edgespec.backends.llamacpp.kv_cells import KvCells
from edgespec.backends.llamacpp.merged_kv import merge_kv

__all__ = ["SharedTarget"]


@dataclass(frozen=True, slots=True)
class SharedTarget:
    """The parts of a loaded target, or of both its halves: weights and contexts, the lower layers first.

    cells: what all of their contexts hold. plan: of each context at its largest. check_open: raises
    ClosedError when they are gone.
    """

    model: LanguageModel
    weights: tuple[Any, ...]
    contexts: tuple[LlamaContext, ...]
    cells: KvCells
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
    def free_tokens(self) -> int:
        """How many more tokens its context takes."""
        return self.model.free_tokens

    def export_cells(self, start: int, end: int) -> Sequence[bytes | memoryview]:
        """The cells of positions [start, end) in all layers, as `LlamaContext.export_cells` gives them.

        Raises CapabilityError where those of two halves cannot be put together; see `joined`.
        """
        lower, *upper = (context.export_cells(0, start, end) for context in self.contexts)
        return merge_kv(lower, upper[0], self.facts.name) if upper else lower
