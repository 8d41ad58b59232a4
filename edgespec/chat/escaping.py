"""Escape control tokens in messages, so that users cannot inject them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from edgespec.backends.base import Progress, Vocabulary
from edgespec.chat.message import Message
from edgespec.chat.tokenizing import tokenize
from edgespec.chat.waiting import check_cancelled

__all__ = ["ControlTokenEscaping", "TextScanner", "is_control", "literal"]

# Maximum number of texts whose token counts are cached, which takes about 5 MB.
_MAX_CACHED_SCANS = 16_384


@dataclass(frozen=True, slots=True)
class Scan:
    """The token count and the control tokens of a text.

    Attributes:
        token_count: Number of tokens.
        control_tokens: The control tokens in the text, each once, in the order of their first appearance.
    """

    token_count: int
    control_tokens: tuple[int, ...]


class TextScanner:
    """Counts the tokens of texts and finds control tokens in them. Tokenizes each text only once."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        # Cached results, keyed by a hash of the text.
        self._scans: dict[bytes, Scan] = {}

    def scan(self, text: str, progress: Progress | None) -> Scan:
        """Return the token count and the control tokens of a text. Raises CancelledError."""
        key = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        scan = self._scans.get(key)
        if scan is None:
            check_cancelled(progress)
            tokens = tokenize(self._vocabulary, text, special=True, start=False, progress=progress)
            control = [token for token in dict.fromkeys(tokens) if is_control(self._vocabulary, token)]
            scan = self._scans[key] = Scan(len(tokens), tuple(control))
            while len(self._scans) > _MAX_CACHED_SCANS:
                self._scans.pop(next(iter(self._scans)), None)
        return scan


class ControlTokenEscaping:
    """Replaces control tokens typed by the user with placeholders, so that they are tokenized as plain text.

    Attributes:
        literals: The text of each replaced control token, by token id.
    """

    def __init__(self, vocabulary: Vocabulary, messages: Sequence[Message]) -> None:
        self._vocabulary = vocabulary
        self.literals: dict[int, str] = {}
        used_characters = set().union(*(message.content + message.reasoning for message in messages))
        # Use two Unicode private-use characters that occur in no message to mark placeholders.
        unused = (chr(code) for code in range(0xE000, 0xF900) if chr(code) not in used_characters)
        self._left, self._right = next(unused), next(unused)

    def escape(self, message: Message, scanner: TextScanner, progress: Progress | None) -> Message:
        """Return the message with its control tokens replaced by placeholders."""
        content, reasoning = (
            self._escape(text, scanner.scan(text, progress).control_tokens) if text else ""
            for text in (message.content, message.reasoning)
        )
        return replace(message, content=content, reasoning=reasoning)

    def _escape(self, text: str, control_tokens: Sequence[int]) -> str:
        for token in control_tokens:
            found = literal(self._vocabulary, token)
            if found in text:
                text = text.replace(found, f"{self._left}{token}{self._right}")
                self.literals[token] = found
        return text

    def unescape(self, text: str) -> str:
        """Return the text with placeholders replaced by the user's original text."""
        return re.sub(f"{self._left}(\\d+){self._right}", lambda mark: self.literals[int(mark[1])], text)


def is_control(vocabulary: Vocabulary, token: int) -> bool:
    """Return whether a token is a control token, which has a text form but adds no text to a reply."""
    return vocabulary.piece(token) == b"" and vocabulary.raw_piece(token) != b""


def literal(vocabulary: Vocabulary, token: int) -> str:
    """Return the text form of a control token."""
    return vocabulary.raw_piece(token).decode("utf-8", "replace")
