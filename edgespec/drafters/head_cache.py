"""Manage the KV cache of a head, which drafts from the target's hidden states."""

from __future__ import annotations

from edgespec.backends.base import Progress
from edgespec.backends.optional_features import HeadModel
from edgespec.drafters.draft_cache import DraftCache

__all__ = ["HeadCache"]


class HeadCache(DraftCache):
    """Keeps a head's KV cache in step with the token sequence. Prefills only on request.

    A head can only run tokens for which the target's previous hidden state is known. It is unknown for a
    prefix that the target restored from a cache, and for tokens too long ago. The head then begins after
    them, which lowers the acceptance rate but does not change the reply.
    """

    model: HeadModel

    def __init__(self, model: HeadModel) -> None:
        super().__init__(model)

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
        is_known = self.model.first_position <= self.model.length <= self.model.last_position
        return is_known and super().can_draft(max_width)

    def prefill(self, max_tokens: int | None = None, progress: Progress | None = None) -> None:
        first = self.model.first_position
        if max_tokens is not None:
            first = max(first, len(self.visible_tokens) - 1 - max_tokens)
        if self.model.length < first <= self.model.last_position:
            self.model.start_at(first)
        if self.model.length >= first:
            super().prefill(progress=progress)
