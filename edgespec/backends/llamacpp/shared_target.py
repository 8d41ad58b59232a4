"""Give a low-bit draft model access to the KV cells of a loaded target model."""

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
    """A loaded target model whose KV cells a low-bit draft model copies.

    Attributes:
        model: The target model.
        weights: The target's llama_model handle, or those of its lower and upper split.
        contexts: The context of each llama_model in `weights`.
        cells: The tokens in the KV cache, which are the same in all contexts.
        plan: The layout of each context at its maximum size.
        options: The options that the target was loaded with.
        check_open: A function that raises ClosedError if the target has been closed.
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
        """The `ModelFacts` of the target."""
        return self.model.facts

    @property
    def length(self) -> int:
        """The number of tokens in the target's cache."""
        return self.model.length

    @property
    def free_tokens(self) -> int:
        """The number of free cells in the target's context."""
        return self.model.free_tokens

    def export_cells(self, start: int, end: int) -> Sequence[bytes | memoryview]:
        """Return the cells of all layers at positions [start, end). See `LlamaContext.export_cells`.

        Raises:
            CapabilityError: The cells of the two splits cannot be merged.
        """
        lower, *upper = (context.export_cells(0, start, end) for context in self.contexts)
        return merge_kv(lower, upper[0], self.facts.name) if upper else lower
