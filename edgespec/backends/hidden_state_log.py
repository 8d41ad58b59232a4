"""Keep the hidden states of a target's most recent committed tokens, which heads read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_LOGGED_TOKENS", "POST_NORM", "HiddenStateLog", "OpenLogs"]

# Names the hidden state after the final norm, which the LM head reads. The number k >= 0 names the input of
# layer k. The input of the layer after the last one is the last layer's output, before the final norm.
POST_NORM = -1

# Keep the hidden states of this many tokens. A head that lags further behind skips the tokens before them.
MAX_LOGGED_TOKENS = 2048


class HiddenStateLog:
    """A buffer with the hidden states of the last committed tokens.

    Args:
        row_size: Number of values per token.
        max_tokens: Number of tokens to keep.

    Attributes:
        start: Position of the first token in the buffer.
        end: Position after the last token in the buffer.
    """

    def __init__(self, row_size: int, max_tokens: int = MAX_LOGGED_TOKENS) -> None:
        self.start = self.end = 0
        # A ring buffer. It is allocated page by page as it fills.
        self._rows: NDArray[np.float32] = np.empty((max_tokens, row_size), np.float32)

    @property
    def row_size(self) -> int:
        return int(self._rows.shape[1])

    def append(self, position: int, rows: NDArray[Any]) -> None:
        """Put the hidden states [tokens, row size] of the tokens from `position` on at the end of the buffer.

        Forgets later tokens that are already in the buffer. Forgets all tokens if some are missing between
        those in the buffer and `position`.
        """
        if not self.start <= position <= self.end:
            self.start = position
        size = len(self._rows)
        kept = rows[-size:]
        at = np.arange(position + len(rows) - len(kept), position + len(rows)) % size
        self._rows[at] = kept
        self.end = position + len(rows)
        self.start = max(self.start, self.end - size)

    def truncate(self, length: int) -> None:
        """Forget the hidden states from position `length` on."""
        self.end = min(self.end, length)
        self.start = min(self.start, self.end)

    def clear(self) -> None:
        self.start = self.end = 0

    def rows(self, start: int, end: int) -> NDArray[np.float32]:
        """Return the hidden states [tokens, row size] of positions [start, end). Unknown ones are zeros."""
        result = np.zeros((end - start, self.row_size), np.float32)
        known = range(max(start, self.start), min(end, self.end))
        if known:
            result[known.start - start : known.stop - start] = self._rows[np.array(known) % len(self._rows)]
        return result


class OpenLogs:
    """The logs that a model keeps for its heads.

    Attributes:
        states: The hidden states that the logs need, each once. `append` expects them in this order.
    """

    def __init__(self) -> None:
        self.states: tuple[int, ...] = ()
        # Each log with the hidden states that its rows consist of.
        self._logs: list[tuple[HiddenStateLog, Sequence[int]]] = []

    def open(self, states: Sequence[int], size: int) -> HiddenStateLog:
        """Return a new log, whose rows are the concatenated hidden states `states` of `size` values each."""
        log = HiddenStateLog(len(states) * size)
        self._logs.append((log, tuple(states)))
        self._update_states()
        return log

    def close(self, log: HiddenStateLog) -> None:
        """Stop adding tokens to a log."""
        self._logs = [each for each in self._logs if each[0] is not log]
        self._update_states()

    def _update_states(self) -> None:
        self.states = tuple(sorted({state for _, states in self._logs for state in states}))

    def append(self, position: int, rows: NDArray[Any]) -> None:
        """Append the hidden states [tokens, states, size] of the tokens from `position` on to all logs."""
        for log, states in self._logs:
            columns = [self.states.index(state) for state in states]
            log.append(position, rows[:, columns].reshape(len(rows), -1))

    def truncate(self, length: int) -> None:
        """Forget the hidden states from position `length` on."""
        for log, _ in self._logs:
            log.truncate(length)

    def clear(self) -> None:
        """Forget all hidden states."""
        for log, _ in self._logs:
            log.clear()
