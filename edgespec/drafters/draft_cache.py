"""A draft model's cache, and the text it is of."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.backends.base import LanguageModel, Progress
from edgespec.drafters.draft_model import known
from edgespec.engine.prefix import common_prefix_length

__all__ = ["DraftCache"]

# Models lean on the first tokens of a text, whatever they are (StreamingLLM, arXiv 2309.17453).
_SINK_TOKENS = 4


class DraftCache:
    """Keeps a draft model in step with a text, and reads no more of it than is asked for.

    Where a text is too long to be read now, its first tokens and its end may do: the guesses are worse then,
    not wrong. `shown` is the text as the model sees it, the last token included.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.shown: list[int] = []
        self._text: list[int] = []

    @property
    def behind(self) -> int:
        """Tokens of `shown` that the model has not run, the last one included."""
        return len(self.shown) - self.model.length

    @property
    def unread(self) -> int:
        """Tokens to run before a guess is possible; one more than the last is run together with it."""
        return max(self.behind - 2, 0)

    @property
    def unread_whole(self) -> int:
        """Tokens to run before all of the text has been seen."""
        return self.unread if len(self.shown) == len(self._text) else len(self._text)

    def begin(self, tokens: Sequence[int]) -> None:
        """Another text: the cache keeps what both begin with."""
        self._text = list(tokens)
        self._show(self._text)

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on."""
        self._text.extend(tokens)
        self.shown.extend(tokens)

    def read(self, at_most: int | None = None, progress: Progress | None = None) -> None:
        """Run all tokens but the last, if they fit the model's context; of too many the first and the end.

        Where the model sees the end only, it goes on with that unless all may be read.
        """
        if at_most is None or at_most >= self.unread_whole:
            self._show(self._text)
        if at_most is not None and self.unread > max(at_most, _SINK_TOKENS):
            last = max(at_most - _SINK_TOKENS, 0) + 1
            self._show([*self._text[:_SINK_TOKENS], *self._text[-last:]])
        if 1 < self.behind <= self.model.free_tokens:
            self.model.prefill(known(self.model, self.shown[self.model.length : -1]), progress)

    def _show(self, tokens: Sequence[int]) -> None:
        held = common_prefix_length(self.shown[: self.model.length], tokens)
        self.model.truncate(min(held, len(tokens) - 1))
        self.shown = list(tokens)
