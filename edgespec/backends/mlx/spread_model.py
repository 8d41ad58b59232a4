"""MLX models whose layers are on workers."""

from __future__ import annotations

from typing import NoReturn

from edgespec.backends.base import LanguageModel, LoadOptions, Snapshot
from edgespec.backends.mlx.loading import LoadedMlxModel
from edgespec.backends.mlx.model import MlxModel
from edgespec.backends.mlx.vocabulary import MlxVocabulary
from edgespec.backends.model_facts import ModelFacts
from edgespec.errors import CapabilityError, MemoryBudgetError

__all__ = ["SpreadModel"]


class SpreadModel(MlxModel):
    """An MLX model whose layers are on workers.

    Passes raise WorkerLostError after a worker was lost. After an interrupt, they raise CancelledError
    without waiting for the workers.
    """

    why_chains_only = "drafts without branches only, because its layers are on workers"

    def __init__(
        self, loaded: LoadedMlxModel, facts: ModelFacts, vocabulary: MlxVocabulary, options: LoadOptions
    ) -> None:
        super().__init__(loaded, facts, vocabulary, options)
        self._blocks, self._workers = loaded.blocks, options.workers

    def run_ahead(self, enabled: bool) -> None:
        """Do nothing, because a pass waits for the workers, so it cannot overlap with other work."""

    def pipeline_with(self, draft: LanguageModel | None) -> None:
        """Do nothing. See `run_ahead`."""

    def snapshot(self, start: int = 0, end: int | None = None) -> NoReturn:  # noqa: ARG002
        raise CapabilityError(
            f"the cache of {self.facts.name} cannot be copied, because it is on workers",
            "process the prompt again",
        )

    def restore(self, snapshot: Snapshot) -> NoReturn:  # noqa: ARG002
        raise CapabilityError(
            f"the cache of {self.facts.name} cannot be restored, because it is on workers",
            "process the prompt again",
        )

    def resize(self, context_tokens: int) -> None:
        raise MemoryBudgetError(
            f"the context of {self.facts.name} cannot change to {context_tokens:,} tokens, because its layers"
            " are on workers",
            "load the model again with another --context",
        )

    def interrupt(self, enabled: bool) -> None:
        super().interrupt(enabled)
        if self._workers is not None:
            self._workers.interrupt(enabled)

    def close(self) -> None:
        super().close()
        for block in self._blocks:
            block.close()
        if self._workers is not None:
            self._workers.close()
