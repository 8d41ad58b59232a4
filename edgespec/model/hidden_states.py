"""Interfaces between heads and the target whose hidden states they read.

A target logs the hidden states of its most recent committed tokens, and a head reads the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.model.base import LanguageModel

# Index of the hidden state after the final norm, which the LM head reads. Index k >= 0 is the input of layer
# k, and index `layer count` is the output of the last layer, before the final norm.
POST_NORM = -1
# This index and all lower ones stand for the residual streams after the last layer of a model with
# hyper-connections (arXiv 2409.19606). The model mixes the streams into one hidden state before the final
# norm.
_FIRST_STREAM = POST_NORM - 1

# Number of tokens whose hidden states are kept. A head that lags further behind skips older tokens.
MAX_LOGGED_TOKENS = 2048


def stream_states(count: int) -> tuple[int, ...]:
    """Return the indices of the first `count` residual streams after the last layer."""
    return tuple(range(_FIRST_STREAM, _FIRST_STREAM - count, -1))


class HiddenStateLog:
    """A buffer for the hidden states of the most recently committed tokens.

    Args:
        row_size: Number of values per token.
        max_tokens: Maximum number of tokens in the buffer.

    Attributes:
        start: Position of the first token in the buffer.
        end: Position after the last token in the buffer.
    """

    def __init__(self, row_size: int, max_tokens: int = MAX_LOGGED_TOKENS) -> None:
        self.start = self.end = 0
        # A ring buffer. The operating system allocates its memory page by page as it fills up.
        self._rows: NDArray[np.float32] = np.empty((max_tokens, row_size), np.float32)

    @property
    def row_size(self) -> int:
        return int(self._rows.shape[1])

    def append(self, position: int, rows: NDArray[Any]) -> None:
        """Append the hidden states [tokens, row size] of consecutive tokens, starting at `position`.

        Any buffered tokens at or after `position` are dropped first. If there is a gap between the last
        buffered token and `position`, all buffered tokens are dropped.
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
        """Discard the hidden states from position `length` on."""
        self.end = min(self.end, length)
        self.start = min(self.start, self.end)

    def clear(self) -> None:
        self.start = self.end = 0

    def rows(self, start: int, end: int) -> NDArray[np.float32]:
        """Return the hidden states [tokens, row size] at positions [start, end), with zeros where unknown."""
        result = np.zeros((end - start, self.row_size), np.float32)
        known = range(max(start, self.start), min(end, self.end))
        if known:
            result[known.start - start : known.stop - start] = self._rows[np.array(known) % len(self._rows)]
        return result


class OpenLogs:
    """The hidden-state logs that a model keeps for its heads.

    Attributes:
        states: Distinct indices of all hidden states that the logs need, in the order that `append` expects.
    """

    def __init__(self) -> None:
        self.states: tuple[int, ...] = ()
        # Pairs of a log and the indices of the hidden states that each of its rows concatenates.
        self._logs: list[tuple[HiddenStateLog, Sequence[int]]] = []

    def open(self, states: Sequence[int], size: int) -> HiddenStateLog:
        """Open a log whose rows concatenate the given hidden states, each with `size` values."""
        log = HiddenStateLog(len(states) * size)
        self._logs.append((log, tuple(states)))
        self._update_states()
        return log

    def close(self, log: HiddenStateLog) -> None:
        """Stop appending to a log."""
        self._logs = [each for each in self._logs if each[0] is not log]
        self._update_states()

    def _update_states(self) -> None:
        self.states = tuple(sorted({state for _, states in self._logs for state in states}))

    def append(self, position: int, rows: NDArray[Any]) -> None:
        """Append hidden states [tokens, states, size] to every log, starting at `position`."""
        for log, states in self._logs:
            columns = [self.states.index(state) for state in states]
            log.append(position, rows[:, columns].reshape(len(rows), len(columns) * rows.shape[2]))

    def truncate(self, length: int) -> None:
        """Discard the hidden states at and after position `length`."""
        for log, _ in self._logs:
            log.truncate(length)

    def clear(self) -> None:
        """Discard all hidden states."""
        for log, _ in self._logs:
            log.clear()


class HeadModel(LanguageModel, Protocol):
    """A head: a draft model that reads the target's hidden states.

    `snapshot` copies only the head's own KV cache. If the cache starts after the first requested position, so
    does the snapshot.
    """

    @property
    def log(self) -> HiddenStateLog:
        """The log of the target's hidden states that the head reads."""

    @property
    def first_position(self) -> int:
        """First position at which the head can run a token."""

    @property
    def last_position(self) -> int:
        """Last position at which the head can run a token."""

    def start_at(self, position: int) -> None:
        """Clear the KV cache and make it start at `position`. Tokens before `position` are never run."""


class HiddenStateSource(LanguageModel, Protocol):
    """A target that keeps the hidden states of its committed tokens for heads."""

    def log_hidden_states(self, states: Sequence[int]) -> HiddenStateLog:
        """Start logging the hidden states of all subsequently committed tokens, including prompts.

        Several logs can be open at once. Logging does not change the model's logits.

        Args:
            states: Indices of the hidden states to log, in the order in which each row concatenates them.
                Index k is the input of layer k, the layer count is the last layer's output before the final
                norm, and `POST_NORM` is the state after the final norm. See also `stream_states`.

        Raises:
            CapabilityError: One of the hidden states does not exist in the model or cannot be read.
            MemoryBudgetError: There is not enough memory for the log.
        """

    def stop_logging(self, log: HiddenStateLog) -> None:
        """Stop appending to a log that `log_hidden_states` returned."""
