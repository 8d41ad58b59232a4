"""The base class for self-draft models, which share the KV cache of their target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LanguageModel, Progress, Snapshot, Vocabulary
from edgespec.backends.base_model import BaseModel
from edgespec.backends.model_facts import ModelFacts
from edgespec.backends.self_draft_methods import SelfDraft
from edgespec.engine.logits import Logits
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError, CapabilityError, ClosedError

__all__ = ["M", "SelfDraftView"]

M = TypeVar("M", bound=BaseModel)


class SelfDraftView(ABC, Generic[M]):
    """A draft model without a KV cache of its own, as returned by `LanguageModel.self_draft`.

    The target's cache holds all tokens, so most calls do nothing. Subclasses implement `verify`, and extend
    `interrupt` and `close` if they own a context.
    """

    facts: ModelFacts
    vocabulary: Vocabulary
    _interrupted = False

    def __init__(self, target: M) -> None:
        self._target = target
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def length(self) -> int:
        return self._target.length

    @property
    def free_tokens(self) -> int:
        return self._target.free_tokens

    @property
    def threads(self) -> int:
        return self._target.threads

    @property
    def max_threads(self) -> int:
        return 0

    def set_max_threads(self, threads: int) -> None:
        pass

    def set_adapter_scales(self, scales: Sequence[float]) -> None:  # noqa: ARG002
        raise CapabilityError(
            f"{self.facts.name} is a view of the target and has no adapters of its own",
            "call `set_adapter_scales` on the target",
        )

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:  # noqa: ARG002
        self._check()

    def prefill_prompt(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        self.prefill(tokens[:-1], progress)

    def embed(self, tokens: Sequence[int], progress: Progress | None = None) -> NDArray[np.float32]:  # noqa: ARG002
        raise self._unsupported(
            f"{self.facts.name} uses the KV cache of the target and cannot embed texts",
            "call `embed` on the target",
        )

    @abstractmethod
    def verify(self, tree: TokenTree, first: int = 0) -> Logits:
        """See `LanguageModel.verify`."""

    def commit(self, path: tuple[int, ...]) -> None:  # noqa: ARG002
        self._check()

    def truncate(self, length: int) -> None:  # noqa: ARG002
        self._check()

    def remove_range(self, start: int, end: int) -> None:  # noqa: ARG002
        raise self._unsupported(
            f"{self.facts.name} uses the KV cache of the target and cannot remove tokens",
            "call `remove_range` on the target",
        )

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:  # noqa: ARG002
        """Return an empty snapshot, because a self-draft model has no KV cache of its own."""
        self._check()
        return Snapshot(self.length, b"")

    def restore(self, snapshot: Snapshot) -> None:  # noqa: ARG002
        raise self._unsupported(
            f"{self.facts.name} uses the KV cache of the target and cannot restore a snapshot",
            "call `restore` on the target",
        )

    def resize(self, context_tokens: int) -> None:  # noqa: ARG002
        raise self._unsupported(
            f"{self.facts.name} uses the KV cache of the target and cannot be resized",
            "call `resize` on the target",
        )

    def _unsupported(self, what: str, next_step: str) -> CapabilityError:
        self._check()
        return CapabilityError(what, next_step)

    def resized(self) -> None:
        """Update `facts` with the target's current context size."""
        self.facts = replace(self.facts, context_tokens=self._target.facts.context_tokens)

    def run_ahead(self, enabled: bool) -> None:
        pass

    def pipeline_with(self, draft: LanguageModel | None) -> None:
        pass

    def self_draft(self, method: SelfDraft) -> LanguageModel:  # noqa: ARG002
        raise CapabilityError(
            f"{self.facts.name} is itself a self-draft model and cannot create another one",
            "call `self_draft` on the target model",
        )

    def interrupt(self, enabled: bool) -> None:
        self._interrupted = enabled

    def _check_not_interrupted(self) -> None:
        if self._interrupted:
            raise CancelledError("the model's computation was cancelled")

    def close(self) -> None:
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"the model {self.facts.name} is closed", "load the model again")
        self._target.check_open()
