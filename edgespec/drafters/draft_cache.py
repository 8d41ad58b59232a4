"""The KV cache of a draft model, and helpers for drafters that run one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.backends.base import LanguageModel, Progress
from edgespec.engine.logits import Logits
from edgespec.engine.prefix import common_prefix_length
from edgespec.engine.processors import Candidates

__all__ = ["DraftCache", "is_confident", "replace_unknown_ids", "top_probs"]

# Attention concentrates on the first tokens of a sequence, so they are kept: the "attention sinks" of
# StreamingLLM (arXiv 2309.17453).
_SINK_TOKENS = 4
# Tokens per distribution that the confidence of a draft is computed from. Chosen.
_TOP_TOKENS = 64


class DraftCache:
    """Keeps a draft model's KV cache in step with a sequence, and prefills only on request.

    A sequence that is too long to prefill now may be cut to its first tokens and its end. Drafts are worse
    then, but not wrong.

    Attributes:
        model: The draft model.
        visible_tokens: The sequence as the model sees it, including the last token.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.visible_tokens: list[int] = []
        self._tokens: list[int] = []

    @property
    def lag_tokens(self) -> int:
        """Visible tokens that are not in the KV cache, including the last token."""
        return len(self.visible_tokens) - self.model.length

    @property
    def pending_tokens(self) -> int:
        """Tokens to prefill before the next draft. The last two tokens are part of the first draft pass."""
        return max(self.lag_tokens - 2, 0)

    @property
    def full_pending_tokens(self) -> int:
        """Tokens to prefill so that the model sees the whole sequence."""
        return self.pending_tokens if len(self.visible_tokens) == len(self._tokens) else len(self._tokens)

    def begin(self, tokens: Sequence[int]) -> None:
        """Begin another sequence, and keep the common prefix in the KV cache."""
        self._tokens = list(tokens)
        self._set_visible(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the sequence."""
        self._tokens.extend(tokens)
        self.visible_tokens.extend(tokens)

    def prefill(self, max_tokens: int | None = None, progress: Progress | None = None) -> None:
        """Prefill all visible tokens but the last, if they fit the context of the model.

        Args:
            max_tokens: Largest number of tokens to prefill; None for all. If more are pending, the sequence
                is cut to its first tokens and its end. A sequence that was cut stays cut until the whole
                sequence may be prefilled.
            progress: See `LanguageModel.prefill`.
        """
        if max_tokens is None or max_tokens >= self.full_pending_tokens:
            self._set_visible(self._tokens)
        if max_tokens is not None and self.pending_tokens > max(max_tokens, _SINK_TOKENS):
            end_tokens = max(max_tokens - _SINK_TOKENS, 0) + 1
            self._set_visible([*self._tokens[:_SINK_TOKENS], *self._tokens[-end_tokens:]])
        if 1 < self.lag_tokens <= self.model.free_tokens:
            tokens = self.visible_tokens[self.model.length : -1]
            self.model.prefill(replace_unknown_ids(self.model, tokens), progress)

    def _set_visible(self, tokens: Sequence[int]) -> None:
        cached = common_prefix_length(self.visible_tokens[: self.model.length], tokens)
        self.model.truncate(min(cached, len(tokens) - 1))
        self.visible_tokens = list(tokens)


def replace_unknown_ids(model: LanguageModel, tokens: Sequence[int]) -> list[int]:
    """Replace token ids beyond the model's vocabulary by 0. This may cost acceptance, but never fails."""
    vocab_size = model.facts.vocab_size
    return [token if token < vocab_size else 0 for token in tokens]


def top_probs(logits: Logits, row: int) -> Candidates:
    """Return the 64 most probable tokens of a row at temperature 1, renormalised.

    Returns:
        Token ids, ascending, and their probabilities, float64, which add up to 1.
    """
    tokens, values = logits.top(row, _TOP_TOKENS)
    weights = np.exp(values - values.max())
    return tokens, weights / weights.sum()


def is_confident(logits: Logits, row: int, token: int, min_confidence: float) -> bool:
    """Return whether the model gives `token` at least the probability `min_confidence`, from 0 to 1."""
    if min_confidence <= 0.0:
        return True
    tokens, probs = top_probs(logits, row)
    return bool(probs[tokens == token].sum() >= min_confidence)
