"""A model in two halves as its own draft: its lower layers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from edgespec.backends.base import LanguageModel, ModelFacts, Progress, SelfDraft, Snapshot, Vocabulary
from edgespec.engine.logits import HostLogits
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError, ClosedError

if TYPE_CHECKING:
    from edgespec.backends.llamacpp.layerskip import LayerSkipModel

__all__ = ["EarlyExitView"]


class EarlyExitView:
    """Guesses from the layers below the exit, on the target's memory."""

    def __init__(self, target: LayerSkipModel) -> None:
        self._target = target
        self._closed = False
        self.vocabulary: Vocabulary = target.vocabulary
        name = f"{target.facts.name}, first {target.exit_layer} layers"
        # It has no weights and no memory of its own.
        self.facts: ModelFacts = replace(target.facts, name=name, weight_bytes=0, kv_bytes=0)

    @property
    def length(self) -> int:
        return self._target.length

    @property
    def room(self) -> int:
        return self._target.room

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        self._check()  # the target's own tokens are all it knows

    def verify(self, tree: TokenTree, first: int = 0) -> HostLogits:
        self._check()
        return self._target.draft(tree, first)

    def commit(self, path: tuple[int, ...]) -> None:
        self._check()  # the target has committed, or will

    def truncate(self, length: int) -> None:
        self._check()  # the target's own tokens stay

    def forget(self, start: int, end: int) -> None:
        raise CapabilityError(f"{self.facts.name} has no cache of its own to take tokens out of")

    def snapshot(self) -> Snapshot:
        self._check()
        return self._target.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        raise CapabilityError(f"{self.facts.name} has no cache of its own to restore")

    def run_ahead(self, wanted: bool) -> None:
        pass  # nothing runs in the background

    def follow(self, draft: LanguageModel | None) -> None:
        pass  # nothing runs in the background

    def self_draft(self, how: SelfDraft) -> LanguageModel:
        raise CapabilityError(f"{self.facts.name} is a draft already")

    def interrupt(self, wanted: bool) -> None:
        self._target.interrupt(wanted)

    def close(self) -> None:
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.facts.name} is closed")
