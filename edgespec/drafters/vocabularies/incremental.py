"""Tokenize a growing text step by step for a draft model with a different vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.backends.base import Vocabulary
from edgespec.drafters.vocabularies.translation import TokenTranslation
from edgespec.engine.prefix import common_prefix_length

__all__ = ["IncrementalRetokeniser"]

# Minimum and approximate maximum number of bytes at the end of the text to tokenize again whenever text is
# appended, because their tokens may change. Both values are heuristics.
_MIN_OPEN_BYTES, _MAX_OPEN_BYTES = 64, 256


class IncrementalRetokeniser:
    """Converts a growing sequence of target tokens to draft model tokens, step by step.

    Control tokens split the text into parts that are tokenized separately. The tokens at the end of the last
    part are open: they may change when text is appended. All earlier tokens are final.

    Attributes:
        tokens: All draft model tokens. The first `_final_tokens` of them never change.
        incomplete_bytes: Bytes of an incomplete character at the end, which are not tokenized yet.
    """

    def __init__(self, vocabulary: Vocabulary, translation: TokenTranslation) -> None:
        self._vocabulary = vocabulary
        self._translation = translation
        self.tokens: list[int] = list(translation.draft_start_tokens)
        self.incomplete_bytes = b""
        self._final_tokens = len(self.tokens)
        self._open_text = b""
        self._unchanged_tokens = 0

    def add(self, tokens: Sequence[int]) -> None:
        """Append target tokens."""
        for token in tokens:
            piece = self._vocabulary.piece(token)
            if piece:
                self._open_text += piece
                continue
            self._replace_open_tokens(self._translation.draft_tokenizer.tokenize(self._open_text))
            self._open_text = b""
            translated = self._translation.translate(token, first=False)
            # Do not add the translated start token if the sequence already begins with the draft's start
            # tokens.
            only_start = self.tokens == list(self._translation.draft_start_tokens)
            if not only_start or list(translated) != self.tokens:
                self.tokens += translated
            self._final_tokens = len(self.tokens)
        self._tokenize()

    def take_unchanged(self) -> int:
        """Return the number of leading tokens that have not changed since the last call."""
        unchanged, self._unchanged_tokens = self._unchanged_tokens, len(self.tokens)
        return unchanged

    def _tokenize(self) -> None:
        incomplete = _incomplete_byte_count(self._open_text)
        complete = len(self._open_text) - incomplete
        text, self.incomplete_bytes = self._open_text[:complete], self._open_text[complete:]
        tokens = self._translation.draft_tokenizer.tokenize(text)
        self._replace_open_tokens(tokens)
        if len(text) > _MAX_OPEN_BYTES:
            self._finalize(tokens)

    def _replace_open_tokens(self, tokens: Sequence[int]) -> None:
        """Replace all tokens that are not final."""
        final = self._final_tokens
        unchanged = final + common_prefix_length(self.tokens[final:], tokens)
        self._unchanged_tokens = min(self._unchanged_tokens, unchanged)
        self.tokens[unchanged:] = tokens[unchanged - final :]

    def _finalize(self, open_tokens: list[int]) -> None:
        """Mark tokens as final up to a space. If there is none, stop at any token far enough from the end."""
        position, boundaries = 0, [(0, 0)]
        for count, token in enumerate(open_tokens):
            raw = self._translation.draft_token_bytes(token)
            if raw[:1].isspace() or position + _MAX_OPEN_BYTES < len(self._open_text):
                boundaries.append((count, position))
            position += len(raw)
        last_position = len(self._open_text) - _MIN_OPEN_BYTES
        count, position = max((one for one in boundaries if one[1] <= last_position), default=(0, 0))
        self._final_tokens += count
        self._open_text = self._open_text[position:]


def _incomplete_byte_count(text: bytes) -> int:
    """Return the number of trailing bytes that belong to an incomplete UTF-8 character."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte >= 0xC0:
            size = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if back < size else 0
        if byte < 0x80:
            return 0
    return 0
