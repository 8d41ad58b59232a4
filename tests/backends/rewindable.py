"""A table model with the cache of a recurrent model, which can only be rolled back to checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.backends.replay import ReplayModel
from edgespec.engine.logits import HostLogits
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError, CapabilityError
from edgespec.model.base import Progress, Snapshot
from tests.tabular import TabularModel

__all__ = ["StateModel", "replayed_table"]


class StateModel(TabularModel):
    """Raises an error for misuse that a real model would only reveal in its logits.

    Attributes:
        undo: Number of tokens of a pass that `commit` may drop.
        reach: Checkpoints further back than this do not work.
        stop_after: Number of calls until a pass is cancelled halfway and corrupts the state.
        checkpoints: Number of checkpoints taken.
    """

    def __init__(
        self, seed: int = 0, *, context_tokens: int = 512, undo: int = 0, reach: int = 1 << 30
    ) -> None:
        table = np.random.default_rng(seed).normal(size=(11**2, 11)).astype(np.float32)
        super().__init__(table, context_tokens=context_tokens)
        self.undo, self.reach = undo, reach
        self.stop_after: int | None = None
        self.checkpoints = 0
        self.rows_run = 0
        # What the state has seen, whether it was kept or not.
        self._seen: list[int] = []
        self._unsettled = False

    def _settled(self) -> None:
        assert not self._unsettled, "the state holds tokens that were dropped"
        assert self._seen == self._tokens

    def _see(self, tokens: Sequence[int]) -> None:
        self.rows_run += len(tokens)
        if self.stop_after is not None:
            self.stop_after -= 1
            if self.stop_after < 0:
                self.stop_after = None
                self._seen += tokens[: len(tokens) // 2]
                self._unsettled = True
                raise CancelledError("cancelled")
        self._seen += tokens

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        self._check(len(tokens))
        self._settled()
        self._see(tokens)
        super().prefill(tokens, progress)

    def verify(self, tree: TokenTree, first: int = 0) -> HostLogits:
        self._settled()
        assert tree.is_chain
        assert first == 0
        logits = super().verify(tree)
        self._unsettled = True
        self._see(tree.tokens)
        return logits

    def commit(self, path: tuple[int, ...]) -> None:
        self._check(0)
        dropped = len(self._round) - 1 - len(path)
        assert 0 <= dropped <= self.undo
        super().commit(path)
        self._seen, self._unsettled = list(self._tokens), False

    def truncate(self, length: int) -> None:
        self._check(0)
        assert length == 0
        super().truncate(0)
        self._seen, self._unsettled = [], False

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:
        self._check(0)
        self._settled()
        return super().snapshot(start, end)

    def restore(self, snapshot: Snapshot) -> None:
        super().restore(snapshot)
        self._seen, self._unsettled = list(self._tokens), False

    def checkpoint(self) -> tuple[int, ...]:
        self._check(0)
        self._settled()
        self.checkpoints += 1
        return tuple(self._tokens)

    def rewind(self, checkpoint: tuple[int, ...]) -> None:
        self._check(0)
        assert tuple(self._seen[: len(checkpoint)]) == checkpoint, "this checkpoint is void"
        if len(self._seen) - len(checkpoint) > self.reach:
            raise CapabilityError("too far back")
        self._tokens, self._round = list(checkpoint), []
        self._seen, self._unsettled = list(checkpoint), False


def replayed_table(inner: StateModel | None = None) -> ReplayModel:
    """The table of `inner` behind a ReplayModel."""
    inner = inner or StateModel()
    return ReplayModel(inner, "its state takes chains only", inner.undo)
