"""A model in two halves as its own draft: its lower layers alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from edgespec.backends.self_draft_view import SelfDraftView
from edgespec.engine.logits import HostLogits
from edgespec.engine.tree import TokenTree

if TYPE_CHECKING:
    from edgespec.backends.llamacpp.layerskip import LayerSkipModel

__all__ = ["EarlyExitView"]


class EarlyExitView(SelfDraftView["LayerSkipModel"]):
    """Guesses from the layers below the exit, on the target's memory."""

    def __init__(self, target: LayerSkipModel) -> None:
        super().__init__(target)
        self.vocabulary = target.vocabulary
        name = f"{target.facts.name}, first {target.exit_layer} layers"
        # It has no weights and no memory of its own.
        self.facts = replace(target.facts, name=name, weight_bytes=0, kv_bytes=0)

    def verify(self, tree: TokenTree, first: int = 0) -> HostLogits:
        self._check()
        return self._target.draft(tree, first)

    def interrupt(self, enabled: bool) -> None:
        self._target.interrupt(enabled)
