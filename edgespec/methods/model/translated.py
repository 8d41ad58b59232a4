"""Make a draft model with a different vocabulary usable with the target's token ids."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.logits import Logits, best_on_host
from edgespec.engine.noise import Noise
from edgespec.engine.processors import Candidates, LogitsProcessor
from edgespec.engine.tree import TokenTree, TreeBuilder
from edgespec.methods.model.translation import MAX_SPELLING_TOKENS, TokenTranslation
from edgespec.model.base import LanguageModel, Progress, Vocabulary
from edgespec.model.base_model import WrappedModel, wrapped_capabilities

__all__ = ["TranslatedLogits", "TranslatedModel"]

# Number of extra tokens to request from the draft model, because some may be missing from the target's
# vocabulary.
_EXTRA_TOKENS = 16


class TranslatedModel(WrappedModel):
    """Wraps a draft model so that it uses the target's vocabulary instead of its own.

    Implements token-level intersection (TLI, Timor et al. 2025, arXiv 2502.05202). Tokens in both
    vocabularies are translated one to one. Other target tokens are spelled out with several draft model
    tokens, and are never drafted.

    Args:
        model: The draft model.
        vocabulary: The target's vocabulary.
        translation: Maps token ids between the vocabularies.
    """

    def __init__(self, model: LanguageModel, vocabulary: Vocabulary, translation: TokenTranslation) -> None:
        super().__init__(model, vocabulary)
        self._translation = translation
        capabilities = model.facts.capabilities
        self._max_spelling_tokens = max(1, min(MAX_SPELLING_TOKENS, capabilities.max_width // 4))
        # Number of tokens to keep free in the draft model's context, because one target token can become
        # several draft model tokens.
        self._margin = 2 * (self._max_spelling_tokens - 1)
        self.facts = replace(
            model.facts,
            context_tokens=max(0, model.facts.context_tokens - self._margin),
            requested_context_tokens=max(0, model.facts.max_context_tokens - self._margin),
            vocab_size=vocabulary.size,
            chat_template=vocabulary.chat_template is not None,
            capabilities=wrapped_capabilities(capabilities, capabilities.max_width - self._margin),
        )
        self._translated: list[int] = []
        # Element n is the number of draft model tokens that represent the first n target tokens.
        self._ends: list[int] = [0]
        self._inner_tree = TreeBuilder()
        self._inner_nodes: list[int] = []

    @property
    def free_tokens(self) -> int:
        lag = len(self._translated) - self._model.length
        left = self._model.free_tokens - lag - self._margin
        return max(0, min(self.facts.context_tokens - len(self._tokens), left))

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        self._check(len(tokens))
        before = len(self._tokens)
        self._append(tokens)
        try:
            if len(self._translated) - self._model.length <= self._model.free_tokens:
                self._update_inner_cache(progress)
        except BaseException:
            if not self._closed:
                # Drop target tokens whose draft tokens are not all in the draft model's KV cache.
                self.truncate(max(before, bisect_right(self._ends, self._model.length) - 1))
            raise

    def _append(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._translated += self._translate(token, first=not self._tokens)
            self._tokens.append(token)
            self._ends.append(len(self._translated))

    def _translate(self, token: int, first: bool) -> tuple[int, ...]:
        return self._translation.translate(token, first)[-self._max_spelling_tokens :]

    def _update_inner_cache(self, progress: Progress | None = None) -> None:
        lag = self._translated[self._model.length :]
        if lag:
            self._model.prefill(lag, progress)

    def verify(self, tree: TokenTree, first: int = 0) -> TranslatedLogits:
        try:
            self._check(tree.width)
            if first == 0:
                self._inner_tree, self._inner_nodes = TreeBuilder(), []
                self._update_inner_cache()
            first_inner = len(self._inner_tree)
            for token, parent in zip(tree.tokens[first:], tree.parents[first:], strict=True):
                node = -1 if parent < 0 else self._inner_nodes[parent]
                for translated in self._translate(token, first=parent < 0 and not self._tokens):
                    node = self._inner_tree.add(node, translated)
                self._inner_nodes.append(node)
            logits = self._model.verify(self._inner_tree.build(), first_inner)
        except BaseException:
            self._end_round()
            raise
        self._round = tree.tokens
        rows = [node - first_inner for node in self._inner_nodes[first:]]
        return TranslatedLogits(logits, rows, self._translation, self.facts.vocab_size)

    def commit(self, path: tuple[int, ...]) -> None:
        self._check(0)
        self._model.commit(self._inner_tree.path(self._inner_nodes[path[-1] if path else 0]))
        self._append([self._round[i] for i in (0, *path)])
        self._round = ()

    def truncate(self, length: int) -> None:
        self._check(0)
        self._round = ()
        del self._tokens[length:]
        del self._ends[len(self._tokens) + 1 :]
        del self._translated[self._ends[-1] :]
        self._model.truncate(min(self._model.length, len(self._translated)))

    def resize(self, context_tokens: int) -> None:
        self._check_size(context_tokens)
        self._round = ()
        self._model.resize(context_tokens + self._margin)
        inner = self._model.facts
        self._now_sized(max(0, inner.context_tokens - self._margin), inner.kv_bytes)


class TranslatedLogits:
    """The draft model's logits, indexed by the target's token ids.

    Target tokens that are not in the draft model's vocabulary have probability 0.

    Args:
        logits: The draft model's logits.
        rows: Rows of `logits` to use, in order.
        translation: Translates the token ids.
        vocab_size: Only target ids below this value are returned.
    """

    __slots__ = ("_logits", "_rows", "_translation", "vocab_size")

    def __init__(
        self, logits: Logits, rows: Sequence[int], translation: TokenTranslation, vocab_size: int
    ) -> None:
        self._logits = logits
        self._rows = rows
        self._translation = translation
        self.vocab_size = vocab_size

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
        return len(self._rows)

    def best(
        self, row: int, count: int, processors: Sequence[LogitsProcessor] = (), noise: Noise | None = None
    ) -> tuple[list[int], float]:
        return best_on_host(self, row, count, processors, noise)

    def top(self, row: int, count: int) -> Candidates:
        requested = count + _EXTRA_TOKENS
        while count > 0 and requested < self._logits.vocab_size:
            shared = self._translate(*self._logits.top(self._rows[row], requested))
            if len(shared[0]) >= count:
                return shared
            requested *= 8
        return self._all_shared(row)

    def above(self, row: int, margin: float) -> Candidates:
        tokens, values = self.top(row, 1)
        floor = values.max(initial=-np.inf) - margin
        _, best = self._logits.top(self._rows[row], 1)
        draft_margin = float(best.max(initial=-np.inf)) - floor
        if not np.isfinite(draft_margin):
            return tokens, values
        tokens, values = self._translate(*self._logits.above(self._rows[row], draft_margin))
        above = values >= floor
        return tokens[above], values[above]

    def at(self, row: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        ids = self._translation.draft_id_of[tokens]
        values = self._logits.at(self._rows[row], np.maximum(ids, 0))
        return np.where(ids >= 0, values, -np.inf)

    def limit_vocab(self, vocab_size: int) -> TranslatedLogits:
        if vocab_size >= self.vocab_size:
            return self
        return TranslatedLogits(self._logits, self._rows, self._translation, vocab_size)

    def _translate(self, ids: NDArray[np.int64], values: NDArray[np.float64]) -> Candidates:
        tokens = self._translation.target_id_of[ids]
        shared = (tokens >= 0) & (tokens < self.vocab_size)
        tokens, values = tokens[shared], values[shared]
        order = np.argsort(tokens)
        return tokens[order], values[order]

    def _all_shared(self, row: int) -> Candidates:
        translation = self._translation
        count = int(np.searchsorted(translation.target_ids, self.vocab_size))
        return translation.target_ids[:count], self._logits.at(self._rows[row], translation.draft_ids[:count])
