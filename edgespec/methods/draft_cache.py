"""Manage a draft model's KV cache, and provide helpers for drafters that run a model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.engine.logits import Logits
from edgespec.engine.prefix import common_prefix_length
from edgespec.engine.processors import Candidates
from edgespec.methods.constants import SINK_TOKENS, TOP_TOKENS
from edgespec.model.base import LanguageModel, Progress

__all__ = ["DraftCache", "is_confident", "replace_unknown_ids", "top_probs"]


class DraftCache:
    """Keeps a draft model's KV cache in step with the token sequence. Prefills only on request.

    If there is no time to prefill the whole sequence, only its first and last tokens are prefilled. This
    lowers the acceptance rate but does not change the reply.

    Attributes:
        model: The draft model.
        visible_tokens: The tokens of the sequence that the model can attend to, including the last one.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.visible_tokens: list[int] = []
        self._tokens: list[int] = []

    @property
    def lag_tokens(self) -> int:
        """Number of tokens that the draft model has yet to process."""
        return len(self.visible_tokens) - self.model.length

    @property
    def pending_tokens(self) -> int:
        """Number of tokens to prefill before drafting."""
        return max(self.lag_tokens - 2, 0)

    @property
    def full_pending_tokens(self) -> int:
        """Number of tokens to prefill so that the draft model can attend to the whole sequence."""
        return self.pending_tokens if len(self.visible_tokens) == len(self._tokens) else len(self._tokens)

    def can_draft(self, max_width: int) -> bool:
        """Return whether a pass of up to `max_width` tokens can process all missing tokens."""
        return self.lag_tokens <= min(2, max_width)

    def begin(self, tokens: Sequence[int]) -> None:
        """Switch to another token sequence, keeping the shared prefix of the KV cache."""
        self._tokens = list(tokens)
        self._set_visible(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the sequence without running the draft model."""
        self._tokens.extend(tokens)
        self.visible_tokens.extend(tokens)

    def prefill(self, max_tokens: int | None = None, progress: Progress | None = None) -> None:
        """Prefill the draft model with the token sequence, except its last token.

        Does nothing if the tokens do not fit in the model's context.

        Args:
            max_tokens: Maximum number of tokens to prefill. If the sequence needs more, only its first and
                last tokens are prefilled. Defaults to no limit.
            progress: See `LanguageModel.prefill`.
        """
        if max_tokens is None or max_tokens >= self.full_pending_tokens:
            self._set_visible(self._tokens)
        if max_tokens is not None and self.pending_tokens > max(max_tokens, SINK_TOKENS):
            end_tokens = max(max_tokens - SINK_TOKENS, 0) + 1
            self._set_visible([*self._tokens[:SINK_TOKENS], *self._tokens[-end_tokens:]])
        if 1 < self.lag_tokens <= self.model.free_tokens:
            tokens = self.visible_tokens[self.model.length : -1]
            self.model.prefill(replace_unknown_ids(self.model, tokens), progress)

    def _set_visible(self, tokens: Sequence[int]) -> None:
        cached = common_prefix_length(self.visible_tokens[: self.model.length], tokens)
        self.model.truncate(min(cached, len(tokens) - 1))
        self.visible_tokens = list(tokens)


def replace_unknown_ids(model: LanguageModel, tokens: Sequence[int]) -> list[int]:
    """Replace token ids outside the model's vocabulary with 0, which can lower the acceptance rate."""
    vocab_size = model.facts.vocab_size
    return [token if token < vocab_size else 0 for token in tokens]


def top_probs(logits: Logits, row: int) -> Candidates:
    """Return the 64 most likely tokens of a logits row and their probabilities at temperature 1.

    Returns:
        Token ids in ascending order, and their renormalised probabilities (float64), which sum to 1.
    """
    tokens, values = logits.top(row, TOP_TOKENS)
    weights = np.exp(values - values.max())
    return tokens, weights / weights.sum()


def is_confident(logits: Logits, row: int, token: int, min_confidence: float) -> bool:
    """Return whether the model gives `token` a probability of at least `min_confidence`, from 0 to 1."""
    if min_confidence <= 0.0:
        return True
    tokens, probs = top_probs(logits, row)
    return bool(probs[tokens == token].sum() >= min_confidence)
