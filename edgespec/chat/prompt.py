"""From messages to the tokens of a prompt."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from edgespec.backends.base import Vocabulary
from edgespec.chat.message import Message
from edgespec.chat.template import ChatTemplate

__all__ = ["PromptBuilder", "RenderedPrompt"]

# A prompt as text and as tokens.
RenderedPrompt = tuple[str, list[int]]


class PromptBuilder:
    """Renders and tokenizes conversations for one model.

    It remembers the tokens of the last turn: a reply that was sampled rarely tokenizes back to the very
    tokens that were drawn, and with other tokens the cache would be lost from there on. earlier: texts that
    were read before, as tokens, where a conversation that goes on may find its own.
    """

    def __init__(
        self,
        template: ChatTemplate,
        vocabulary: Vocabulary,
        earlier: Callable[[], Iterable[Sequence[int]]] = tuple,
    ) -> None:
        self.template = template
        self._vocabulary = vocabulary
        self._earlier = earlier
        self._known: RenderedPrompt = ("", [])

    def build(self, messages: Sequence[Message]) -> RenderedPrompt:
        """The prompt for the assistant's next reply. Raises TemplateError."""
        shield = _Shield(self._vocabulary, messages)
        text = self.template.render([shield.over(message) for message in messages])
        if not self._known[0]:
            self._known = self._recalled(text)
        known_text, known_tokens = self._known
        if known_text and text.startswith(known_text):
            rest = self._tokenize(text[len(known_text) :], shield, start=False)
            # Only a control token is sure to begin at the seam whatever stands before it.
            if rest and self._vocabulary.piece(rest[0]) == b"":
                return text, known_tokens + rest
        start = not (self._vocabulary.bos_text and text.startswith(self._vocabulary.bos_text))
        return text, self._tokenize(text, shield, start=start)

    def _recalled(self, text: str) -> RenderedPrompt:
        """The longest beginning of `text` that an earlier text spells, up to a control token."""
        known: RenderedPrompt = ("", [])
        for tokens in self._earlier():
            spelled = self._spelled(tokens, text)
            if len(spelled[0]) > len(known[0]):
                known = spelled
        return known

    def _spelled(self, tokens: Sequence[int], text: str) -> RenderedPrompt:
        """How far these tokens spell `text`, up to a control token that both go on with, or to their end."""
        wanted, at, spelled = text.encode("utf-8", "replace"), 0, ("", 0)
        for i, token in enumerate(tokens):
            control = _is_control(self._vocabulary, token)
            piece = self._vocabulary.raw_piece(token) if control else self._vocabulary.piece(token)
            if not wanted.startswith(piece, at):
                if i == 0 and control:
                    continue  # one the tokenizer put first by itself
                break
            if control:
                spelled = (wanted[:at].decode("utf-8", "replace"), i)
            at += len(piece)
        else:
            rest = self._vocabulary.tokenize(
                wanted[at:].decode("utf-8", "replace"), special=True, start=False
            )
            if rest and _is_control(self._vocabulary, rest[0]):
                spelled = (wanted[:at].decode("utf-8", "replace"), len(tokens))
        return spelled[0], list(tokens[: spelled[1]])

    def remember(self, prompt: RenderedPrompt, reply: Sequence[int]) -> None:
        """These tokens followed that prompt."""
        kept = list(reply[:-1]) if reply and self._vocabulary.is_end(reply[-1]) else list(reply)
        said = b"".join(self._vocabulary.piece(token) for token in kept)
        self._known = (prompt[0] + said.decode("utf-8", "replace"), prompt[1] + kept)

    def _tokenize(self, text: str, shield: _Shield, start: bool) -> list[int]:
        vocabulary = self._vocabulary
        tokens = vocabulary.tokenize(text, special=True, start=start)
        if not shield.literals:
            return tokens
        # Between the template's own control tokens all is plain text, what was shielded included.
        whole, tokens = [token for token in tokens if _is_control(vocabulary, token)], []
        at = 0
        for token in whole:
            literal = _literal(vocabulary, token)
            found = text.find(literal, at)
            if found < 0:  # one the tokenizer put first by itself
                tokens.append(token)
                continue
            if found > at:
                tokens += vocabulary.tokenize(shield.off(text[at:found]), special=False, start=False)
            tokens.append(token)
            at = found + len(literal)
        if at < len(text):
            tokens += vocabulary.tokenize(shield.off(text[at:]), special=False, start=False)
        return tokens


class _Shield:
    """Marks in place of the control tokens somebody wrote into a message: there they are only text."""

    def __init__(self, vocabulary: Vocabulary, messages: Sequence[Message]) -> None:
        self._vocabulary = vocabulary
        self.literals: dict[int, str] = {}
        said = set().union(*(message.content for message in messages))
        free = (chr(code) for code in range(0xE000, 0xF900) if chr(code) not in said)
        self._left, self._right = next(free), next(free)

    def over(self, message: Message) -> Message:
        """The message with its control tokens marked."""
        content = message.content
        for token in self._vocabulary.tokenize(content, special=True, start=False):
            literal = _literal(self._vocabulary, token)
            if literal and literal in content and _is_control(self._vocabulary, token):
                content = content.replace(literal, f"{self._left}{token}{self._right}")
                self.literals[token] = literal
        return message if content is message.content else Message(message.role, content)

    def off(self, text: str) -> str:
        """Text as it was written."""
        return re.sub(f"{self._left}(\\d+){self._right}", lambda mark: self.literals[int(mark[1])], text)


def _is_control(vocabulary: Vocabulary, token: int) -> bool:
    return vocabulary.piece(token) == b"" and vocabulary.raw_piece(token) != b""


def _literal(vocabulary: Vocabulary, token: int) -> str:
    return vocabulary.raw_piece(token).decode("utf-8", "replace")
