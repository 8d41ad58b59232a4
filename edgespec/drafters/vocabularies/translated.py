"""Make a draft model with a different vocabulary usable with the target's token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from edgespec.backends.base import LanguageModel, ModelFacts, Progress, Snapshot, Vocabulary
from edgespec.backends.base_model import BaseModel
from edgespec.drafters.vocabularies.translated_logits import TranslatedLogits
from edgespec.drafters.vocabularies.translation import MAX_SPELLING_TOKENS, TokenTranslation
from edgespec.engine.tree import TokenTree, TreeBuilder
from edgespec.errors import BackendError

__all__ = ["TranslatedModel"]


class TranslatedModel(BaseModel):
    """Wraps a draft model with a different vocabulary as a LanguageModel with the target's vocabulary.

    Implements token-level intersection (TLI, Timor et al. 2025, arXiv 2502.05202). A shared token is
    translated to one draft model token; other target tokens are spelled with several draft model tokens. The
    draft model's KV cache contains the beginning of the translated sequence, and missing tokens are run
    before the next pass. Only shared tokens have logits. `run_ahead` has no effect, because the draft model's
    best token may not exist in the target's vocabulary.

    Args:
        model: The draft model.
        vocabulary: The target's vocabulary.
        translation: Maps between the vocabularies.
    """

    def __init__(self, model: LanguageModel, vocabulary: Vocabulary, translation: TokenTranslation) -> None:
        self._model = model
        self._translation = translation
        self.vocabulary = vocabulary
        capabilities = model.facts.capabilities
        self._max_spelling_tokens = max(1, min(MAX_SPELLING_TOKENS, capabilities.max_width // 4))
        # Space to keep free: a pass begins with the root and at most one earlier token, and each of them may
        # be spelled with several draft tokens.
        self._margin = 2 * (self._max_spelling_tokens - 1)
        self.facts: ModelFacts = replace(
            model.facts,
            context_tokens=max(0, model.facts.context_tokens - self._margin),
            requested_context_tokens=max(0, model.facts.max_context_tokens - self._margin),
            vocab_size=vocabulary.size,
            chat_template=vocabulary.chat_template is not None,
            capabilities=replace(
                capabilities,
                max_width=capabilities.max_width - self._margin,
                partial_truncate=False,
                trainable=False,
            ),
        )
        # The sequence in both vocabularies. The first i target tokens correspond to the first `_ends[i]`
        # draft tokens.
        self._tokens: list[int] = []
        self._translated: list[int] = []
        self._ends: list[int] = [0]
        self._round: tuple[int, ...] = ()
        # The verified tree, translated to draft tokens. `_inner_nodes[i]` is the last node that spells target
        # node i.
        self._inner_tree = TreeBuilder()
        self._inner_nodes: list[int] = []

    @property
    def length(self) -> int:
        return len(self._tokens)

    @property
    def free_tokens(self) -> int:
        """See `LanguageModel.free_tokens`. Assumes that all tokens after the next two are shared."""
        lag = len(self._translated) - self._model.length
        left = self._model.free_tokens - lag - self._margin
        return max(0, min(self.facts.context_tokens - len(self._tokens), left))

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        """See `LanguageModel.prefill`. If the translation exceeds the context, `free_tokens` becomes 0."""
        self._check(len(tokens))
        before = len(self._tokens)
        self._add(tokens)
        try:
            if len(self._translated) - self._model.length <= self._model.free_tokens:
                self._update_inner_cache(progress)
        except BaseException:
            if not self._closed:
                self.truncate(max(before, self._whole_tokens(self._model.length)))
            raise

    def _add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._translated += self._translate_token(token, first=not self._tokens)
            self._tokens.append(token)
            self._ends.append(len(self._translated))

    def _translate_token(self, token: int, first: bool) -> tuple[int, ...]:
        return self._translation.translate(token, first)[-self._max_spelling_tokens :]

    def _whole_tokens(self, inner_length: int) -> int:
        """Return how many target tokens are fully represented by the first `inner_length` draft tokens."""
        return next(i for i in range(len(self._ends) - 1, -1, -1) if self._ends[i] <= inner_length)

    def _update_inner_cache(self, progress: Progress | None = None) -> None:
        """Prefill the translated tokens that are missing from the draft model's KV cache."""
        lag = self._translated[self._model.length :]
        if lag:
            self._model.prefill(lag, progress)

    def verify(self, tree: TokenTree, first: int = 0) -> TranslatedLogits:
        try:
            self._check(tree.width)
            if first == 0:
                self._clear_round()
                self._update_inner_cache()
            first_inner = len(self._inner_tree)
            self._translate_tree(tree, first)
            logits = self._model.verify(self._inner_tree.build(), first_inner)
        except BaseException:
            self._end_round()
            raise
        self._round = tree.tokens
        rows = [node - first_inner for node in self._inner_nodes[first:]]
        return TranslatedLogits(logits, rows, self._translation, self.facts.vocab_size)

    def _translate_tree(self, tree: TokenTree, first: int) -> None:
        """Add nodes from index `first` to the draft model's tree, each as a chain of draft tokens."""
        for node in range(first, tree.width):
            parent = tree.parents[node]
            inner_node = -1 if parent < 0 else self._inner_nodes[parent]
            for token in self._translate_token(tree.tokens[node], first=parent < 0 and not self._tokens):
                inner_node = self._inner_tree.add(inner_node, token)
            self._inner_nodes.append(inner_node)

    def _clear_round(self) -> None:
        self._round = ()
        self._inner_tree, self._inner_nodes = TreeBuilder(), []

    def _end_round(self) -> None:
        self._clear_round()
        if not self._closed:
            self._model.truncate(self._model.length)

    def commit(self, path: tuple[int, ...]) -> None:
        self._check(0)
        self._model.commit(self._inner_tree.path(self._inner_nodes[path[-1] if path else 0]))
        self._add([self._round[i] for i in (0, *path)])
        self._clear_round()

    def truncate(self, length: int) -> None:
        self._check(0)
        self._clear_round()
        del self._tokens[length:]
        del self._ends[len(self._tokens) + 1 :]
        del self._translated[self._ends[-1] :]
        self._model.truncate(min(self._model.length, len(self._translated)))

    def remove_range(self, start: int, end: int) -> None:
        self._check(0)
        start, end = min(start, len(self._tokens)), min(end, len(self._tokens))
        begin, stop = self._ends[start], self._ends[end]
        self._clear_round()
        self._model.remove_range(begin, min(stop, self._model.length))
        rest = self._tokens[end:]
        ends = [at - (stop - begin) for at in self._ends[end + 1 :]]
        del self._translated[begin:stop]
        self._tokens[start:], self._ends[start + 1 :] = rest, ends

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:
        self._check(0)
        self._clear_round()
        inner = self._model.snapshot()
        header = json.dumps({"text": self._tokens, "held": inner.length}).encode()
        return Snapshot(len(self._tokens), header + b"\n" + inner.data)

    def restore(self, snapshot: Snapshot) -> None:
        self._check(0)
        self.truncate(0)
        header, _, data = snapshot.data.partition(b"\n")
        try:
            saved = json.loads(header)
            tokens, inner_length = list(map(int, saved["text"])), int(saved["held"])
        except (ValueError, KeyError, TypeError) as error:
            raise BackendError("the snapshot does not fit this model", "prefill the tokens again") from error
        if len(tokens) != snapshot.length or len(tokens) > self.facts.context_tokens:
            raise BackendError("the snapshot does not fit this context", "prefill the tokens again")
        self._model.restore(Snapshot(inner_length, data))
        self._add(tokens)

    def resize(self, context_tokens: int) -> None:
        self._check_size(context_tokens)
        self._clear_round()
        self._model.resize(context_tokens + self._margin)
        inner = self._model.facts
        self._now_sized(max(0, inner.context_tokens - self._margin), inner.kv_bytes)

    def interrupt(self, enabled: bool) -> None:
        self._model.interrupt(enabled)

    def close(self) -> None:
        self._closed = True
        self._model.close()
