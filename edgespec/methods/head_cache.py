"""Manage the KV cache of a head, which drafts from the target's hidden states."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from edgespec.engine.prefix import common_prefix_length
from edgespec.errors import EdgespecError
from edgespec.methods.draft_cache import DraftCache
from edgespec.model.base import Progress, Snapshot
from edgespec.model.hidden_states import HeadModel

__all__ = ["HeadCache"]

# Header of a copied head state: the start and end positions of its KV cache, and the number of hidden states
# that follow (0 or 1).
_COPY = struct.Struct("<QQQ")


class HeadCache(DraftCache):
    """Keeps a head's KV cache in step with the token sequence. Prefills only on request.

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
        """Return how many leading `tokens` are already in the head's KV cache."""
        return common_prefix_length(self.visible_tokens[: self.model.length], tokens)

    def copy(self, tokens: Sequence[int], start: int) -> bytes:
        """Return a copy of the head's state for `tokens[start:]`, or b"" if the state cannot be copied.

        The copy contains the head's KV cache and the target's hidden state after the last token, which the
        next token requires. The head first processes any missing tokens, which takes little time compared
        with the target.

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
        # Forget the earlier tokens first, because a failed restore clears the KV cache.
        self.visible_tokens = list(tokens)
        self.model.restore(cells)
