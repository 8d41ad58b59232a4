"""Manage the KV cache of a draft model or of a head that drafts from the target's hidden states.

Also provides helpers for drafters that run a model.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from edgespec.engine.logits import Logits
from edgespec.engine.processors import Candidates
from edgespec.engine.tree import common_prefix_length
from edgespec.errors import EdgespecError
from edgespec.methods.constants import SINK_TOKENS, TOP_TOKENS
from edgespec.model.base import LanguageModel, Progress, Snapshot
from edgespec.model.hidden_states import HeadModel

__all__ = ["DraftCache", "HeadCache", "is_confident", "replace_unknown_ids", "top_probs"]

# Header of a copied head state: the start and end positions of its KV cache, and the number of hidden states
# that follow (0 or 1).
_COPY = struct.Struct("<QQQ")


class DraftCache:
    """Keeps a draft model's KV cache in sync with the token sequence, prefilling only on request.

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
        """Number of tokens that the draft model has not processed yet."""
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


class HeadCache(DraftCache):
    """Keeps a head's KV cache in sync with the token sequence, prefilling only on request.

    A head can process a token only if the target's hidden state at the previous token is known. Old hidden
    states are not kept, and those of a prefix restored from the prefix cache are unknown unless the head's
    state was stored with the prefix (see `copy`). In such cases, the head's KV cache starts after these
    tokens, which lowers the acceptance rate but does not change the reply.

    Args:
        model: The head.
        name: Identifies the head and its files, so that a copy of its state can be restored only by the same
            head.
    """

    model: HeadModel

    def __init__(self, model: HeadModel, name: str = "head") -> None:
        super().__init__(model)
        self.name = name

    @property
    def token_bytes(self) -> float:
        """Size of the head's KV cache per token in bytes."""
        facts = self.model.facts
        return facts.kv_bytes / max(1, facts.context_tokens)

    @property
    def lag_tokens(self) -> int:
        return len(self.visible_tokens) - max(self.model.length, self.model.first_position)

    @property
    def pending_tokens(self) -> int:
        if self.lag_tokens >= 1 and self.model.length < self.model.first_position:
            return max(self.lag_tokens - 1, 1)
        return super().pending_tokens

    @property
    def full_pending_tokens(self) -> int:
        return self.pending_tokens

    def can_draft(self, max_width: int) -> bool:
        return self._can_run(self.model.length) and super().can_draft(max_width)

    def _can_run(self, position: int) -> bool:
        """Return whether the hidden state required by the token at `position` is known."""
        return self.model.first_position <= position <= self.model.last_position

    def prefill(self, max_tokens: int | None = None, progress: Progress | None = None) -> None:
        first = self.model.first_position
        if max_tokens is not None and max_tokens < self.pending_tokens:
            first = max(first, len(self.visible_tokens) - 1 - max_tokens)
        if self.model.length < first <= self.model.last_position:
            self.model.start_at(first)
        if self.model.length >= first and self._can_run(len(self.visible_tokens) - 1):
            super().prefill(progress=progress)

    def needs_last_state(self, tokens: Sequence[int]) -> bool:
        """Return whether the head has processed all of `tokens` but lacks the last hidden state.

        The head can continue drafting if the target reprocesses the last token.
        """
        return 0 < len(tokens) == self._read_tokens(tokens) and not self._can_run(len(tokens))

    def _read_tokens(self, tokens: Sequence[int]) -> int:
        """Return how many of the leading `tokens` are already in the head's KV cache."""
        return common_prefix_length(self.visible_tokens[: self.model.length], tokens)

    def copy(self, tokens: Sequence[int], start: int) -> bytes:
        """Return a copy of the head's state for `tokens[start:]`, or b"" if the state cannot be copied.

        The copy contains the head's KV cache and the target's hidden state after the last token, which the
        next token requires. The head first processes any missing tokens, which is fast compared with running
        the target.

        Args:
            tokens: The first tokens in the target's KV cache.
            start: The position of the first token to copy.
        """
        try:
            if self._read_tokens(tokens) < len(tokens):
                # Append an arbitrary token, because the last token of a sequence is not prefilled.
                self.begin([*tokens, tokens[-1]])
                self.prefill()
            read, end, log = self._read_tokens(tokens), len(tokens), self.model.log
            cells = self.model.snapshot(min(start, read), read)
            state = log.rows(end - 1, end) if log.start < end <= log.end else log.rows(end, end)
        except (EdgespecError, MemoryError):
            return b""
        return _COPY.pack(cells.start, cells.length, len(state)) + state.tobytes() + cells.data

    def restore(self, tokens: Sequence[int], copy: bytes) -> None:
        """Load a copy of the head's state after the target has restored the same tokens.

        If the copy is empty or incompatible, the head's KV cache starts after these tokens.

        Args:
            tokens: All tokens in the target's KV cache. The copied tokens are the last of these.
            copy: The result of `copy`, possibly from an earlier process.
        """
        log = self.model.log
        try:
            start, end, count = _COPY.unpack_from(copy)
            if not (start <= end <= len(tokens) and count <= 1):
                return
            offset = _COPY.size + count * 4 * log.row_size
            state = np.frombuffer(copy[_COPY.size : offset], np.float32).reshape(count, log.row_size)
            self._restore_cells(tokens, Snapshot(end, copy[offset:], start))
        except (EdgespecError, MemoryError, ValueError, struct.error):
            return
        if count:
            log.append(len(tokens) - 1, state)

    def _restore_cells(self, tokens: Sequence[int], cells: Snapshot) -> None:
        read = self._read_tokens(tokens)
        if read >= cells.length or cells.start == cells.length:
            return
        if read < cells.start:
            self.model.start_at(cells.start)
        else:
            self.model.truncate(cells.start)
        # Drop the earlier tokens first, because a failed restore clears the KV cache.
        self.visible_tokens = list(tokens)
        self.model.restore(cells)
