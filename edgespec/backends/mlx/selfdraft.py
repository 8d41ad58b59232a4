"""A model as its own draft: a view that drafts on the target's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from edgespec.backends.base import LanguageModel, Progress, SelfDraft, Snapshot
from edgespec.backends.mlx.logits import DeviceLogits
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError, CapabilityError, ClosedError

if TYPE_CHECKING:
    from edgespec.backends.mlx.model import MlxModel
    from edgespec.backends.mlx.shortcuts import Shortcut

__all__ = ["MlxSelfDraft"]


class MlxSelfDraft:
    """An MLX model with less of it run.

    facts: the target's; weight_bytes is what is kept beside its weights for this draft alone.
    """

    def __init__(self, target: MlxModel, shortcut: Shortcut, what: str, extra_bytes: int = 0) -> None:
        self._target = target
        self._shortcut = shortcut
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
        self._closed = False

    @property
    def length(self) -> int:
        return self._target.length

    @property
    def room(self) -> int:
        return self._target.room

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:  # noqa: ARG002
        self._check()  # what the target has cached is all there is

    def verify(self, tree: TokenTree, first: int = 0) -> DeviceLogits:
        self._check()
        if self._interrupted:
            self._target.drop_round()
            raise CancelledError("cancelled")
        return self._target.draft(self._shortcut, tree, first)

    def commit(self, path: tuple[int, ...]) -> None:  # noqa: ARG002
        self._check()  # it is the target that keeps

    def truncate(self, length: int) -> None:  # noqa: ARG002
        self._check()

    def forget(self, start: int, end: int) -> None:  # noqa: ARG002
        self._check()
        raise CapabilityError(f"{self.facts.name} has no memory of its own", "ask the target to forget")

    def snapshot(self) -> Snapshot:
        self._check()
        return self._target.snapshot()

    def restore(self, snapshot: Snapshot) -> None:  # noqa: ARG002
        self._check()
        raise CapabilityError(f"{self.facts.name} has no memory of its own", "restore the target")

    def run_ahead(self, wanted: bool) -> None:
        self._shortcut.runs_ahead = wanted

    def follow(self, draft: LanguageModel | None) -> None:
        pass  # it verifies nobody's chains

    def self_draft(self, how: SelfDraft) -> LanguageModel:  # noqa: ARG002
        raise CapabilityError(f"{self.facts.name} is a draft already", "ask the target")

    def interrupt(self, wanted: bool) -> None:
        self._interrupted = wanted

    def close(self) -> None:
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.facts.name} is closed")
        self._target.check_open()
