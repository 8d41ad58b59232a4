"""A draft model spoken to in the target's token ids (token-level intersection, arXiv 2502.05202)."""

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
    """A LanguageModel in the target's vocabulary over a draft model with another one.

    A token of the target is one token of the draft where they share it, else the draft's spelling of its
    bytes, so that the inner cache always holds the beginning of the translated text. What it does not
    hold yet is run before the next pass. Logits are of shared tokens only. Nothing is run
    ahead: the draft's best token may be one that the target lacks.
    """

    def __init__(self, model: LanguageModel, vocabulary: Vocabulary, translation: TokenTranslation) -> None:
        self._model = model
        self._translation = translation
        self.vocabulary = vocabulary
        able = model.facts.capabilities
        # The root and the token before it, which a drafter may run with it, can take several tokens each.
        self._longest = max(1, min(MAX_SPELLING_TOKENS, able.max_width // 4))
        self._margin = 2 * (self._longest - 1)
        self.facts: ModelFacts = replace(
            model.facts,
            context_tokens=max(0, model.facts.context_tokens - self._margin),
            requested_context_tokens=max(0, model.facts.max_context_tokens - self._margin),
            vocab_size=vocabulary.size,
            chat_template=vocabulary.chat_template is not None,
            capabilities=replace(
                able, max_width=able.max_width - self._margin, partial_truncate=False, trainable=False
            ),
        )
        # The text in both vocabularies; the first i tokens of the target are `_ends[i]` of the draft.
        self._text: list[int] = []
        self._translated: list[int] = []
        self._ends: list[int] = [0]
        self._round: tuple[int, ...] = ()
        # The draft's tree of the open round, and the last node there of each of the target's.
        self._inner = TreeBuilder()
        self._last: list[int] = []

    @property
    def length(self) -> int:
        return len(self._text)

    @property
    def free_tokens(self) -> int:
        """What is left if what follows is shared, but for the first two tokens."""
        lag = len(self._translated) - self._model.length
        left = self._model.free_tokens - lag - self._margin
        return max(0, min(self.facts.context_tokens - len(self._text), left))

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        """See the Protocol. Tokens whose spelling is too long for the inner context leave no room."""
        self._check(len(tokens))
        before = len(self._text)
        self._add(tokens)
        try:
            if len(self._translated) - self._model.length <= self._model.free_tokens:
                self._bring_up(progress)
        except BaseException:
            if not self._closed:
                self.truncate(max(before, self._whole(self._model.length)))
            raise

    def _add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._translated += self._spell(token, first=not self._text)
            self._text.append(token)
            self._ends.append(len(self._translated))

    def _spell(self, token: int, first: bool) -> tuple[int, ...]:
        return self._translation.spell(token, first)[-self._longest :]

    def _whole(self, held: int) -> int:
        """How many of the target's tokens the first `held` of the draft are, at least."""
        return next(i for i in range(len(self._ends) - 1, -1, -1) if self._ends[i] <= held)

    def _bring_up(self, progress: Progress | None = None) -> None:
        """Run what the inner cache lacks of the text."""
        lag = self._translated[self._model.length :]
        if lag:
            self._model.prefill(lag, progress)

    def verify(self, tree: TokenTree, first: int = 0) -> TranslatedLogits:
        try:
            self._check(tree.width)
            if first == 0:
                self._forget_round()
                self._bring_up()
            begun = len(self._inner)
            self._translate(tree, first)
            logits = self._model.verify(self._inner.build(), begun)
        except BaseException:
            self._end_round()
            raise
        self._round = tree.tokens
        rows = [node - begun for node in self._last[first:]]
        return TranslatedLogits(logits, rows, self._translation, self.facts.vocab_size)

    def _translate(self, tree: TokenTree, first: int) -> None:
        """Add nodes from `first` on to the draft's tree, each as a chain."""
        for node in range(first, tree.width):
            parent = tree.parents[node]
            place = -1 if parent < 0 else self._last[parent]
            for token in self._spell(tree.tokens[node], first=parent < 0 and not self._text):
                place = self._inner.add(place, token)
            self._last.append(place)

    def _forget_round(self) -> None:
        self._round = ()
        self._inner, self._last = TreeBuilder(), []

    def _end_round(self) -> None:
        self._forget_round()
        if not self._closed:
            self._model.truncate(self._model.length)

    def commit(self, path: tuple[int, ...]) -> None:
        self._check(0)
        self._model.commit(self._inner.path(self._last[path[-1] if path else 0]))
        self._add([self._round[i] for i in (0, *path)])
        self._forget_round()

    def truncate(self, length: int) -> None:
        self._check(0)
        self._forget_round()
        del self._text[length:]
        del self._ends[len(self._text) + 1 :]
        del self._translated[self._ends[-1] :]
        self._model.truncate(min(self._model.length, len(self._translated)))

    def remove_range(self, start: int, end: int) -> None:
        self._check(0)
        start, end = min(start, len(self._text)), min(end, len(self._text))
        begin, stop = self._ends[start], self._ends[end]
        self._forget_round()
        self._model.remove_range(begin, min(stop, self._model.length))
        rest = self._text[end:]
        ends = [at - (stop - begin) for at in self._ends[end + 1 :]]
        del self._translated[begin:stop]
        self._text[start:], self._ends[start + 1 :] = rest, ends

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:
        self._check(0)
        self._forget_round()
        inner = self._model.snapshot()
        about = json.dumps({"text": self._text, "held": inner.length}).encode()
        return Snapshot(len(self._text), about + b"\n" + inner.data)

    def restore(self, snapshot: Snapshot) -> None:
        self._check(0)
        self.truncate(0)
        about, _, data = snapshot.data.partition(b"\n")
        try:
            saved = json.loads(about)
            text, held = list(map(int, saved["text"])), int(saved["held"])
        except (ValueError, KeyError, TypeError) as error:
            raise BackendError("the saved state does not fit this model", "compute it again") from error
        if len(text) != snapshot.length or len(text) > self.facts.context_tokens:
            raise BackendError("the saved state does not fit this context", "compute it again")
        self._model.restore(Snapshot(held, data))
        self._add(text)

    def resize(self, context_tokens: int) -> None:
        self._check_size(context_tokens)
        self._forget_round()
        self._model.resize(context_tokens + self._margin)
        inner = self._model.facts
        self._now_sized(max(0, inner.context_tokens - self._margin), inner.kv_bytes)

    def interrupt(self, enabled: bool) -> None:
        self._model.interrupt(enabled)

    def close(self) -> None:
        self._closed = True
        self._model.close()
