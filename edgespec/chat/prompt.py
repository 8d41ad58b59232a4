"""From messages to the tokens of a prompt."""

from __future__ import annotations

import re
from collections.abc import Sequence

from edgespec.backends.base import Vocabulary
from edgespec.chat.message import Message
from edgespec.chat.template import ChatTemplate

__all__ = ["Prompt", "PromptBuilder"]

# A prompt as text and as tokens.
Prompt = tuple[str, list[int]]


class PromptBuilder:
    """Renders and tokenizes conversations for one model.

    It remembers the tokens of the last turn: a reply that was sampled rarely tokenizes back to the very
    tokens that were drawn, and with other tokens the cache would be lost from there on.
    """

    def __init__(self, template: ChatTemplate, vocabulary: Vocabulary) -> None:
        self._template = template
        self._vocabulary = vocabulary
        self._known: Prompt = ("", [])

    def build(self, messages: Sequence[Message]) -> Prompt:
        """The prompt for the assistant's next reply. Raises TemplateError."""
        literals: list[str] = []
        text = self._template.render([self._shielded(message, literals) for message in messages])
        known_text, known_tokens = self._known
        if known_text and text.startswith(known_text):
            rest = self._tokenize(text[len(known_text) :], literals, start=False)
            # Only a control token is sure to begin at the seam whatever stands before it.
            if rest and self._vocabulary.piece(rest[0]) == b"":
                return text, known_tokens + rest
        start = not (self._vocabulary.start_text and text.startswith(self._vocabulary.start_text))
        return text, self._tokenize(text, literals, start=start)

    def remember(self, prompt: Prompt, reply: Sequence[int]) -> None:
        """These tokens followed that prompt."""
        kept = list(reply[:-1]) if reply and self._vocabulary.is_end(reply[-1]) else list(reply)
        said = b"".join(self._vocabulary.piece(token) for token in kept)
        self._known = (prompt[0] + said.decode("utf-8", "replace"), prompt[1] + kept)

    def _shielded(self, message: Message, literals: list[str]) -> Message:
        """Put a mark for every control token somebody wrote into a message: there it is only text."""
        content = message.content
        for token in self._vocabulary.tokenize(content, special=True, start=False):
            literal = self._vocabulary.raw_piece(token).decode("utf-8", "replace")
            if literal and literal in content and not self._vocabulary.piece(token):
                content = content.replace(literal, f"\ue000{len(literals)}\ue001")
                literals.append(literal)
        return message if content is message.content else Message(message.role, content)

    def _tokenize(self, text: str, literals: Sequence[str], start: bool) -> list[int]:
        tokens: list[int] = []
        for i, part in enumerate(re.split("\ue000(\\d+)\ue001", text) if literals else [text]):
            if i % 2 and int(part) < len(literals):
                tokens += self._vocabulary.tokenize(literals[int(part)], special=False, start=False)
            elif part:
                tokens += self._vocabulary.tokenize(part, special=True, start=start and not tokens)
        return tokens
