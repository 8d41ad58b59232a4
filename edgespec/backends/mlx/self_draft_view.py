"""A model as its own draft: a view that drafts on the target's memory."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from edgespec.backends.mlx.logits import DeviceLogits
from edgespec.backends.self_draft_view import SelfDraftView
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError

if TYPE_CHECKING:
    from edgespec.backends.mlx.model import MlxModel
    from edgespec.backends.mlx.partial_models import PartialModel

__all__ = ["MlxSelfDraftView"]


class MlxSelfDraftView(SelfDraftView["MlxModel"]):
    """An MLX model with less of it run.

    facts: the target's; weight_bytes is what is kept beside its weights for this draft alone.
    """

    def __init__(self, target: MlxModel, part: PartialModel, what: str, extra_bytes: int = 0) -> None:
        super().__init__(target)
        self._partial_model = part
        self.facts = replace(
            target.facts,
            name=f"{target.facts.name} ({what})",
            weight_bytes=extra_bytes,
            file_bytes=0,
            kv_bytes=0,
            notice="",
        )
        self.vocabulary = target.vocabulary
        self._interrupted = False

    def verify(self, tree: TokenTree, first: int = 0) -> DeviceLogits:
        self._check()
        if self._interrupted:
            self._target.drop_round()
            raise CancelledError("cancelled")
        return self._target.draft(self._partial_model, tree, first)

    def run_ahead(self, enabled: bool) -> None:
        self._partial_model.runs_ahead = enabled

    def interrupt(self, enabled: bool) -> None:
        self._interrupted = enabled
