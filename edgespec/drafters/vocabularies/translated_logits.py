"""A draft's logits, read by the target's token ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.vocabularies.translation import TokenTranslation
from edgespec.engine.logits import Logits, Noise, best_on_host
from edgespec.engine.processors import Candidates, LogitsProcessor

__all__ = ["TranslatedLogits"]

# So many more of the draft's best are asked for than are wanted, for those that the target lacks.
_MORE = 16


class TranslatedLogits:
    """Rows of a draft's logits with the tokens that the target has too, under the target's ids.

    rows: which of the draft's rows they are. The others of its tokens are as if they were impossible.
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
        asked = count + _MORE
        while count > 0 and asked < self._logits.vocab_size:
            found = self._shared(*self._logits.top(self._rows[row], asked))
            if len(found[0]) >= count:
                return found
            asked *= 8
        return self._everything(row)

    def above(self, row: int, margin: float) -> Candidates:
        tokens, values = self.top(row, 1)
        floor = values.max(initial=-np.inf) - margin
        # The draft's largest logit may be of a token that the target lacks.
        _, best = self._logits.top(self._rows[row], 1)
        over = float(best.max(initial=-np.inf)) - floor
        if not np.isfinite(over):
            return tokens, values
        tokens, values = self._shared(*self._logits.above(self._rows[row], over))
        kept = values >= floor
        return tokens[kept], values[kept]

    def at(self, row: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        ids = self._translation.draft_of[tokens]
        values = self._logits.at(self._rows[row], np.maximum(ids, 0))
        return np.where(ids >= 0, values, -np.inf)

    def limit_vocab(self, vocab_size: int) -> TranslatedLogits:
        if vocab_size >= self.vocab_size:
            return self
        return TranslatedLogits(self._logits, self._rows, self._translation, vocab_size)

    def _shared(self, ids: NDArray[np.int64], values: NDArray[np.float64]) -> Candidates:
        tokens = self._translation.target_of[ids]
        kept = (tokens >= 0) & (tokens < self.vocab_size)
        tokens, values = tokens[kept], values[kept]
        order = np.argsort(tokens)
        return tokens[order], values[order]

    def _everything(self, row: int) -> Candidates:
        translation = self._translation
        count = int(np.searchsorted(translation.targets, self.vocab_size))
        return translation.targets[:count], self._logits.at(self._rows[row], translation.drafts[:count])
