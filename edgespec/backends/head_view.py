"""Base classes for heads, which draft from the target's hidden states, and for their KV caches.

Each head is run once after loading, to check its logits and to find out which hidden states it reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.logits import Logits
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, CapabilityError, ClosedError, ModelFileError
from edgespec.model.base import LanguageModel, Progress, Snapshot
from edgespec.model.base_model import BaseModel, M, SelfDraftView, in_batches
from edgespec.model.heads.numpy_layers import CachedAttention
from edgespec.model.hidden_states import HeadModel, HiddenStateLog, HiddenStateSource
from edgespec.model.memory_estimate import check_draft_width
from edgespec.model.model_facts import ModelFacts

__all__ = [
    "AttentionCells",
    "HeadCells",
    "HeadView",
    "check_finite",
    "check_finite_logits",
    "check_sizes",
    "load_most_accurate",
]

H = TypeVar("H", bound=HeadModel)
# Text used by `load_most_accurate` to compare heads that read different hidden states.
_TRIAL_TEXT = (
    "The capital of France is Paris, and the capital of Italy is Rome. To list the files of a folder by size,"
    " run `ls -lS`. def add(a, b):\n    return a + b\n\nOnce upon a time, there was a"
)
# Two heads are tied if their numbers of correct predictions differ by at most this much. Heads with random
# weights differ by 1 or 2, whereas a head that reads the wrong inputs gets most predictions wrong.
_TIE_TOKENS = 2
# Maximum number of trial tokens, and number of tokens between comparisons. Both are small because, on a CPU,
# products with the heads' output matrices dominate the running time.
_TRIAL_TOKENS, _STEP_TOKENS = 64, 8


class HeadCells(ABC):
    """A head's KV cache, which can hold draft tokens in addition to the committed tokens."""

    @property
    def threads(self) -> int:
        """Number of threads that run the head, or 0 if it runs on the target's threads."""
        return 0

    @property
    @abstractmethod
    def length(self) -> int:
        """Number of committed tokens."""

    @property
    @abstractmethod
    def start(self) -> int:
        """The position of the first token in the cache, or `length` if the cache is empty."""

    @abstractmethod
    def restart(self, position: int) -> None:
        """Clear the cache and make it start at `position`. `HeadView` then calls `truncate(position)`."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Truncate the cache to `length` tokens, all of which are then committed."""

    @abstractmethod
    def export(self, start: int, end: int) -> bytes:
        """Return a copy of the cache at positions [start, end)."""

    @abstractmethod
    def append_exported(self, start: int, end: int, data: bytes) -> bool:
        """Append data from `export` to the cache. Return whether it was compatible."""

    def capacity(self, context_tokens: int) -> int:
        """Return the maximum number of tokens in the cache, given the head's context size."""
        return context_tokens

    def resized(self, facts: ModelFacts, context_tokens: int) -> ModelFacts:
        """Resize the head to match a target resized to `context_tokens`, and return its new facts."""
        return replace(facts, context_tokens=context_tokens)

    def interrupt(self, enabled: bool) -> None:  # noqa: B027
        """Abort a running pass. See `LanguageModel.interrupt`."""


class _TargetCells(HeadCells):
    """A placeholder for heads without a KV cache. It covers the same tokens as the target's cache."""

    def __init__(self, target: BaseModel, log: HiddenStateLog) -> None:
        self._target, self._log = target, log

    @property
    def length(self) -> int:
        # A recurrent target may have been rewound, so it can lag behind the sequence until its next pass. The
        # log still covers the whole sequence.
        return max(self._target.length, self._log.end)

    @property
    def start(self) -> int:
        return self.length

    def restart(self, position: int) -> None:
        pass

    def truncate(self, length: int) -> None:
        pass

    def export(self, start: int, end: int) -> bytes:  # noqa: ARG002
        return b""

    def append_exported(self, start: int, end: int, data: bytes) -> bool:  # noqa: ARG002
        return True


class AttentionCells(HeadCells):
    """The KV cache of a head with a single attention layer that runs in NumPy."""

    length = 0

    def __init__(self, attention: CachedAttention) -> None:
        self._attention = attention

    @property
    def start(self) -> int:
        return self._attention.start

    def restart(self, position: int) -> None:
        self._attention.restart(position)

    def truncate(self, length: int) -> None:
        self._attention.truncate(length)
        self.length = length

    def export(self, start: int, end: int) -> bytes:
        return self._attention.copy(start, end)

    def append_exported(self, start: int, end: int, data: bytes) -> bool:
        return self._attention.restore(end - start, data)

    def resized(self, facts: ModelFacts, context_tokens: int) -> ModelFacts:
        token_bytes = facts.kv_bytes // facts.context_tokens if facts.context_tokens else 0
        return replace(facts, context_tokens=context_tokens, kv_bytes=token_bytes * context_tokens)


class HeadView(SelfDraftView[M]):
    """A head that runs each token together with the target's hidden state at the preceding position.

    Subclasses set `facts` and implement `_run_tree`, and `_append` if the head has a KV cache.

    Args:
        target: The model to draft for.
        log: The log of the target's hidden states. Closed together with the view.
        release: Called when the view is closed.
        cells: The head's KV cache, or None if it has none.
    """

    # Maximum number of tokens per prefill pass.
    _batch_tokens = 64
    # Number of nodes in the current draft tree that were run with the target's own hidden states.
    _known_nodes = 0

    def __init__(
        self,
        target: M,
        log: HiddenStateLog,
        release: Callable[[], None] = lambda: None,
        cells: HeadCells | None = None,
    ) -> None:
        super().__init__(target)
        self.vocabulary = target.vocabulary
        self.log, self._release = log, release
        self._cells = cells or _TargetCells(target, log)

    @property
    def length(self) -> int:
        return self._cells.length

    @property
    def free_tokens(self) -> int:
        return max(0, self._cells.capacity(self.facts.context_tokens) - self.length)

    @property
    def threads(self) -> int:
        return self._cells.threads or self._target.threads

    @property
    def first_position(self) -> int:
        """The first position whose required hidden state is in the log."""
        return self.log.start + 1

    @property
    def last_position(self) -> int:
        """The last position whose required hidden state is in the log."""
        return self.log.end

    def _logged_states(self, start: int, count: int) -> NDArray[np.float32]:
        """Return the hidden state before each of `count` tokens, starting at position `start`."""
        return self.log.rows(start - 1, start - 1 + count)

    def _check_draft_length(self, length: int, limit: int) -> None:
        """Raise CapabilityError if a draft of `length` tokens is longer than `limit`."""
        if length > limit:
            raise CapabilityError(
                f"{self.facts.name} can draft at most {limit:,} tokens at a time",
                f"use --draft-length {limit} or less",
                code="draft_too_wide",
            )

    def _append(self, tokens: Sequence[int]) -> None:
        """Append keys and values for `tokens` to the cache, computed from the target's hidden states."""

    @abstractmethod
    def _run_tree(self, tree: TokenTree, first: int) -> Logits:
        """Run the head on a tree's nodes, starting at `first`, and return their logits."""

    def _keep(self, length: int) -> None:
        """Truncate the cache to `length` tokens, all of which are then committed.

        Subclasses also discard their state for the current draft.
        """
        self._known_nodes = 0
        self._cells.truncate(length)

    def start_at(self, position: int) -> None:
        """Clear the KV cache and make it start at `position`. Tokens before `position` are never run."""
        self._check()
        self._restart(position)

    def _restart(self, position: int) -> None:
        self._cells.restart(position)
        self._keep(position)

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        self._check()
        self._check_fits(len(tokens))
        self._keep(self.length)
        for batch in in_batches(tokens, self._batch_tokens, progress):
            self._check_not_interrupted()
            try:
                self._append(batch)
            except ClosedError:  # The cache has been freed.
                raise
            except BaseException:
                self._keep(self.length)
                raise
            self._keep(self.length + len(batch))

    def verify(self, tree: TokenTree, first: int = 0) -> Logits:
        self._check()
        try:
            self._check_fits(tree.width)
            check_draft_width(tree.width, self.facts.capabilities.max_width)
            self._check_not_interrupted()
            return self._run_tree(tree, first)
        except ClosedError:  # The cache has been freed.
            raise
        except BaseException:
            self._keep(self.length)
            raise

    def commit(self, path: tuple[int, ...]) -> None:  # noqa: ARG002
        """Keep the keys and values that were computed from the target's hidden states."""
        self._check()
        self._keep(self.length + self._known_nodes)

    def truncate(self, length: int) -> None:
        self._check()
        self._keep(min(length, self.length))

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:
        """Copy the cache at positions [start, end), or from the cache's first position if that is later."""
        self._check()
        self._keep(self.length)
        end = self.length if end is None else min(end, self.length)
        start = min(max(start, self._cells.start), end)
        return Snapshot(end, self._cells.export(start, end), start)

    def restore(self, snapshot: Snapshot) -> None:
        self._check()
        self._keep(self.length)
        start, end = snapshot.start, snapshot.length
        fits = self.length == start <= end <= self.facts.context_tokens
        if not (fits and self._cells.append_exported(start, end, snapshot.data)):
            self._restart(0)
            raise BackendError(
                f"the saved KV cache does not match {self.facts.name}",
                "process the prompt again",
                code="state_not_restored",
            )
        self._keep(end)

    def resized(self) -> None:
        self.facts = self._cells.resized(self.facts, self._target.facts.context_tokens)

    def interrupt(self, enabled: bool) -> None:
        super().interrupt(enabled)
        self._cells.interrupt(enabled)

    def close(self) -> None:
        if not self._closed:
            super().close()
            self._target.stop_logging(self.log)
            self._release()


def check_finite(head: LanguageModel, path: Path) -> None:
    """Run the head on one token, and raise ModelFileError if its logits are not finite."""
    logits = head.verify(TokenTree.chain(0)).at(0, np.arange(head.facts.vocab_size))
    head.truncate(0)
    check_finite_logits(logits, path)


def check_finite_logits(logits: NDArray[np.floating], path: Path) -> None:
    """Raise ModelFileError, naming the head at `path`, if the head's logits are not finite."""
    # Allow -inf, which is the logit of tokens outside the head's draft vocabulary.
    if np.isnan(logits).any() or not np.isfinite(logits).any():
        raise ModelFileError(
            f"the draft head {path} is damaged: it computes values that are not finite",
            "download it again, or use --head none",
        )


def check_sizes(target: BaseModel, path: Path, sizes: Sequence[tuple[str, int, int]]) -> None:
    """Raise CapabilityError if any of a head's sizes differs from the target's.

    Args:
        target: The model that the head drafts for.
        path: The head's file, for the message.
        sizes: (name, target's size, head's size) triples. The name is used in the message, as in
            `("hidden states", 4096, 2048)`.
    """
    for what, own, needed in sizes:
        if own != needed:
            raise CapabilityError(
                f"the draft head {path} was made for another model: it needs {what} of size {needed:,}, but"
                f" {target.facts.name} has {what} of size {own:,}",
                "choose the head that was published for this model",
                code="head_mismatch",
            )


def load_most_accurate(target: HiddenStateSource, choices: Iterable[H], folder: Path) -> H:
    """Return the head that most often predicts the target's top token. On a tie, return the first.

    A head's configuration does not fully specify which hidden states it reads or the order of its inputs. A
    wrong choice raises no error, but lowers the acceptance rate. We therefore load every possible variant of
    the head and compare them on a short text. The comparison stops as soon as one variant is clearly better
    than the others.

    Args:
        target: The target. Its cache must be empty.
        choices: The variants of the head, most likely first. All but the best are closed.
        folder: Folder of the head, for error messages.

    Raises:
        ModelFileError: The head is damaged.
    """
    heads: list[H] = []
    best = None
    try:
        heads.extend(choices)
        check_finite(heads[0], folder)
        best = _most_accurate(target, heads)
        return best
    finally:
        for head in heads:
            if head is not best:
                head.close()


def _most_accurate(target: HiddenStateSource, heads: Sequence[H]) -> H:
    tokens = target.vocabulary.tokenize(_TRIAL_TEXT, special=False, start=True)
    tokens = tokens[: min(_TRIAL_TOKENS, target.free_tokens)]
    if len(heads) == 1 or target.length or len(tokens) < 2:
        return heads[0]
    step = min(_STEP_TOKENS, heads[0].facts.capabilities.max_width)
    for head in heads:
        head.start_at(1)
    remaining = [(head, 0) for head in heads]
    try:
        for begin in range(0, len(tokens), step):
            end = min(begin + step, len(tokens))
            logits = target.verify(TokenTree.chain(tokens[begin], tokens[begin + 1 : end]))
            best = [logits.best(row, 1)[0] for row in range(end - begin)]
            target.commit(tuple(range(1, end - begin)))
            counts = [count + _agreement(head, tokens[:end], best) for head, count in remaining]
            least = max(counts) - _TIE_TOKENS
            remaining = [
                (head, count) for (head, _), count in zip(remaining, counts, strict=True) if count >= least
            ]
            if len(remaining) == 1:
                break
        return remaining[0][0]
    finally:
        for head in heads:
            head.truncate(0)
        target.truncate(0)


def _agreement(head: HeadModel, tokens: Sequence[int], best: Sequence[Sequence[int]]) -> int:
    """Count how many of the target's top tokens the head predicts.

    Args:
        head: The head. Its cache must be empty or hold only tokens from earlier calls.
        tokens: The tokens that the target has processed.
        best: The target's top token after each of the last `len(best)` tokens.
    """
    # The head cannot run the first token, because no hidden state precedes it.
    begin = max(1, len(tokens) - len(best))
    if begin == len(tokens):
        return 0
    if head.length < begin:
        head.prefill(tokens[head.length : begin])
    logits = head.verify(TokenTree.chain(tokens[begin], tokens[begin + 1 :]))
    expected = best[begin - len(tokens) :]
    agreed = sum(logits.best(row, 1)[0] == token for row, token in enumerate(expected))
    head.commit(tuple(range(1, len(expected))))
    return agreed
