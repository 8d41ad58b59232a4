"""Early-exit drafting, which uses the lower layers of a split model as its draft model."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from edgespec.backends.base import Vocabulary
from edgespec.backends.self_draft_view import CacheOwner, SelfDraftView
from edgespec.engine.logits import HostLogits
from edgespec.engine.tree import TokenTree

__all__ = ["EarlyExitTarget", "EarlyExitView"]


class EarlyExitTarget(CacheOwner, Protocol):
    """A target model that can stop a pass after its first `exit_layer` layers."""

    exit_layer: int
    vocabulary: Vocabulary

    def draft(self, tree: TokenTree, first: int) -> HostLogits:
        """Run the tree's nodes, starting at index `first`, through the first `exit_layer` layers only."""

    def interrupt(self, enabled: bool) -> None:
        """See `LanguageModel.interrupt`."""


class EarlyExitView(SelfDraftView[EarlyExitTarget]):
    """A draft model that runs the target's first `exit_layer` layers and shares its KV cache."""

    def __init__(self, target: EarlyExitTarget) -> None:
        super().__init__(target)
        self.vocabulary = target.vocabulary
        name = f"{target.facts.name}, first {target.exit_layer} layers"
        # Report 0 bytes, because the weights and the KV cache belong to the target.
        self.facts = replace(target.facts, name=name, weight_bytes=0, kv_bytes=0)

    def verify(self, tree: TokenTree, first: int = 0) -> HostLogits:
        self._check()
        return self._target.draft(tree, first)

    def interrupt(self, enabled: bool) -> None:
        self._target.interrupt(enabled)
