"""Roll back recurrent models exactly, with checkpoints and replay.

Every token overwrites the recurrent state, so individual tokens cannot be removed. After a rejection, the
model returns to a checkpoint, and the next pass first replays the tokens accepted since that checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.logits import Logits
from edgespec.engine.noise import Noise
from edgespec.engine.processors import Candidates, LogitsProcessor
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, CapabilityError
from edgespec.model.base import Head, LanguageModel, Progress, SelfDraft, Snapshot, Vocabulary
from edgespec.model.base_model import BaseModel, scaled_progress
from edgespec.model.hidden_states import OpenLogs
from edgespec.model.image import Image
from edgespec.model.image_tokens import PreparedImage, cut_between_images
from edgespec.model.model_facts import ModelFacts

__all__ = ["MAX_CHECKPOINTS", "ReplayModel", "Rewindable"]

# Maximum number of checkpoints. Each one takes as much memory as the recurrent state.
MAX_CHECKPOINTS = 4
# Maximum number of accepted tokens that a verify pass reruns after a rollback. If there are more, a separate
# prefill runs them first.
_MAX_PENDING_TOKENS = 8
# Number of tokens between checkpoints of the recurrent state during plain decoding.
_PLAIN_STRIDE = 128
# Number of tokens between checkpoints of the recurrent state during prefill.
_PREFILL_STRIDE = 1024


class Rewindable(LanguageModel, Protocol):
    """A `LanguageModel` that can verify chains of tokens and roll its cache back to checkpoints.

    After an exception, or if part of a draft is rejected, the contents of the cache are undefined until
    `rewind` or `truncate(0)` is called.
    """

    @property
    def logs(self) -> OpenLogs:
        """The hidden-state logs that `commit` and `prefill` append to.

        `rewind` leaves the logs unchanged, because tokens after the checkpoint may still be part of the
        sequence.
        """

    def checkpoint(self) -> Any:
        """Save the state of the cache, and return a handle for `rewind`."""

    def rewind(self, checkpoint: Any) -> None:
        """Roll the cache and `length` back to a checkpoint, and discard uncommitted tokens.

        A checkpoint can be restored several times. It becomes invalid when an earlier checkpoint is restored
        or the context is resized.

        Raises:
            CapabilityError: The tokens before the checkpoint are no longer in the cache.
        """


class _Checkpoint(NamedTuple):
    length: int
    handle: Any


class ReplayModel(BaseModel):
    """Adds exact rollback to a recurrent model that can only return to checkpoints.

    After a rollback, some accepted tokens can be missing from the recurrent state. The next pass reruns them
    before any drafted tokens.

    Args:
        inner: The recurrent model.
        reason: Why the model does not support draft trees with branches, for `Capabilities.reason`.
        undo_tokens: Maximum number of trailing tokens of a pass that `inner.commit` can remove exactly.
    """

    def __init__(self, inner: Rewindable, reason: str, undo_tokens: int = 0) -> None:
        self._inner = inner
        self._undo_tokens = undo_tokens
        self.vocabulary: Vocabulary = inner.vocabulary
        limits = replace(inner.facts.capabilities, tree=False, max_branches=1, partial_truncate=False)
        capabilities = replace(limits, rollback=True, reason=reason)
        self.facts: ModelFacts = replace(inner.facts, capabilities=capabilities)
        # Position of the first token in `_known`. It is greater than 0 if earlier tokens came from a
        # snapshot, which does not contain their IDs.
        self._first_known = 0
        self._known: list[int] = []
        self._checkpoints: list[_Checkpoint] = []
        self._round: list[int] = []
        # Number of tokens that the wrapped model has run but not committed yet.
        self._open = 0

    @property
    def length(self) -> int:
        return self._first_known + len(self._known)

    @property
    def threads(self) -> int:
        return self._inner.threads

    @property
    def max_threads(self) -> int:
        return self._inner.max_threads

    def set_adapter_scales(self, scales: Sequence[float]) -> None:
        self._inner.set_adapter_scales(scales)

    def set_max_threads(self, threads: int) -> None:
        self._inner.set_max_threads(threads)

    def fix_threads(self, fixed: bool) -> None:
        self._inner.fix_threads(fixed)

    def watch_memory(self, spare_bytes: Callable[[], int]) -> None:
        self._inner.watch_memory(spare_bytes)

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        self._check(len(tokens))
        self._end_round()
        if tokens:
            self._run(tokens, progress)

    def _run(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        all_tokens = [*self._known, *tokens]
        begin, end = self._inner.length, self._first_known + len(all_tokens)
        while (start := self._inner.length) < end:
            stop = self._first_known + cut_between_images(
                all_tokens, start - self._first_known, _PREFILL_STRIDE
            )
            try:
                self._inner.prefill(
                    all_tokens[start - self._first_known : stop - self._first_known],
                    progress
                    and scaled_progress(
                        progress, (start - begin) / (end - begin), (stop - start) / (end - begin)
                    ),
                )
                self._known += all_tokens[len(self._known) : stop - self._first_known]
                self._take_checkpoint()
            except BaseException:
                self._go_back(self.length)
                raise

    def prepare_image(self, image: Image) -> PreparedImage:
        return self._inner.prepare_image(image)

    def embed(self, tokens: Sequence[int], progress: Progress | None = None) -> NDArray[np.float32]:
        return self._inner.embed(tokens, progress)

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
        limits = self.facts.capabilities
        if not tree.is_chain:
            raise CapabilityError(f"{self.facts.name} cannot verify draft trees with branches", limits.reason)
        if tree.width > limits.max_width:
            raise CapabilityError(
                f"verifying {tree.width} tokens at once exceeds the limit of {limits.max_width}",
                "use a shorter --draft-length",
                code="draft_too_wide",
            )

    def _begin_round(self, width: int) -> list[int]:
        pending = self._pending
        if len(pending) > _MAX_PENDING_TOKENS or len(pending) + width > self.facts.capabilities.max_width:
            self._run([])
            pending = []
        since = self._inner.length - (self._checkpoints[-1].length if self._checkpoints else 0)
        if width - 1 > self._undo_tokens or since >= _PLAIN_STRIDE:
            self._take_checkpoint()
        return pending

    def _grow_round(self) -> None:
        begun_at = self._inner.length
        self._commit_inner(self._open)
        if not self._checkpoints or self._checkpoints[-1].length < begun_at:
            self._take_checkpoint()

    def commit(self, path: tuple[int, ...]) -> None:
        self._check(0)
        accepted = self._round[: len(path) + 1]
        dropped = len(self._round) - len(accepted)
        self._known += accepted
        self._round = []
        length = self.length
        if dropped <= min(self._undo_tokens, self._open - 1):
            self._commit_inner(self._open - dropped)
        else:
            if self._inner.logs.states and dropped < self._open:
                # Commit the accepted tokens first, so that their hidden states are logged before rewinding
                # discards them.
                self._commit_inner(self._open - dropped)
            self._go_back(length)
            if self.length < length:
                raise BackendError(
                    f"{self.facts.name} could not remove {dropped} rejected tokens and cleared its cache",
                    "send the message again",
                )
        self._inner.logs.truncate(length)

    def truncate(self, length: int) -> None:
        self._check(0)
        self._end_round()
        if length >= self.length:
            return
        if length < self._inner.length:
            self._go_back(length)
            length = self._inner.length
        del self._known[length - self._first_known :]
        self._inner.logs.truncate(length)

    def remove_range(self, start: int, end: int) -> None:
        raise CapabilityError(
            f"tokens {start} to {end} cannot be removed from {self.facts.name}, because it is recurrent",
            "truncate the cache, and process the remaining tokens again",
            code="rollback_not_supported",
        )

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:  # noqa: ARG002
        self._check(0)
        self._end_round()
        self._run([])
        return self._inner.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        self._check(0)
        self._round, self._open = [], 0
        self._first_known, self._known, self._checkpoints = 0, [], []
        self._inner.truncate(0)
        self._inner.restore(snapshot)
        self._first_known = self._inner.length
        self._take_checkpoint()

    def resize(self, context_tokens: int) -> None:
        self._check_size(context_tokens)
        self._end_round()
        # Discard all checkpoints, because resizing invalidates them even if it fails.
        self._checkpoints, held = [], self._inner.length
        try:
            self._inner.resize(context_tokens)
        finally:
            if self._inner.length < held:
                self._first_known, self._known = 0, []
            self._take_checkpoint()
            self._now_sized(self._inner.facts.context_tokens, self._inner.facts.kv_bytes)

    def run_ahead(self, enabled: bool) -> None:
        self._inner.run_ahead(enabled)

    def self_draft(self, method: SelfDraft) -> LanguageModel:
        if not isinstance(method, Head):
            return super().self_draft(method)
        self.check_can_draft(method.method)
        # Clear the cache first, because the wrapped model runs a token to check that its hidden states can be
        # read.
        self.truncate(0)
        return self._inner.self_draft(method)

    def interrupt(self, enabled: bool) -> None:
        self._inner.interrupt(enabled)

    def close(self) -> None:
        self._closed = True
        self._checkpoints = []
        self._inner.close()

    @property
    def _pending(self) -> list[int]:
        return self._known[self._inner.length - self._first_known :]

    def _commit_inner(self, count: int) -> None:
        self._open = 0
        self._inner.commit(tuple(range(1, count)))

    def _end_round(self) -> None:
        if self._round:
            self._round = []
            self._go_back(self.length)
            self._inner.logs.truncate(self.length)

    def _go_back(self, limit: int) -> None:
        """Rewind the recurrent model to its latest checkpoint with at most `limit` tokens."""
        self._open = 0
        while self._checkpoints and self._checkpoints[-1].length > limit:
            self._checkpoints.pop()
        if self._checkpoints:
            try:
                self._inner.rewind(self._checkpoints[-1].handle)
                return
            except CapabilityError:
                self._checkpoints = []
        self._inner.truncate(0)
        if self._first_known:
            self._first_known, self._known = 0, []

    def _take_checkpoint(self) -> None:
        """Save a checkpoint.

        If the limit is reached, first delete the checkpoint closest to its neighbours.
        """
        checkpoints, length = self._checkpoints, self._inner.length
        if length == 0 or (checkpoints and checkpoints[-1].length == length):
            return
        if len(checkpoints) == MAX_CHECKPOINTS:
            ends = [0, *(each.length for each in checkpoints), length]
            del checkpoints[min(range(len(checkpoints)), key=lambda i: ends[i + 2] - ends[i])]
        checkpoints.append(_Checkpoint(length, self._inner.checkpoint()))


class _LaterRows:
    """A view of a pass's logits without the first `skipped` rows."""

    def __init__(self, logits: Logits, skipped: int) -> None:
        self._logits = logits
        self._skipped = skipped
        self.vocab_size = logits.vocab_size

    @property
    def other_tokens(self) -> int:
        return self._logits.other_tokens

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
