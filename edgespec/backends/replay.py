"""Exact rollback for models that cannot drop cached tokens: go back to a checkpoint, run again what was kept.

A recurrent state is overwritten by every token. What can be had is the state of an earlier moment. After a
rejection the model goes back to it, and the tokens kept since then ride at the front of the next pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LanguageModel, ModelFacts, Progress, Snapshot, Vocabulary
from edgespec.backends.base_model import BaseModel, scaled_progress
from edgespec.engine.logits import Logits, Noise
from edgespec.engine.processors import Candidates, LogitsProcessor
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, CapabilityError

__all__ = ["MAX_CHECKPOINTS", "ReplayModel", "Rewindable"]

# Checkpoints held at a time: what going back costs in memory.
MAX_CHECKPOINTS = 4
# Tokens to run again are run on their own once there are more: they make every pass wider.
_MOST_PENDING = 8
# Plain decoding passes a checkpoint this often, so that a step given up costs no more than these tokens.
_PLAIN_STRIDE = 128
# So does prefill: a cancelled one loses no more.
_PREFILL_STRIDE = 1024


class Rewindable(LanguageModel, Protocol):
    """What ReplayModel needs: a LanguageModel that runs chains and can be put back to a checkpoint.

    After a call that raised, and after a round that is not committed whole, nothing is asked of its cache
    but that `rewind` and `truncate(0)` put it right. It is asked to commit whole rounds only, or to drop
    the last few tokens of the last pass where it said that it can.
    """

    def checkpoint(self) -> Any:
        """A handle of the cache now. No round is open."""

    def rewind(self, checkpoint: Any) -> None:
        """Make the cache, `length` included, what it was; ends the round.

        A handle is used any number of times, and only while the tokens before it are still those of then:
        going back before it makes it void, and so does `resize`. CapabilityError when the cache no longer
        reaches back so far.
        """


@dataclass(frozen=True, slots=True)
class _Rung:
    """A checkpoint and how many tokens the cache held."""

    length: int
    handle: Any


class ReplayModel(BaseModel):
    """A LanguageModel that rolls back exactly, over one that can only go back to checkpoints.

    The inner cache may lag behind: it holds `inner.length` tokens, and the known tokens after them, up to
    `length`, are pending. They count as present. Outside a round the inner cache is never ahead.
    Passes begin with what is pending, so that it follows no draft.

    undo_tokens: so many tokens the inner `commit` drops exactly from the end of the pass before.
    """

    def __init__(self, inner: Rewindable, reason: str, undo_tokens: int = 0) -> None:
        self._inner = inner
        self._undo_tokens = undo_tokens
        self.vocabulary: Vocabulary = inner.vocabulary
        able = replace(
            inner.facts.capabilities,
            rollback=True,
            partial_truncate=False,
            tree=False,
            reason=reason,
            max_branches=1,
        )
        self.facts: ModelFacts = replace(inner.facts, capabilities=able)
        # Tokens from position `_first_known` on; those before it came with a snapshot.
        self._first_known = 0
        self._known: list[int] = []
        self._ladder: list[_Rung] = []
        # Tokens of the open round that were run, and how many of them the inner round holds open.
        self._round: list[int] = []
        self._open = 0

    @property
    def length(self) -> int:
        return self._first_known + len(self._known)

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        self._check(len(tokens))
        self._end_round()
        if tokens:
            self._run(tokens, progress)

    def _run(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        """Run what is pending and then `tokens`, without logits."""
        wanted = [*self._known, *tokens]
        begin, end = self._inner.length, self._first_known + len(wanted)
        for start in range(begin, end, _PREFILL_STRIDE):
            stop = min(end, start + _PREFILL_STRIDE)
            try:
                self._inner.prefill(
                    wanted[start - self._first_known : stop - self._first_known],
                    progress
                    and scaled_progress(
                        progress, (start - begin) / (end - begin), (stop - start) / (end - begin)
                    ),
                )
                self._known += wanted[len(self._known) : stop - self._first_known]
                self._take_checkpoint()
            except BaseException:
                self._go_back(self.length)
                raise

    def verify(self, tree: TokenTree, first: int = 0) -> Logits:
        self._check(0)
        try:
            self._check(tree.width)
            self._check_shape(tree)
            if first == 0:
                self._end_round()
                before = self._begin_round(tree.width)
            else:
                before = []
                self._grow_round()
            tokens = [*before, *tree.tokens[first:]]
            self._round, self._open = list(tree.tokens), len(tokens)
            logits = self._inner.verify(TokenTree.chain(tokens[0], tokens[1:]))
        except BaseException:
            self._end_round()
            raise
        return _LaterRows(logits, len(before)) if before else logits

    def _check_shape(self, tree: TokenTree) -> None:
        able = self.facts.capabilities
        if not tree.is_chain:
            raise CapabilityError(f"{self.facts.name} cannot verify branches", able.reason)
        if tree.width > able.max_width:
            raise CapabilityError(f"a draft of {tree.width} tokens is wider than {able.max_width}")

    def _begin_round(self, width: int) -> list[int]:
        """Make ready for a pass over that many tokens. Returns those that ride before them."""
        pending = self._pending
        if len(pending) > _MOST_PENDING or len(pending) + width > self.facts.capabilities.max_width:
            self._run([])
            pending = []
        since = self._inner.length - (self._ladder[-1].length if self._ladder else 0)
        if width - 1 > self._undo_tokens or since >= _PLAIN_STRIDE:
            self._take_checkpoint()
        return pending

    def _grow_round(self) -> None:
        """Before a round goes on: a checkpoint after its root, which is kept if anything is."""
        begun_at = self._inner.length
        self._commit_inner(self._open)
        if not self._ladder or self._ladder[-1].length < begun_at:
            self._take_checkpoint()

    def commit(self, path: tuple[int, ...]) -> None:
        self._check(0)
        kept = self._round[: len(path) + 1]
        dropped = len(self._round) - len(kept)
        self._known += kept
        self._round = []
        length = self.length
        if dropped <= min(self._undo_tokens, self._open - 1):
            self._commit_inner(self._open - dropped)
        else:
            self._go_back(length)
            if self.length < length:
                raise BackendError(
                    f"{self.facts.name} could not go back {dropped} tokens and lost its cache of {length}",
                    "send the message again",
                )

    def truncate(self, length: int) -> None:
        self._check(0)
        self._end_round()
        if length >= self.length:
            return
        if length < self._inner.length:
            self._go_back(length)
            length = self._inner.length
        del self._known[length - self._first_known :]

    def remove_range(self, start: int, end: int) -> None:
        raise CapabilityError(f"the state of {self.facts.name} cannot forget tokens {start} to {end}")

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:  # noqa: ARG002
        self._check(0)
        self._end_round()
        self._run([])
        return self._inner.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        self._check(0)
        self._round, self._open = [], 0
        self._first_known, self._known, self._ladder = 0, [], []
        self._inner.truncate(0)
        self._inner.restore(snapshot)
        self._first_known = self._inner.length
        self._take_checkpoint()

    def resize(self, context_tokens: int) -> None:
        """See the Protocol. Of the checkpoints one is left: of what the inner cache holds."""
        self._check_size(context_tokens)
        self._end_round()
        # What is not there is no longer gone back to, whatever happens next.
        self._ladder, held = [], self._inner.length
        try:
            self._inner.resize(context_tokens)
        finally:
            if self._inner.length < held:
                self._first_known, self._known = 0, []
            self._take_checkpoint()
            self._now_sized(self._inner.facts.context_tokens, self._inner.facts.kv_bytes)

    def run_ahead(self, enabled: bool) -> None:
        self._inner.run_ahead(enabled)

    def interrupt(self, enabled: bool) -> None:
        self._inner.interrupt(enabled)

    def close(self) -> None:
        self._closed = True
        self._ladder = []
        self._inner.close()

    @property
    def _pending(self) -> list[int]:
        return self._known[self._inner.length - self._first_known :]

    def _commit_inner(self, count: int) -> None:
        """Keep the first `count` tokens of the inner round."""
        self._open = 0
        self._inner.commit(tuple(range(1, count)))

    def _end_round(self) -> None:
        """Drop what was not committed."""
        if self._round:
            self._round = []
            self._go_back(self.length)

    def _go_back(self, limit: int) -> None:
        """Put the inner cache back to the last checkpoint at or before `limit`."""
        self._open = 0
        while self._ladder and self._ladder[-1].length > limit:
            self._ladder.pop()
        if self._ladder:
            try:
                self._inner.rewind(self._ladder[-1].handle)
                return
            except CapabilityError:  # an older one is even further away
                self._ladder = []
        self._inner.truncate(0)
        if self._first_known:
            self._first_known, self._known = 0, []

    def _take_checkpoint(self) -> None:
        """Hold the inner cache as it is now; at the limit, the one that leaves the smallest gap goes."""
        ladder, length = self._ladder, self._inner.length
        if length == 0 or (ladder and ladder[-1].length == length):
            return
        if len(ladder) == MAX_CHECKPOINTS:
            ends = [0, *(rung.length for rung in ladder), length]
            del ladder[min(range(len(ladder)), key=lambda i: ends[i + 2] - ends[i])]
        ladder.append(_Rung(length, self._inner.checkpoint()))


class _LaterRows:
    """The rows of a pass without its first ones."""

    def __init__(self, logits: Logits, skipped: int) -> None:
        self._logits = logits
        self._skipped = skipped
        self.vocab_size = logits.vocab_size

    @property
    def waited_seconds(self) -> float:
        return self._logits.waited_seconds

    @property
    def overlapped_seconds(self) -> float:
        return self._logits.overlapped_seconds

    def __len__(self) -> int:
        return len(self._logits) - self._skipped

    def best(
        self, row: int, count: int, processors: Sequence[LogitsProcessor] = (), noise: Noise | None = None
    ) -> tuple[list[int], float]:
        return self._logits.best(self._skipped + row, count, processors, noise)

    def top(self, row: int, count: int) -> Candidates:
        return self._logits.top(self._skipped + row, count)

    def above(self, row: int, margin: float) -> Candidates:
        return self._logits.above(self._skipped + row, margin)

    def at(self, row: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        return self._logits.at(self._skipped + row, tokens)

    def limit_vocab(self, vocab_size: int) -> Logits:
        return _LaterRows(self._logits.limit_vocab(vocab_size), self._skipped)
