"""Base classes for heads that edgespec runs itself and that read the target's last hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edgespec.backends.base import Snapshot, Vocabulary
from edgespec.backends.base_model import BaseModel
from edgespec.backends.hidden_state_log import HiddenStateLog
from edgespec.backends.model_facts import ModelFacts
from edgespec.backends.self_draft_view import SelfDraftView
from edgespec.errors import BackendError, CancelledError
from edgespec.heads.cached_attention import CachedAttention
from edgespec.heads.products import Array

__all__ = ["CachedStateHeadView", "StateHeadView"]


class StateHeadView(SelfDraftView[BaseModel]):
    """A head whose input for each token includes the target's hidden state at the preceding position.

    Args:
        target: The target.
        log: The log of the target's hidden states.
        stop_logging: Stops the log. Called when the view is closed.
        facts: Properties of the head.
    """

    def __init__(
        self, target: BaseModel, log: HiddenStateLog, stop_logging: Callable[[], None], facts: ModelFacts
    ) -> None:
        super().__init__(target)
        self.facts = facts
        self.vocabulary: Vocabulary = target.vocabulary
        self.log, self._stop_logging = log, stop_logging
        self._interrupted = False

    @property
    def free_tokens(self) -> int:
        return max(0, self.facts.context_tokens - self.length)

    @property
    def first_position(self) -> int:
        """The first position whose preceding hidden state is in the log."""
        return self.log.start + 1

    @property
    def last_position(self) -> int:
        """The last position whose preceding hidden state is in the log."""
        return self.log.end

    def _states_before(self, count: int) -> Array:
        """Return the preceding hidden state of each of the next `count` tokens."""
        return self.log.rows(self.length - 1, self.length - 1 + count)

    def interrupt(self, enabled: bool) -> None:
        self._interrupted = enabled

    def _check_not_interrupted(self) -> None:
        if self._interrupted:
            raise CancelledError("the model's computation was cancelled")

    def close(self) -> None:
        if not self._closed:
            super().close()
            self._stop_logging()


class CachedStateHeadView(StateHeadView):
    """A head with an attention layer. It computes the layer's KV cache from the target's hidden states.

    Subclasses set `_attention`, and set `_length` to 0. In addition to the `_length` committed tokens, the KV
    cache can contain the tokens of a draft.
    """

    _attention: CachedAttention
    _length: int

    @property
    def length(self) -> int:
        return self._length

    def _end_round(self) -> None:
        """Discard the current draft: remove all tokens after the committed ones from the KV cache."""
        self._attention.truncate(self._length)

    def start_at(self, position: int) -> None:
        """Empty the KV cache, and let it begin at `position`. Tokens before `position` are never run."""
        self._check()
        self._attention.restart(position)
        self._length = position
        self._end_round()

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self._length = min(self._length, length)
        self._end_round()

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:
        """Copy the KV cache at positions [start, end). Start at the first cached position if it is later."""
        self._check()
        self._end_round()
        end = self._length if end is None else min(end, self._length)
        start = min(max(start, self._attention.start), end)
        return Snapshot(end, self._attention.copy(start, end), start)

    def restore(self, snapshot: Snapshot) -> None:
        self._check()
        self._end_round()
        start, end = snapshot.start, snapshot.length
        fits = self._length == start <= end <= self.facts.context_tokens
        if not (fits and self._attention.restore(end - start, snapshot.data)):
            self.start_at(0)
            raise BackendError(
                f"the saved KV cache does not fit {self.facts.name}", "process the prompt again"
            )
        self._length = end

    def resized(self) -> None:
        tokens = self._target.facts.context_tokens
        token_bytes = self.facts.kv_bytes // self.facts.context_tokens if self.facts.context_tokens else 0
        self.facts = replace(self.facts, context_tokens=tokens, kv_bytes=token_bytes * tokens)
