"""A vocabulary of given pieces, with matching table models and texts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from edgespec.model.base import Vocabulary
from tests.tabular import TabularModel

__all__ = ["Pieces", "conditioned", "speaking"]


class Pieces:
    """Tokens with these bytes. The last `control` tokens are control tokens.

    The very last one ends a reply. Text is tokenized greedily, longest token first.
    """

    chat_template: str | None = None
    bos_text = ""

    def __init__(self, pieces: Sequence[str | bytes], control: int = 1) -> None:
        self._raw = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        self.size = len(pieces)
        self.text_tokens = self.size - control
        self.eos_text = self._raw[-1].decode()
        self._starts = False

    def starting(self) -> Pieces:
        """Return the tokens; the first control token begins every text."""
        self._starts = True
        self.bos_text = self._raw[self.text_tokens].decode()
        return self

    def tokenize(self, text: str, *, special: bool, start: bool) -> list[int]:
        data, tokens, at = text.encode(), [self.text_tokens] if start and self._starts else [], 0
        known = self._raw if special else self._raw[: self.text_tokens]
        while at < len(data):
            fitting = [i for i, raw in enumerate(known) if raw and data.startswith(raw, at)]
            if not fitting:
                raise AssertionError(f"no token for {data[at:]!r}")
            tokens.append(max(fitting, key=lambda i: len(known[i])))
            at += len(known[tokens[-1]])
        return tokens

    def min_tokens(self, text: str) -> int:
        return 0

    def piece(self, token: int) -> bytes:
        return self._raw[token] if token < self.text_tokens else b""

    def raw_piece(self, token: int) -> bytes:
        return self._raw[token]

    def same_entries(self, other: Vocabulary) -> bool:
        return False

    def is_end(self, token: int) -> bool:
        return token == self.size - 1


def speaking(
    vocabulary: Pieces, seed: int, *, end: float = -30.0, context_tokens: int = 4096
) -> TabularModel:
    """Return a random table of order 2 with this vocabulary. `end` is added to control token logits."""
    size = vocabulary.size
    logits = (np.random.default_rng(seed).normal(size=(size**2, size)) * 1.5).astype(np.float32)
    logits[:, vocabulary.text_tokens :] += end
    model = TabularModel(logits, context_tokens=context_tokens)
    model.vocabulary = vocabulary
    return model


def conditioned(target: TabularModel, vocabulary: Pieces, *, spell: Sequence[Sequence[int]]) -> TabularModel:
    """Return a table that predicts the target's tokens in its own vocabulary.

    `spell[i]` is token i of the target in this vocabulary. If it consists of several tokens, the result is
    unspecified.
    """
    size, old = vocabulary.size, target.vocabulary.size
    logits = np.full((size**2, size), -8.0, np.float32)
    single = [ids[0] if len(ids) == 1 else None for ids in spell]
    for a, b in product(range(old), repeat=2):
        last, before = spell[b][-1], spell[a][-1]
        for token, its in enumerate(single):
            if its is not None:
                logits[before * size + last, its] = target._table[a * old + b, token]
    model = TabularModel(logits, context_tokens=target.facts.context_tokens)
    model.vocabulary = vocabulary
    return model
