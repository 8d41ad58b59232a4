"""Map a draft model's logits to the target's token ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.vocabularies.translation import TokenTranslation
from edgespec.engine.logits import Logits, Noise, best_on_host
from edgespec.engine.processors import Candidates, LogitsProcessor

__all__ = ["TranslatedLogits"]

# Number of extra top tokens to request, because the target may lack some of the draft's best tokens.
_EXTRA_TOKENS = 16


class TranslatedLogits:
    """The draft model's logits, indexed by target ids. Other tokens have probability 0.

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
        # The draft model measures margins from its largest logit, which may belong to a token that is not
        # shared.
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
