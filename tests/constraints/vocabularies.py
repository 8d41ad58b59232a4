"""Small vocabularies for tests of constraints."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.model.base import Vocabulary

END = 0


class ByteVocabulary:
    """A vocabulary of all bytes and some longer pieces. Token 0 ends a reply. Control tokens come last."""

    bos_text = ""
    eos_text = "<end>"

    def __init__(
        self, pieces: Sequence[bytes] = (), control: Sequence[bytes] = (), template: str | None = None
    ) -> None:
        self.chat_template = template
        self._raw = [b"<end>", *(bytes([byte]) for byte in range(256)), *pieces, *control]
        self._control = {END, *range(257 + len(pieces), len(self._raw))}
        self.size = len(self._raw)
        self._ids = {piece: token for token, piece in enumerate(self._raw)}
        self._text_ids = {piece: token for piece, token in self._ids.items() if token not in self._control}
        self._longest = max(map(len, self._raw))

    def tokenize(self, text: str, *, special: bool, start: bool) -> list[int]:
        data, tokens, place = text.encode(), list[int](), 0
        known = self._ids if special else self._text_ids
        while place < len(data):
            ends = range(min(place + self._longest, len(data)), place, -1)
            end = next(end for end in ends if data[place:end] in known)
            tokens.append(known[data[place:end]])
            place = end
        return tokens

    def min_tokens(self, text: str) -> int:
        return 0

    def piece(self, token: int) -> bytes:
        return b"" if token in self._control else self._raw[token]

    def raw_piece(self, token: int) -> bytes:
        return self._raw[token]

    def same_entries(self, other: Vocabulary) -> bool:
        return False

    def is_end(self, token: int) -> bool:
        return token == END

    def text(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self.piece, tokens)).decode("utf-8", "replace")
