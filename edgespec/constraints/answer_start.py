"""Find where a reply's answer starts. Constraints do not apply to any reasoning before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.chat.reasoning import REASONING_MARKERS, piece_with_markers
from edgespec.constraints.tokenizer import ConstraintTokenizer
from edgespec.model.base import Vocabulary

__all__ = ["Answer", "AnswerPhase", "AnswerStart", "Gap", "Opening", "Reasoning", "Unconstrained"]

# Number of tokens at the end of a prompt to search for a marker that closes the reasoning.
_PROMPT_END_TOKENS = 40


@dataclass(frozen=True, slots=True)
class Opening:
    """The phase before any reasoning or answer. `tokens` holds the tokens of the opening marker so far."""

    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The reasoning phase, which ends with the marker `close`. `tail` holds the most recent bytes."""

    close: bytes
    tail: bytes = b""


@dataclass(frozen=True, slots=True)
class Gap:
    """The phase between the reasoning and the answer. `allows_space` is true if whitespace may come next."""

    allows_space: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer phase, to which the constraint applies."""


@dataclass(frozen=True, slots=True)
class Unconstrained:
    """The phase after the reply has ended, or after a drafted token that the target can never choose."""


AnswerPhase: TypeAlias = Opening | Reasoning | Gap | Answer | Unconstrained


class AnswerStart:
    """Tracks whether a reply is in its reasoning or its answer.

    Only a marker at the start of the reply opens reasoning (see `ReasoningSplitter`). The model may use
    any marker from its chat template, unless the prompt already ends with a closing marker, or an answer
    could start with the opening marker's first token.

    Args:
        tokenizer: The vocabulary, with the tables that constraints need.
        vocabulary: The target's tokenizer.
        prompt: The prompt's tokens.
        reply_start: Text at the end of the prompt that already belongs to the reply.
        answer_tokens: Mask of the tokens that an answer can start with.

    Attributes:
        phase: The phase before the first generated token.
        text: The part of the answer that `reply_start` contains.
    """

    def __init__(
        self,
        tokenizer: ConstraintTokenizer,
        vocabulary: Vocabulary,
        prompt: Sequence[int],
        reply_start: str,
        answer_tokens: NDArray[np.bool_],
    ) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._openings: dict[tuple[int, ...], bytes] = {}
        self.phase, self.text = _phase_after(reply_start)
        if isinstance(self.phase, Opening):
            ending = b"".join(piece_with_markers(vocabulary, token) for token in prompt[-_PROMPT_END_TOKENS:])
            for tokens, close in _openings(vocabulary, ending.decode("utf-8", "replace")).items():
                if not answer_tokens[tokens[0]]:
                    self._openings[tokens] = close
            if not self._openings:
                self.phase = Answer()

    def after(self, phase: AnswerPhase, token: int) -> AnswerPhase:
        """Return the phase after a token. A token that belongs to the answer leads to `Answer`."""
        if isinstance(phase, Unconstrained) or self._tokenizer.end_mask[token]:
            return Unconstrained()
        if isinstance(phase, Opening):
            return self._after_opening((*phase.tokens, token))
        if isinstance(phase, Reasoning):
            return self._after_reasoning(phase, token)
        if isinstance(phase, Gap) and phase.allows_space and self._tokenizer.space_mask[token]:
            return Gap(allows_space=False)
        return Answer()

    def _after_opening(self, tokens: tuple[int, ...]) -> AnswerPhase:
        if tokens in self._openings:
            close = self._openings[tokens]
            return Reasoning(close) if close else Gap()
        if any(marker[: len(tokens)] == tokens for marker in self._openings):
            return Opening(tokens)
        return Answer() if len(tokens) == 1 else Unconstrained()

    def _after_reasoning(self, phase: Reasoning, token: int) -> AnswerPhase:
        text = phase.tail + piece_with_markers(self._vocabulary, token)
        _, found, rest = text.partition(phase.close)
        if not found:
            return Reasoning(phase.close, text[1 - len(phase.close) :])
        return Unconstrained() if rest.strip() else Gap(allows_space=not rest)

    def allowed(self, phase: AnswerPhase) -> NDArray[np.bool_]:
        """Return a mask of the tokens that a phase allows in addition to those that the constraint allows.

        A reply must not end during its reasoning, because it would have no answer.
        """
        if isinstance(phase, Opening):
            done = len(phase.tokens)
            openings = [tokens for tokens in self._openings if tokens[:done] == phase.tokens]
            return self._tokenizer.mask([tokens[done] for tokens in openings])
        if isinstance(phase, Gap) and phase.allows_space:
            return self._tokenizer.space_mask
        if isinstance(phase, Reasoning):
            allowed = ~self._tokenizer.end_mask
            # Exclude tokens that contain both the end of the marker and the start of the answer.
            for done in range(1, len(phase.close)):
                if phase.tail.endswith(phase.close[:done]):
                    allowed &= ~self._tokenizer.longer_than(phase.close[done:])
            return allowed
        return self._tokenizer.mask([])


def _phase_after(reply_start: str) -> tuple[AnswerPhase, str]:
    """Return the phase after `reply_start`, and the answer text that it contains."""
    text = reply_start.lstrip()
    if not text:
        return Opening(), reply_start
    opening = next((marker for marker in REASONING_MARKERS if text.startswith(marker)), None)
    if opening is None:
        return Answer(), reply_start
    close, text = REASONING_MARKERS[opening], text[len(opening) :]
    _, found, answer = text.partition(close) if close else ("", "", text)
    if close and not found:
        return Reasoning(close.encode(), text.encode()[1 - len(close.encode()) :]), ""
    return (Answer(), answer.lstrip()) if answer.strip() else (Gap(allows_space=not answer), "")


def _openings(vocabulary: Vocabulary, prompt: str) -> dict[tuple[int, ...], bytes]:
    closes = tuple(close for close in REASONING_MARKERS.values() if close)
    if prompt.rstrip().endswith(closes):
        return {}
    return {
        tuple(vocabulary.tokenize(marker, special=True, start=False)): close.encode()
        for marker, close in REASONING_MARKERS.items()
        if marker in (vocabulary.chat_template or "")
    }
