"""Wrap a model's vocabulary as an llguidance tokenizer."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import CapabilityError
from edgespec.model.base import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLTokenizer

__all__ = ["ConstraintTokenizer"]

# llguidance treats tokens that begin with this byte as control tokens. The byte never occurs in UTF-8.
_CONTROL_BYTE = b"\xff"
# Control character to prepend to text before tokenizing it. Tokenizers that add a leading space then add it
# before this character rather than before the text.
_TEXT_START = "\x02"
# Maximum size in bytes of a whitespace token between the reasoning and the answer.
_MAX_SPACE_BYTES = 4


class ConstraintTokenizer:
    """Wraps a vocabulary with the tables that constraints need. Creating one takes up to a second.

    Attributes:
        size: Number of tokens, and the length of all masks.
        pieces: The bytes that each token adds to a reply. Control tokens add none.
        end_tokens: The tokens that end a reply.
    """

    def __init__(self, vocabulary: Vocabulary, size: int) -> None:
        """Read all tokens of a vocabulary.

        Args:
            vocabulary: The target's vocabulary.
            size: Number of logits that the target returns per token, which can exceed the vocabulary size.

        Raises:
            CapabilityError: The vocabulary has no token that ends a reply.
        """
        self.size = max(size, vocabulary.size)
        self.pieces = [vocabulary.piece(token) for token in range(vocabulary.size)]
        self.end_tokens = [token for token in range(vocabulary.size) if vocabulary.is_end(token)]
        if not self.end_tokens:
            raise CapabilityError(
                "this model has no token that ends a reply, so its replies cannot be restricted to a schema,"
                " grammar or other constraint",
                "choose another model",
            )
        self._vocabulary = vocabulary
        self._longer: dict[bytes, NDArray[np.bool_]] = {}

    @cached_property
    def for_llguidance(self) -> LLTokenizer:
        """The tokenizer as an llguidance object. Control tokens and end tokens never match text."""
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Tokenizer(self, self._vocabulary)), eos_token=self.end_tokens)

    @cached_property
    def usual_end_token(self) -> int:
        """The end token to emit if a constraint allows only end tokens. EOS is preferred."""
        eos = self._vocabulary.tokenize(self._vocabulary.eos_text, special=True, start=False)
        return eos[0] if len(eos) == 1 and eos[0] in self.end_tokens else self.end_tokens[0]

    @cached_property
    def end_mask(self) -> NDArray[np.bool_]:
        """Mask of the tokens that end a reply."""
        return self.mask(self.end_tokens)

    @cached_property
    def space_mask(self) -> NDArray[np.bool_]:
        """Mask of the whitespace tokens that can separate the answer from the reasoning."""
        pieces = enumerate(self.pieces)
        return self.mask(
            [token for token, piece in pieces if piece.isspace() and len(piece) <= _MAX_SPACE_BYTES]
        )

    def longer_than(self, start: bytes) -> NDArray[np.bool_]:
        """Return a mask of the tokens that start with `start` and continue with more than whitespace."""
        if start not in self._longer:
            pieces = enumerate(self.pieces)
            longer = [
                token for token, piece in pieces if piece.startswith(start) and piece[len(start) :].strip()
            ]
            self._longer[start] = self.mask(longer)
        return self._longer[start]

    def mask(self, tokens: list[int]) -> NDArray[np.bool_]:
        """Return a boolean array [size] that is True for the given tokens."""
        mask = np.zeros(self.size, np.bool_)
        mask[tokens] = True
        return mask

    def unpacked(self, bits: bytes) -> NDArray[np.bool_]:
        """Unpack llguidance's mask, which has one bit per token, into a boolean array [size]."""
        allowed = np.unpackbits(np.frombuffer(bits, np.uint8), count=len(self.pieces), bitorder="little")
        return np.pad(allowed, (0, self.size - len(allowed))).astype(np.bool_)


class _Tokenizer:
    """Adapts a vocabulary to the tokenizer interface that llguidance's `TokenizerWrapper` expects."""

    def __init__(self, tokenizer: ConstraintTokenizer, vocabulary: Vocabulary) -> None:
        ends = set(tokenizer.end_tokens)
        self.eos_token_id = tokenizer.end_tokens[0]
        self.bos_token_id = None
        self.special_token_ids: list[int] = []
        self.tokens = [
            piece if piece and token not in ends else _CONTROL_BYTE + vocabulary.raw_piece(token)
            for token, piece in enumerate(tokenizer.pieces)
        ]
        self._pieces = tokenizer.pieces
        self._ids = {piece: token for token, piece in enumerate(self.tokens) if piece}
        self._longest = max(map(len, self._ids))
        self._vocabulary = vocabulary
        self._start = self._tokenize(_TEXT_START)

    def __call__(self, text: bytes) -> list[int]:
        """Tokenize text the way the model would usually generate it.

        If the vocabulary's tokenizer would change the text, greedily choose the longest matching token at
        each position.
        """
        tokens = self._tokenize(_TEXT_START + text.decode("utf-8", "replace"))[len(self._start) :]
        if b"".join(self._pieces[token] for token in tokens) == text:
            return tokens
        tokens, start = [], 0
        while start < len(text):
            ends = range(min(start + self._longest, len(text)), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), None)
            if end is None:
                break
            tokens.append(self._ids[text[start:end]])
            start = end
        return tokens

    def _tokenize(self, text: str) -> list[int]:
        return self._vocabulary.tokenize(text, special=False, start=False)
