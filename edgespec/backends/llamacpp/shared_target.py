"""The parts of a loaded target that a low-bit draft uses."""

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
    """A loaded target, or the lower and upper split of one, whose KV cells a draft copies.

    Attributes:
        model: The target.
        weights: Its llama_model, or those of the lower and the upper split.
        contexts: The contexts of `weights`.
        cells: The tokens that all of the contexts hold.
        plan: The layout of each context at its maximum size.
        options: How the target was loaded.
        check_open: Raises ClosedError after the target was closed.
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
        """The facts of the target."""
        return self.model.facts

    @property
    def length(self) -> int:
        """The number of tokens in the target's cache."""
        return self.model.length

    @property
    def free_tokens(self) -> int:
        """The number of tokens that the target's context has left."""
        return self.model.free_tokens

    def export_cells(self, start: int, end: int) -> Sequence[bytes | memoryview]:
        """Return the cells at positions [start, end) in all layers, as `LlamaContext.export_cells` does.

        Raises:
            CapabilityError: The cells of the two splits cannot be merged.
        """
        lower, *upper = (context.export_cells(0, start, end) for context in self.contexts)
        return merge_kv(lower, upper[0], self.facts.name) if upper else lower
