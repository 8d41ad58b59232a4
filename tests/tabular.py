"""A language model that is a table of logits.

The logits of the next token depend on the last `order` tokens. The model is as strict about the order of
calls
as a real backend, so that code tested with it also works with real backends.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.logits import HostLogits
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, CancelledError, CapabilityError
from edgespec.model.base import EarlyExit, LanguageModel, Progress, SelfDraft, Snapshot, Vocabulary
from edgespec.model.base_model import BaseModel, SelfDraftView
from edgespec.model.model_facts import Capabilities, ModelFacts

__all__ = ["LetterVocabulary", "TabularModel"]


class LetterVocabulary:
    """A vocabulary of single characters from `a` on. The last token id ends a reply."""

    chat_template: str | None = None
    bos_text = ""
    eos_text = ""

    def __init__(self, size: int) -> None:
        self.size = size

    def tokenize(self, text: str, *, special: bool, start: bool) -> list[int]:
        return [(ord(c) - ord("a")) % self.size for c in text]

    def min_tokens(self, text: str) -> int:
        return len(text)

    def piece(self, token: int) -> bytes:
        return b"" if self.is_end(token) else self.raw_piece(token)

    def raw_piece(self, token: int) -> bytes:
        return chr(ord("a") + token).encode()

    def same_entries(self, other: Vocabulary) -> bool:
        return False

    def is_end(self, token: int) -> bool:
        return token == self.size - 1


class TabularModel(BaseModel):
    """A LanguageModel over a table of logits.

    Args:
        logits: The table, float32 [vocab ** order, vocab]. The row number is the last `order` tokens,
        interpreted as a number in base `vocab`. Missing tokens count as 0.
        context_tokens: Size of the context.
        rollback: Whether tokens can be removed from the cache.
        tree: Whether verify passes support branches.
    """

    def __init__(
        self,
        logits: NDArray[np.float32],
        *,
        context_tokens: int = 4096,
        rollback: bool = True,
        tree: bool = True,
    ) -> None:
        self._table = np.asarray(logits, np.float32)
        vocab = self._table.shape[1]
        self._order = round(np.log(len(self._table)) / np.log(vocab))
        if vocab**self._order != len(self._table):
            raise ValueError(f"{len(self._table)} rows are not a power of the vocabulary size {vocab}")
        self.vocabulary: Vocabulary = LetterVocabulary(vocab)
        self.facts = ModelFacts(
            name="tabular",
            path="",
            architecture="tabular",
            description=f"table of order {self._order} over {vocab} tokens",
            parameters=self._table.size,
            file_bytes=0,
            weight_bytes=self._table.nbytes,
            kv_bytes=0,
            quantisation="F32",
            trained_context_tokens=context_tokens,
            context_tokens=context_tokens,
            vocab_size=vocab,
            chat_template=False,
            capabilities=Capabilities(
                rollback, tree, "" if rollback and tree else "disabled by a constructor argument"
            ),
        )
        self._tokens: list[int] = []
        self._round: list[tuple[int, list[int]]] = []
        self._interrupted = False

    @property
    def length(self) -> int:
        return len(self._tokens)

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        self._check(len(tokens))
        self._round = []
        self._tokens.extend(tokens)
        if progress and not progress("reading the prompt", 1.0):
            raise CancelledError("cancelled")

    def verify(self, tree: TokenTree, first: int = 0) -> HostLogits:
        known, self._round = self._round[:first], []
        self._check(tree.width)
        capabilities = self.facts.capabilities
        if (tree.width > 1 and not capabilities.rollback) or not (tree.is_chain or capabilities.tree):
            raise CapabilityError(
                f"this model cannot verify a tree of width {tree.width}", capabilities.reason
            )
        self._round = known
        rows = []
        for node in range(first, tree.width):
            parent = tree.parents[node]
            path = ([] if parent < 0 else self._round[parent][1]) + [tree.tokens[node]]
            self._round.append((parent, path))
            rows.append(self._table[self._row(path)])
        return HostLogits(np.stack(rows))

    def _row(self, path: list[int]) -> int:
        context = (self._tokens[-self._order :] + path)[-self._order :] if self._order else []
        row = 0
        for token in context:
            row = row * self.vocabulary.size + token
        return row

    def commit(self, path: tuple[int, ...]) -> None:
        self._check(0)
        node = path[-1] if path else 0
        self._tokens.extend(self._round[node][1])
        self._round = []

    def truncate(self, length: int) -> None:
        self._check(0)
        if length < len(self._tokens) and length and not self.facts.capabilities.rollback:
            raise CapabilityError("this model does not support truncation", self.facts.capabilities.reason)
        del self._tokens[length:]
        self._round = []

    def remove_range(self, start: int, end: int) -> None:
        self._check(0)
        if not self.facts.capabilities.rollback:
            raise CapabilityError(
                "this model does not support removing tokens", self.facts.capabilities.reason
            )
        del self._tokens[start:end]
        self._round = []

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:
        self._check(0)
        self._round = []
        start, end = self._span(start, end)
        return Snapshot(end, json.dumps(self._tokens[start:end]).encode(), start)

    def restore(self, snapshot: Snapshot) -> None:
        self._check(0)
        self._round = []
        self._tokens = self._tokens[: snapshot.start]
        try:
            if self.length < snapshot.start:
                raise ValueError("the tokens before the snapshot are missing")
            self._tokens = [*self._tokens, *json.loads(snapshot.data)]
        except ValueError as error:
            raise BackendError(
                "the saved cache does not belong to this model", "run the prompt again"
            ) from error

    def resize(self, context_tokens: int) -> None:
        self._check_size(context_tokens)
        self._round = []
        self._now_sized(context_tokens, 0)

    def self_draft(self, method: SelfDraft) -> LanguageModel:
        """Return a view with noisy logits. The later the exit layer, the less noise there is."""
        if not self.facts.capabilities.rollback:
            raise CapabilityError("this model does not support self-drafting", self.facts.capabilities.reason)
        view = _TabularView(self, 1.0 / method.exit_layer if isinstance(method, EarlyExit) else 0.3)
        self._views.add(view)
        return view

    def interrupt(self, enabled: bool) -> None:
        self._interrupted = enabled

    def close(self) -> None:
        self._closed = True

    def _check(self, more: int) -> None:
        super()._check(more)
        if more and self._interrupted:
            raise CancelledError("cancelled")


class _TabularView(SelfDraftView[TabularModel]):
    """A self-draft model that uses a noisy copy of the target's table after the target's tokens."""

    def __init__(self, target: TabularModel, noise: float) -> None:
        super().__init__(target)
        random = np.random.default_rng(7)
        off = random.normal(0, noise, target._table.shape).astype(np.float32)
        facts = target.facts
        self._near = TabularModel(
            target._table + off, context_tokens=facts.context_tokens, tree=facts.capabilities.tree
        )
        self.vocabulary = target.vocabulary
        self.facts = replace(facts, name=f"{facts.name} self-draft", weight_bytes=0)

    def resized(self) -> None:
        super().resized()
        self._near.facts = replace(self._near.facts, context_tokens=self.facts.context_tokens)

    def verify(self, tree: TokenTree, first: int = 0) -> HostLogits:
        self._check()
        self._near._tokens = list(self._target._tokens)
        return self._near.verify(tree, first)

    def interrupt(self, enabled: bool) -> None:
        self._near.interrupt(enabled)
