"""The text so far in the tokens of a draft, as it grows."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.backends.base import Vocabulary
from edgespec.drafters.vocabularies.translation import TokenTranslation
from edgespec.engine.prefix import common_prefix_length

__all__ = ["IncrementalRetokeniser"]

# The end of the text is tokenized again as it grows: at least so many bytes, at most the larger number.
_OPEN_BYTES, _MOST_OPEN_BYTES = 64, 256


class IncrementalRetokeniser:
    """The draft's tokens of the text.

    Control tokens cut the text in parts that are tokenized on their own. Of the last part, the end may
    still change with what follows it; what lies further back is settled.

    tokens: all of them; the first `_settled` stay. unread: the begun bytes of a character, which no tokenizer
    takes yet.
    """

    def __init__(self, vocabulary: Vocabulary, translation: TokenTranslation) -> None:
        self._vocabulary = vocabulary
        self._translation = translation
        self.tokens: list[int] = list(translation.draft_start)
        self.unread = b""
        self._settled = len(self.tokens)
        self._open = b""
        self._unchanged = 0

    def add(self, tokens: Sequence[int]) -> None:
        """The target's text goes on with these tokens."""
        for token in tokens:
            piece = self._vocabulary.piece(token)
            if piece:
                self._open += piece
                continue
            self._end_with(self._translation.draft_text.spell(self._open))
            self._open = b""
            spelled = self._translation.spell(token, first=False)
            # The text begins once, whether or not the target says so.
            if self.tokens != list(self._translation.draft_start) or list(spelled) != self.tokens:
                self.tokens += spelled
            self._settled = len(self.tokens)
        self._tokenize()

    def take_unchanged(self) -> int:
        """How many of the first tokens are what they were when this was called last."""
        unchanged, self._unchanged = self._unchanged, len(self.tokens)
        return unchanged

    def _tokenize(self) -> None:
        begun = _begun(self._open)
        self.unread = self._open[len(self._open) - begun :]
        text = self._open[: len(self._open) - begun]
        found = self._translation.draft_text.spell(text)
        self._end_with(found)
        if len(text) > _MOST_OPEN_BYTES:
            self._settle(found)

    def _end_with(self, found: Sequence[int]) -> None:
        """Let these tokens follow those that are settled."""
        kept = self._settled + common_prefix_length(self.tokens[self._settled :], found)
        self._unchanged = min(self._unchanged, kept)
        self.tokens[kept:] = found[kept - self._settled :]

    def _settle(self, found: list[int]) -> None:
        """What ends before a space, or far enough from the end, will not change."""
        at, places = 0, [(0, 0)]
        for place, token in enumerate(found):
            raw = self._translation.draft_bytes(token)
            if raw[:1].isspace() or at + _MOST_OPEN_BYTES < len(self._open):
                places.append((place, at))
            at += len(raw)
        place, at = max((p for p in places if p[1] + _OPEN_BYTES <= len(self._open)), default=(0, 0))
        self._settled += place
        self._open = self._open[at:]


def _begun(text: bytes) -> int:
    """How many bytes at the end are the beginning of a character."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte >= 0xC0:
            size = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if back < size else 0
        if byte < 0x80:
            return 0
    return 0
